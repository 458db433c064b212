"""Calls that are recorded into a CUDA graph instead of being made.

A graph is replayed without any Python, so all that an eager call can put right later must be right
when it is captured. A captured collective is therefore an agreed point of the registry: the ranks
compare what they capture, and register what is not registered yet, so that the first replay is
zero-copy. A rank that captures something else, or makes an eager call there, is a MismatchError on
all ranks; then nothing is recorded, and the capture can be ended and thrown away.

Point-to-point calls are recorded without a word to the peers, who may do theirs at another time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from ..driver.api import Driver
from ..errors import AgreementError, Error, MismatchError, NotZeroCopyError
from ..group import Across
from ..group.naming import name_ranks, sides
from ..memory.blocks import Segment
from ..registration import Choice, Lease, Registry, pin, refusal
from ..registration.agreed import News
from .call import Call, describe
from .checks import Checker
from .dtypes import DTYPES
from .engine import Agreed, Engine
from .plan import Operation
from .point_to_point import Letter

__all__ = ["Counts", "Recorder"]

#: The agreed point, on all ranks.
TAG = "a call in a capture"
#: What a rank says of the data of a call: it is not copied, it is, it would be and must not.
_ZERO_COPY, _STAGED, _REFUSED = range(3)
#: Items of a call's word that must be equal: number in the capture, operation, dtype, reduction,
#: root, count, order. Behind them: what becomes of the data, how many eager calls came before, and
#: the places of the arrays. The word of a rank that is in an eager call is what it calls, and
#: whether that counts for registration.
_EQUAL, _EAGER = 7, 2
_FATE, _AFTER, _PLACES = _EQUAL, _EQUAL + 1, _EQUAL + 2


class Counts:
    """How many eager collectives a communicator has enqueued."""

    def __init__(self) -> None:
        self.eager = 0
        #: Those that count for registration.
        self.numbered = 0

    def add(self, numbered: bool) -> None:
        """One more."""
        self.eager += 1
        self.numbered += numbered


class Recorder:
    """Records the calls of one rank.

    Args:
        checker: The names of calls, for errors.
        driver: Knows captures.
        registry: Has the leases.
        engine: Records.
        counts: Of the eager calls.
        across: Ranks of other nodes; None where there are none.
        strict: Whether to refuse calls that copy.
    """

    def __init__(
        self,
        checker: Checker,
        driver: Driver,
        registry: Registry,
        engine: Engine,
        counts: Counts,
        across: Across | None,
        *,
        strict: bool,
    ) -> None:
        self._checker = checker
        self._driver = driver
        self._registry = registry
        self._engine = engine
        self._strict = strict
        self._counts = counts
        self._across = across

    def record(self, work: Call | Letter, stream: Any) -> None:
        """Record a call on a stream that is capturing. Collective for a collective.

        Raises:
            MismatchError: ranks capture different calls, or one is at another call.
            AgreementError: a rank could not register its arrays, or is strict and would copy.
            NotZeroCopyError: that rank is this one.
            PeerTimeoutError: a rank did not come.
        """
        if isinstance(work, Call):
            self._collective(work, stream)
        else:
            self._letter(work, stream)

    def _collective(self, call: Call, stream: Any) -> None:
        arrays = [each for each in (call.input, call.output) if each is not None]
        with self._leased(stream, call) as bid:
            with self._everywhere(call):
                said = self._agree(call, arrays, bid)
                staging = self._staging(call, said)
            lease = bid.lease
            agreed = None if staging else Agreed(_inputs(said), lease.keep_windows)
            self._note_counterparts(lease, said)
            if lease.lane is None:
                lease.take_lane(self._engine.open_lane(), self._engine.close_lane)
            assert lease.lane is not None
            self._engine.fit_lane(lease.lane, call, agreed)
            lease.collectives += 1
            lease.keep(arrays, self._engine)
            self._engine.enqueue(call, stream, lease.lane)

    def _letter(self, letter: Letter, stream: Any) -> None:
        arrays = [each.array for each in (letter.given, letter.taken) if each is not None]
        with self._leased(stream, letter) as bid:
            bid.open()
            bid.held += self._registry.share(bid.lease.missing(self._segments(arrays)), bid.lease)
            reasons = [place.reason for place in self._engine.places(letter) if place.reason]
            if reasons and self._strict:
                raise self._refused(letter.call, reasons)
            bid.lease.keep(arrays, self._engine)
            self._engine.enqueue(letter, stream)

    @contextmanager
    def _leased(self, stream: Any, work: Call | Letter) -> Iterator[_Bid]:
        """A lease that is as before if the block fails."""
        bid = _Bid(self._driver, self._registry, stream)
        try:
            yield bid
        except BaseException as error:
            bid.take_back()
            if bid.interrupted is not None:
                self._counts.add(bid.interrupted)  # the peers' call, which is none here
                with suppress(MismatchError):  # that of this capture says more
                    self._engine.decline()
            if isinstance(error, MismatchError):
                raise MismatchError(
                    f"{self._checker.name(str(work).rpartition('.')[2])} in a capture: {error}; "
                    "nothing was recorded: end the capture and drop its graph"
                ) from error
            raise
        bid.settle()

    def _agree(self, call: Call, arrays: Sequence[Any], bid: _Bid) -> Mapping[int, News]:
        """Compare the call with the peers', and register its arrays."""

        def choose() -> Choice:
            bid.open()
            missing = bid.lease.missing(self._segments(arrays))
            bid.held += self._registry.share(missing, bid.lease)
            fresh = pin([segment for segment in missing if segment not in bid.held])
            bid.held += fresh
            return Choice(fresh, holder=bid.lease, call=self._word(call, bid.lease))

        def check(said: Mapping[int, News]) -> None:
            eager = [news.call for news in said.values() if len(news.call) == _EAGER]
            if eager:
                bid.interrupted = eager[0][-1]
            _compare(said)

        return self._registry.agree(TAG, choose, check)

    def _everywhere(self, call: Call) -> AbstractContextManager[None]:
        """A block that fails on all nodes where it fails on one, or where they capture others."""
        return (
            nullcontext() if self._across is None else self._across.step(f"capture {_said(call)}")
        )

    def answer(self, awaited: Collection[int], number: int, call: Call) -> None:
        """Tell ranks that wait in :meth:`record` for this one, which is in an eager call.

        A rank that has enqueued that call too is not told: its turn will come.

        Args:
            awaited: The ranks that the eager call waits for.
            number: Of that call, from 1.
            call: What it is.
        """
        waiting = self._registry.channel.waiting(TAG)
        words = [News.from_bytes(said).call for rank, said in waiting.items() if rank in awaited]
        if any(len(word) > _AFTER and word[_AFTER] < number for word in words):
            word = (_said(call), call.operation is not Operation.BARRIER)
            with suppress(MismatchError):  # which the eager call raises by itself
                self._registry.agree(TAG, lambda: Choice(call=word), _compare)

    def _word(self, call: Call, lease: Lease) -> tuple[Any, ...]:
        places = [self._place(array) for array in (call.input, call.output)]
        return (
            lease.collectives + 1, call.operation, call.code, call.reduction, call.root,
            call.columns, call.fortran, self._fate(call), self._counts.eager, places,
        )  # fmt: skip

    def _place(self, array: Any) -> tuple[int, int, int, int] | None:
        """Arena, offset, generation and bytes of an array; None if peers cannot reach it."""
        if array is None or not self._segments([array]):
            return None
        return (*self._registry.name(array), array.data.mem.segment.generation, array.nbytes)

    def _note_counterparts(self, lease: Lease, said: Mapping[int, News]) -> None:
        places = {rank: news.call[_PLACES] for rank, news in said.items()}
        for which, mine in enumerate(places[self._registry.channel.rank]):
            if mine is not None:
                lease.counterparts[mine[0], mine[1]] = {
                    rank: each[which] and (each[which][0], each[which][1])
                    for rank, each in places.items()
                }

    def _segments(self, arrays: Sequence[Any]) -> list[Segment]:
        """The segments of arrays that can be registered."""
        memories = [array.data.mem for array in arrays if array.nbytes]
        return [memory.segment for memory in memories if not refusal(self._registry, memory)]

    def _fate(self, call: Call) -> int:
        if not any(place.reason for place in self._engine.places(call)):
            return _ZERO_COPY
        return _REFUSED if self._strict else _STAGED

    def _staging(self, call: Call, said: Mapping[int, News]) -> bool:
        """Whether any rank stages, now that everything is registered."""
        fates = {rank: news.call[_FATE] for rank, news in said.items()}
        if any(news.offers for news in said.values()):
            channel = self._registry.channel
            now = channel.all_gather(bytes([self._fate(call)]), tag=f"{TAG}: data")
            fates = {rank: one[0] for rank, one in zip(channel.ranks, now, strict=True)}
        refusing = [rank for rank, fate in fates.items() if fate == _REFUSED]
        name = self._checker.name(call.operation.call)
        if self._registry.channel.rank in refusing:
            reasons = [place.reason for place in self._engine.places(call) if place.reason]
            raise self._refused(call.operation.call, reasons)
        if refusing:
            raise AgreementError(
                f"{name} in a capture: the communicator of {name_ranks(refusing)} is strict and "
                "would copy the data; nothing was recorded on any rank",
                refusing[0],
            )
        return _STAGED in fates.values()

    def _refused(self, call: str, reasons: Sequence[str]) -> NotZeroCopyError:
        return NotZeroCopyError(
            f"{self._checker.name(call)} in a capture: {'; '.join(reasons)}; nothing was recorded; "
            "take the array from a cupy_zc.MemoryPool, or from empty() of the communicator"
        )


class _Bid:
    """What one call adds to a lease, until it is recorded."""

    def __init__(self, driver: Driver, registry: Registry, stream: Any) -> None:
        self.lease: Lease
        #: Segments that the lease did not hold before.
        self.held: list[Segment] = []
        #: Where a peer waits in an eager call: whether that has a number.
        self.interrupted: bool | None = None
        self._driver = driver
        self._registry = registry
        self._stream = stream
        self._opened = False

    def open(self) -> None:
        """Find the lease of the capture, or open it.

        Raises:
            DriverError: the capture is not valid any more.
        """
        info = self._driver.capture_info(self._stream)
        if info is None:
            raise Error("the capture was ended by another thread in the middle of a call")
        leases = self._registry.leases
        found = leases.find(info.id)
        self._opened = found is None
        self.lease = leases.open(info, self._stream) if found is None else found

    def settle(self) -> None:
        """The call was recorded."""
        self.lease.hold(self.held)

    def take_back(self) -> None:
        """It was not."""
        if hasattr(self, "lease"):
            self._registry.let_go(self.lease, self.held)
            if self._opened:
                self._registry.leases.abandon(self.lease)


def _inputs(said: Mapping[int, News]) -> dict[int, tuple[int, int]]:
    """Arena and offset of the inputs that peers reach."""
    places = {rank: news.call[_PLACES][0] for rank, news in said.items()}
    return {rank: (place[0], place[1]) for rank, place in places.items() if place is not None}


def _compare(said: Mapping[int, News]) -> None:
    """Raise on all ranks where not all capture the same."""
    calls = {rank: tuple(news.call[:_EQUAL]) for rank, news in said.items()}
    if len(set(calls.values())) > 1:
        shown = {rank: _show(*call) for rank, call in calls.items()}
        raise MismatchError(f"the ranks do not capture the same call: {sides(shown, 'is at')}")


def _said(call: Call) -> str:
    """A call in words."""
    return describe(
        call.operation, DTYPES[call.code], call.reduction, call.root, call.columns, call.fortran
    )


def _show(first: Any, *rest: int) -> str:
    if len(rest) < _EAGER:
        return f"{first}, which it does not capture"
    kind, code, reduction, root, count, fortran = rest
    call = describe(kind, DTYPES[code], reduction, root, count, fortran)
    return f"{call} as call {first} of its graph"
