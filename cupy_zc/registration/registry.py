"""Registrations of one rank: what its peers have mapped, who asked for it, and until when.

What is registered is whole segments. A segment is *published* while somebody holds it: a
:class:`Registration`, the symmetric heap, or the registry itself for segments that collectives
touched (those are held only as long as the pool keeps them). Published means that, as last agreed,
every peer has it mapped.

Letting go is local: from then on the segment counts as unregistered here. The peers unmap it at the
next *agreed point*, that is at the next call in which the ranks talk anyway (:mod:`.agreed`). They
need not have let go of theirs: what a rank publishes is its own, and peers touch it only where the
rank itself names it in the entry barrier of a collective.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from ..config import settings
from ..driver.api import Driver, SegmentHandle
from ..errors import AgreementError, ClosedError
from ..group import Channel
from ..memory import MemoryPool
from ..memory.arena import Arena
from ..memory.blocks import Segment
from .agreed import News, carry_out
from .explain import Rule, judge
from .graph import Leases
from .lanes import Lanes
from .multicast import Multicast
from .published import Entry, Location, Registration
from .targets import pin, pin_target, refusal
from .window import SegmentName, Windows

__all__ = ["Choice", "Registry", "is_agreed"]

_log = logging.getLogger("cupy_zc")

#: Call numbers that are multiples of it are agreed points, besides the powers of two.
EVERY = 1024


def is_agreed(number: int) -> bool:
    """Whether the ranks talk at the collective call of this number."""
    return not number & (number - 1) or not number % EVERY


#: What holds a segment that collectives touched.
_AUTOMATIC = object()


class Choice(NamedTuple):
    """What a rank brings to an agreed point."""

    #: To be published.
    segments: Sequence[Segment] = ()
    #: What holds them from then on.
    holder: object = None
    #: Arena and offset of the one array they are for, if there is one.
    array: tuple[int, int] | None = None
    #: What the call is, as plain data, where the ranks compare that.
    call: tuple[Any, ...] = ()


class Registry:
    """What one rank has registered, and what it reaches of its peers.

    :meth:`register`, :meth:`at_call`, :meth:`collect` and :meth:`agree` are collective and for one
    thread at a time (the communicator has a lock); a :class:`Registration` may be ended by any
    thread at any time.

    Args:
        driver: The driver of the memory, the same object that the pools use.
        device: The device of this rank.
        channel: The ranks of the node; stays the caller's.
        timeout: Seconds to wait where user code may delay a peer; None for ``settings().timeout``.
    """

    def __init__(
        self, driver: Driver, device: int, channel: Channel, *, timeout: float | None = None
    ) -> None:
        self.driver = driver
        self.device = device
        self.channel = channel
        self.timeout = settings().timeout if timeout is None else timeout
        self.windows = Windows(driver, device, channel.rank)
        #: Where in this process a byte of a rank is: ``address(rank, arena, offset)``.
        self.address = self.windows.address
        #: By lane: of graphs that are gone here, and may be replayed elsewhere.
        self._lingering: dict[int, tuple[object, Sequence[Segment]]] = {}
        #: Of graphs; released ones are told to the peers with everything else.
        self.lanes = Lanes(channel.rank, channel.ranks)
        self.leases = Leases(self)
        self.closed = False
        self._versions = itertools.count(1)
        #: Another one whenever something is registered, mapped or let go of.
        self.version = 0
        self._published: dict[Segment, Entry] = {}
        self.multicast = Multicast(self, self._published)
        #: Let go of, and not known to be unmapped everywhere yet.
        self._leaving: list[SegmentName] = []
        self._touched: dict[Segment, None] = {}
        self._registrations: set[Registration] = set()
        #: Pools may go; their numbers are not given again.
        self._numbers: weakref.WeakKeyDictionary[Arena, int] = weakref.WeakKeyDictionary()
        self._live_numbers: set[int] = set()
        self._next_number = 1

    # What users ask for

    def register(self, target: Any, call: str = "Communicator.register") -> Registration:
        """Let the peers reach an array, or all a pool has. Collective; each rank gives its own.

        Args:
            target: A ``cupy.ndarray`` whose memory is of a pool of this package, or a
                :class:`~cupy_zc.MemoryPool` (the segments it has now on this device). Whole
                segments are registered; ranks may hold different numbers of them.
            call: The public name, for errors.

        Raises:
            AgreementError: a rank could not; on all of them, and everything is as before.
            MismatchError: ranks are at different calls. PeerTimeoutError: a rank did not come.
            ClosedError: the registry is closed.
        """
        registration = Registration(target, self._end)

        def choose() -> Choice:
            segments = pin_target(self, target, call)
            registration.hold(segments)
            one = len(segments) == 1 and not isinstance(target, MemoryPool)
            return Choice(segments, registration, self.name(target) if one else None)

        try:
            said = self.agree(call, choose)
        except BaseException:
            registration.deregister()
            raise
        registration.arrays = {rank: news.array for rank, news in said.items()}
        self._registrations.add(registration)
        _log.info("registered rank=%d bytes=%d by=%s", self.channel.rank, registration.nbytes, call)
        return registration

    def collect(self, call: str = "Communicator.collect") -> None:
        """Carry out what was deregistered. Collective. Errors: as :meth:`register`."""
        self.agree(call, Choice)

    def explain(self, array: Any) -> tuple[Rule, ...]:
        """Every rule that decides about zero-copy for an array, with what to do. Local.

        Raises:
            InvalidTypeError: it is not a ``cupy.ndarray``.
        """
        return judge(self, array)

    # What collectives ask for

    def locate(self, array: Any) -> Location:
        """Where an array is, and whether the peers can reach it there. Local and cheap."""
        data = array.data
        segment = getattr(data.mem, "segment", None)
        if isinstance(segment, Segment):
            entry = self._published.get(segment)
            if entry is not None and entry.holders:
                offset = segment.offset + data.ptr - segment.address
                return Location(entry.name.arena, offset, True, "", segment)
        if not array.nbytes:
            return Location(0, 0, True, "", None)
        reason = refusal(self, data.mem)
        if reason:
            return Location(-1, 0, False, reason, None)
        return Location(-1, 0, False, "its segment is not registered", segment)

    def touched(self, segment: Segment) -> None:
        """Note a segment that a collective used without registration, for the next agreed call.

        It does not keep the memory from going back to the driver.
        """
        self._touched[segment] = None

    def at_call(self, number: int) -> None:
        """Register what collectives touched, where ``number`` is an agreed one. Collective there.

        Agreed are 1, 2, 4, 8, ... and the multiples of 1,024. What is registered so is not pinned:
        when its pool gives it back to the driver, the registration ends by itself.

        A failure to register is logged and no error; the others are those of :meth:`register`.

        Args:
            number: Number of the collective call, from 1, equal on all ranks.
        """
        if not is_agreed(number):
            return
        touched, self._touched = self._touched, {}
        pinned: list[Segment] = []

        def choose() -> Choice:
            pinned.extend(pin([each for each in touched if not refusal(self, each)]))
            return Choice(pinned, _AUTOMATIC)

        tag = f"collective call {number}"
        try:
            self.agree(tag, choose)
            if pinned:
                nbytes = sum(segment.size for segment in pinned)
                _log.info("registered rank=%d bytes=%d by=%s", self.channel.rank, nbytes, tag)
        except AgreementError as error:
            _log.warning(
                "rank %d: arrays are not registered and collectives stage them: %s",
                self.channel.rank, str(error),  # a log that keeps records must not keep frames
            )  # fmt: skip
        finally:
            for segment in pinned:
                segment.home.pool.supply.unpin([segment])

    # What the symmetric heap, leases and explain ask for

    def counterparts(self, arena: int, offset: int) -> Mapping[int, tuple[int, int] | None] | None:
        """What the ranks registered, or captured, together with the array at this place.

        None if that is not known.
        """
        for registration in tuple(self._registrations):
            if registration.arrays.get(self.channel.rank) == (arena, offset):
                return registration.arrays
        found = (lease.counterparts.get((arena, offset)) for lease in self.leases.live())
        return next((each for each in found if each is not None), None)

    def name(self, array: Any) -> tuple[int, int]:
        """Arena and offset of an array that has a segment, registered or not."""
        arena = array.data.mem.segment.home.pool.arena
        return self._number(arena), array.data.ptr - arena.base

    def claim_heap(self, arena: Arena) -> None:
        """Make an arena number 0 of this rank."""
        self._numbers[arena] = 0
        self.windows.own(0, arena.base)

    def agree(
        self,
        tag: str,
        choose: Callable[[], Choice],
        check: Callable[[Mapping[int, News]], None] = lambda _: None,
    ) -> dict[int, News]:
        """An agreed point: publish segments and carry out what was let go of. Collective.

        Args:
            tag: Which call it is, equal on all ranks.
            choose: Gives the segments, which stay at least until this returns, and what to say. An
                error it raises is raised on all ranks.
            check: See :func:`~cupy_zc.registration.agreed.carry_out`.

        Returns:
            What each rank said.

        Raises:
            As :meth:`register`.
        """
        self._check_open(tag)
        fresh: list[Entry] = []

        def prepare() -> tuple[News, Sequence[SegmentHandle]]:
            segments, holder, array, call = choose()
            fresh.extend(self._hold(segments, holder))
            self.leases.settle()
            self._retire()
            news = News(
                released=tuple(self._leaving),
                retired=self._retired(),
                offers=tuple(entry.offer for entry in fresh),
                array=array,
                lanes=self.lanes.dropped,
                call=call,
            )
            return news, [entry.segment.handle for entry in fresh]

        try:
            said = carry_out(
                self.driver, self.device, self.channel, self.windows, self.multicast, tag, prepare,
                check, heard=self._heard, settled=self._settled, timeout=self.timeout,
            )  # fmt: skip
            for entry in fresh:
                self._published[entry.segment] = entry
                entry.tell()
            self.multicast.follow(said)
        finally:
            self.version = next(self._versions)  # also where releases went before an error
        return said

    def share(self, segments: Sequence[Segment], holder: object) -> list[Segment]:
        """Hold, and pin, those of the segments that are published. Local; which they are."""
        shared = pin([each for each in segments if each in self._published])
        self._hold(shared, holder)
        return shared

    def let_go(self, holder: object, segments: Sequence[Segment]) -> None:
        """Take back a hold, and a pin, of each segment. Local, in any thread."""
        for segment in segments:
            entry = self._published.get(segment)
            if entry is not None:
                entry.holders.discard(holder)
                self.version = next(self._versions)
            segment.home.pool.supply.unpin([segment])

    def linger(self, holder: object, lanes: Iterable[int], segments: Sequence[Segment]) -> None:
        """As :meth:`let_go`, but not before all ranks have dropped a lane. Local, in any thread.

        A graph that lives on another rank and is replayed alone must not copy from nowhere.
        """
        for lane in lanes:
            self._lingering[lane] = (holder, segments)
        if self.closed:
            self._let_go_behind(())

    def _let_go_behind(self, held: Collection[int]) -> None:
        """Let go of what waited for lanes that nobody holds any more."""
        for lane in [lane for lane in tuple(self._lingering) if lane not in held]:
            waited = self._lingering.pop(lane, None)
            if waited is not None:  # else another thread was quicker
                self.let_go(*waited)

    def close(self) -> None:
        """Unmap all there is of the peers and end all registrations. Local; again does nothing.

        Peers keep what they mapped of this rank's memory until they close as well. Where graphs
        live that copy from peers by themselves, what they read stays mapped until they are gone.

        Raises:
            DriverError: the first thing that went wrong; everything else was done all the same.
        """
        if self.closed:
            return
        self.closed = True
        with ExitStack() as stack:
            stack.callback(self.leases.behind_copies, self.windows.close)
            stack.callback(self.multicast.close)
            stack.callback(self.driver.synchronize, self.device)
            self.leases.unregister()
            self._let_go_behind(())
            for registration in tuple(self._registrations):
                registration.deregister()
            for entry in self._published.values():
                entry.forget()
            self._published.clear()
            self._touched.clear()
            self._leaving.clear()

    # Inside

    def _check_open(self, call: str) -> None:
        if self.closed:
            raise ClosedError(f"rank {self.channel.rank}: {call}: the communicator is closed")

    def _end(self, registration: Registration, segments: Sequence[Segment]) -> None:
        """A registration ends. Local, in any thread."""
        self._registrations.discard(registration)
        self.let_go(registration, segments)

    def _number(self, arena: Arena) -> int:
        number = self._numbers.get(arena)
        if number is None:
            number = self._numbers[arena] = self._next_number
            self._next_number += 1
            self._live_numbers.add(number)
            self.windows.own(number, arena.base)
        return number

    def _hold(self, segments: Sequence[Segment], holder: object) -> list[Entry]:
        """Add a holder to each segment; the entries of those that are not published yet."""
        fresh: list[Entry] = []
        for segment in segments:
            entry = self._published.get(segment)
            if entry is None:
                arena = self._number(segment.home.pool.arena)
                name = SegmentName(arena, segment.offset, segment.generation)
                entry = Entry(segment, name)
                fresh.append(entry)
            entry.holders.add(holder)
        return fresh

    def _retire(self) -> None:
        """Take what nobody wants any more out of the published ones."""
        for segment, entry in tuple(self._published.items()):
            if not entry.wanted:
                del self._published[segment]
                entry.forget()
                self._leaving.append(entry.name)

    def _retired(self) -> tuple[int, ...]:
        """Numbers of arenas that are gone, and that peers may still mirror."""
        return tuple(sorted(self._live_numbers.difference(self._numbers.values())))

    def _heard(self, said: Mapping[int, News]) -> None:
        for rank, news in said.items():
            self.lanes.heard(rank, news.lanes)
        self._let_go_behind(self.lanes.held)

    def _settled(self, news: News) -> None:
        """All peers have carried out the releases in ``news``."""
        del self._leaving[: len(news.released)]
        self._live_numbers.difference_update(news.retired)
        for arena in news.retired:
            self.windows.disown(arena)
