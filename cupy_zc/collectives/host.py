"""The host engine: collectives in NumPy over the mapped memory of the peers.

A call begins with a negotiation, in the meeting at its entry: each rank says what it calls and
where its arrays are, so each one knows where everybody's data is. Ranks may hold theirs at
different offsets. A rank whose array the peers cannot reach copies it through scratch, and then all
follow the same loop over chunks. A call that differs is a MismatchError on every rank; by then
nothing was written but scratch. A last meeting comes before anything that a peer still reads can
change.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ..errors import ClosedError, Error, MismatchError, NotZeroCopyError
from ..group import Channel
from ..group.naming import name_ranks
from ..registration import HostProbe, Probe, Registry, SymmetricHeap
from . import plan as planning
from .call import Call, Transfer, transfer_of
from .checks import Checker, overlap
from .engine import Agreed, Place, WithinNode
from .host_lane import HostLane, Recorded, replayed_after_close
from .host_words import CAPTURES, compare, write
from .insist import insist_on_multicast, needs_multicast
from .memory import matrix
from .plan import ROLES, Capabilities, Operation, plan
from .point_to_point import Letter, Post
from .reductions import Array
from .rounds import NONE, OWN, STAGED, Reach, Where, do_share

__all__ = ["HostEngine"]


def _wait_on(awaited: Collection[int]) -> None:
    """What a replay does in a long wait."""


_ABSENT = Place(NONE, 0, "", None)
_LOCAL = Place(OWN, 0, "", None)


class HostEngine(WithinNode):
    """Carries out checked calls, those of a lane one at a time.

    Collective to make. The memory of lanes is blocks of the heap.

    Args:
        registry: Where arrays are.
        heap: Memory that all ranks reach.
        letters: The ranks, all of one node; for point-to-point calls alone.
        checker: The names of calls, for errors.
        departed: Gives the ranks that have died or closed.
        abandon: Called when the ranks have lost each other, to let the peers know.
        interrupted: Asked in a long wait whether peers capture instead: the ranks that are waited
            for, the number of the eager call, and what it is.
        timeout: Seconds to wait for a peer.
    """

    name = "host"

    def __init__(
        self,
        registry: Registry,
        heap: SymmetricHeap,
        letters: Channel,
        checker: Checker,
        departed: Callable[[], Collection[int]],
        abandon: Callable[[], None],
        interrupted: Callable[[Collection[int], int, Call], None],
        timeout: float,
    ) -> None:
        self.rank = registry.channel.rank
        self.size = checker.size
        self._last: Transfer | None = None
        #: It carries no data by multicast: this is to have the life of the objects tested.
        self.multicast_probe: Probe | None = HostProbe(registry)
        self._registry = registry
        self._abandon = abandon
        self._timeout = timeout
        self._interrupted = interrupted
        #: The eager call under way.
        self._doing: Call | None = None
        self._make_lane = functools.partial(
            HostLane, registry, heap, departed, linger=_wait_on, timeout=timeout
        )
        self._eager = self._make_lane(linger=self._linger)
        self._eager.make_room(planning.SCRATCH_BYTES, planning.SCRATCH_BYTES)
        #: Those of graphs, by number.
        self._lanes: dict[int, HostLane] = {}
        self._letters = letters
        self._post = Post(registry, letters, checker, timeout)
        self._mailing = threading.Lock()
        self._invalid = False
        self._failure: BaseException | None = None

    def last(self, *, ended: bool) -> Transfer | None:  # noqa: ARG002
        """What the last call did that ran; see :meth:`Engine.last`."""
        return self._last

    # What went wrong

    def check(self, call: object) -> None:
        """Raise what made the communicator unusable.

        Raises:
            ClosedError: a former call failed; that error is its ``__cause__``.
        """
        if self._failure is not None:
            raise ClosedError(
                f"{call} (rank {self.rank}): this communicator cannot be used since a call failed: "
                f"{self._failure}; close it and make a new one"
            ) from self._failure

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """What fails in this block, but for a mismatch, ends the communicator."""
        try:
            yield
        except (MismatchError, NotZeroCopyError):  # on all ranks, which are in step
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> BaseException:
        """Make no further calls: the ranks have lost each other."""
        if self._failure is None:
            self._failure = error
        self._abandon()
        return error

    def wait(self, point: Any) -> None:
        """Wait for a stream; what went wrong in it is raised."""
        point.synchronize()

    # Where arrays are

    def places(self, work: Call | Letter) -> tuple[Place, ...]:
        """Where the arrays of a call are, and why they would be staged. Local."""
        if isinstance(work, Call):
            return self._two_places(work)
        given, taken = work.given, work.taken
        if given is None or taken is None or work.peer == self.rank:
            return ()
        if overlap(given.info, taken.info):
            return (Place(STAGED, 0, "in_array overlaps out_array", None),)
        arena, offset, registered, reason, segment = self._registry.locate(given.array)
        reason = "" if registered else f"in_array is copied: {reason}"
        return (Place(arena, offset, reason, segment),)

    def _two_places(self, call: Call) -> tuple[Place, Place]:
        role = ROLES[call.operation]
        cast_in, cast_out = needs_multicast(self._registry, call.operation)
        if call.input is None:
            source = _ABSENT
        elif call.clash:
            source = Place(STAGED, 0, call.clash, None)
        else:
            source = self._locate(call.input, "the input", role.input_remote or cast_in)
            if call.operation is Operation.ALL_TO_ALL and call.in_place and self.size > 1:
                source = Place(STAGED, 0, "all_to_all in place copies the input", source.segment)
        if call.output is None:
            return source, _ABSENT
        return source, self._locate(call.output, "the output", role.output_remote or cast_out)

    def _locate(self, array: Any, name: str, remote: bool) -> Place:
        if not remote or self.size == 1:
            return _LOCAL
        arena, offset, registered, reason, segment = self._registry.locate(array)
        if registered:
            return Place(arena, offset, "", None)
        return Place(STAGED, 0, f"{name} is staged: {reason}", segment)

    # Lanes

    def open_lane(self) -> int:
        """A lane for a graph. Collective."""
        lane = self._registry.lanes.take()
        if lane not in self._lanes:
            try:
                self._lanes[lane] = self._make_lane()
            except BaseException:
                self._registry.lanes.give_up(lane)
                raise
        self._lanes[lane].begin()
        return lane

    def fit_lane(self, lane: int, call: Call, agreed: Agreed | None) -> None:
        """Give a lane the scratch that a captured call needs. Collective."""
        if agreed is None:
            role = ROLES[call.operation]
            many = role.input_rows or (role.output_rows and role.output_remote)
            rows = self.size if many else 1
            nbytes = rows * call.columns * call.dtype.itemsize
            self._lanes[lane].make_room(max(1, nbytes), planning.SCRATCH_BYTES)

    def lane_bytes(self, lane: int) -> int:
        """Bytes of a lane on this rank."""
        return self._lanes[lane].nbytes

    def close_lane(self, lane: int) -> None:
        """The graph of a lane is gone on this rank."""
        self._registry.lanes.drop(lane)

    def invalidate(self) -> None:
        """Make replays of all graphs do nothing from now on. Waits for those under way."""
        self._invalid = True
        with ExitStack() as stack:
            for lane in self._lanes.values():
                stack.callback(lane.invalidate)

    # A call

    def enqueue(self, work: Call | Letter, stream: Any, lane: int = 0) -> None:
        """Put a call at the end of a stream."""
        if not isinstance(work, Call):
            stream.enqueue(functools.partial(self._deliver, work))
        elif lane:
            stream.enqueue(functools.partial(self._replay, self._record(work, self._lanes[lane])))
        else:
            stream.enqueue(functools.partial(self.run, work))

    def decline(self) -> None:
        """Tell peers that wait in an eager call that this rank captures. Collective with them.

        Raises:
            MismatchError: always; on them as well.
        """
        capturing = Call(
            Operation.BARRIER, np.dtype(bool), CAPTURES, 0, 0, 0, 0, None, None, False, ""
        )
        self.run(capturing)

    def _linger(self, awaited: Collection[int]) -> None:
        if self._doing is not None:
            self._interrupted(awaited, self._eager.number, self._doing)

    def prove_multicast(self, bound: Callable[[int, int], bool]) -> str:  # noqa: ARG002
        """Nothing is wrong: no data go through it."""
        return ""

    def preload(self, code: int, reduction: int) -> None:
        """Nothing is loaded."""

    def repeat(self) -> None:
        """None: a call is made anew each time, which costs little beside the work itself."""

    def close(self) -> None:
        """Nothing: all memory is the heap's."""

    def _record(self, call: Call, lane: HostLane) -> Recorded:
        lane.recorded += 1
        given, taken = (0 if each is None else each.data.ptr for each in (call.input, call.output))
        bare = call._replace(input=None, output=None)
        return Recorded(bare, *self._two_places(call), given, taken, lane, lane.recorded)

    def _deliver(self, letter: Letter) -> None:
        """Carry out a point-to-point call."""
        given, taken, peer = letter.given, letter.taken, letter.peer
        with self._turn(letter):
            if given is not None and taken is not None:
                with self.in_step():
                    reach = [(at.arena, at.offset) for at in self.places(letter) if not at.reason]
                    where = reach[0] if reach else None
                    self._last = self._post.send_recv(given, taken, peer, where)
                return
            try:
                if given is not None:
                    self._last = self._post.send(given, peer)
                elif taken is not None:
                    self._last = self._post.recv(taken, peer)
            except BaseException as error:
                if self._letters.closed:  # else the ranks are in step still
                    self.fail(error)
                raise

    @contextmanager
    def _turn(self, letter: Letter) -> Iterator[None]:
        """One point-to-point call at a time."""
        if not self._mailing.acquire(timeout=self._timeout):
            raise Error(
                f"{letter} (rank {self.rank}): another thread was inside a point-to-point call of "
                f"this communicator for {self._timeout:g} s"
            )
        try:
            self.check(letter)
            if self._invalid:
                raise replayed_after_close(letter, self.rank)
            yield
        finally:
            self._mailing.release()

    def run(self, call: Call) -> None:
        """Carry out an eager call. Collective.

        Raises:
            MismatchError: ranks call different things; on all of them, and nothing was written.
            PeerTimeoutError: a rank has gone or did not come; the communicator is over.
            ClosedError: it was over before.
        """
        with self._eager.entered(call):
            self.check(call)
            given, taken = call.input, call.output
            self._doing = call
            try:
                with self.in_step():
                    self._run(
                        call, self._eager, *self._two_places(call),
                        0 if given is None else given.data.ptr,
                        0 if taken is None else taken.data.ptr,
                    )  # fmt: skip
            finally:
                self._doing = None  # it has the arrays

    def _replay(self, recorded: Recorded) -> None:
        """Carry out a captured call once. Collective. Errors: as :meth:`run`."""
        call, source, target, given, taken, lane, number = recorded
        with lane.replaying(call, number):
            self.check(call)
            with self.in_step():
                self._run(call, lane, source, target, given, taken)

    def _run(
        self, call: Call, lane: HostLane, source: Place, target: Place, given_at: int, taken_at: int
    ) -> None:
        role = ROLES[call.operation]
        given = self._own(call, given_at, role.input_rows) if source.arena != NONE else None
        taken = self._own(call, taken_at, role.output_rows) if target.arena != NONE else None
        if given is not None and call.clash:
            given = given.copy()
        staged_in = given if source.arena == STAGED else None
        if STAGED in (source.arena, target.arena):
            columns = self._plan(call, lane, staged=True).columns
            self._stage_in(call, lane, staged_in, 0, min(columns, call.columns))
        where = self._negotiate(call, lane, source, target)
        insist_on_multicast(self._registry, call, where)
        staging = [peer for peer, at in enumerate(where) if STAGED in (at.source, at.target)]
        how = self._plan(call, lane, staged=bool(staging))
        reach = Reach(
            call, self.rank, where, self._registry.address,
            lane.scratch_in, lane.scratch_out, given, taken,
        )  # fmt: skip
        for start in range(0, call.columns, how.columns or 1):
            stop = min(start + how.columns, call.columns)
            if start:
                self._stage_in(call, lane, staged_in, start, stop)
                lane.control.meet(str(call))
            do_share(reach, start, stop)
            lane.control.meet(str(call))
            if target.arena == STAGED and taken is not None:
                np.copyto(taken[:, start:stop], reach.target(self.rank, start, stop))
        if call.operation is not Operation.BARRIER:  # which moves nothing
            self._last = self._report(call, how.algorithm, source, target, staging)

    def _plan(self, call: Call, lane: HostLane, *, staged: bool) -> planning.Plan:
        known = Capabilities(lane.room, staged)
        return plan(call.operation, call.columns, call.dtype.itemsize, self.size, known)

    def _own(self, call: Call, address: int, per_rank: bool) -> Array:
        """An array of this rank as a matrix."""
        return matrix(address, self.size if per_rank else 1, call.columns, call.dtype)

    def _stage_in(
        self, call: Call, lane: HostLane, given: Array | None, start: int, stop: int
    ) -> None:
        if given is not None:
            chunk = matrix(lane.scratch_in[self.rank], len(given), stop - start, call.dtype)
            np.copyto(chunk, given[:, start:stop])

    def _negotiate(self, call: Call, lane: HostLane, source: Place, target: Place) -> list[Where]:
        """Meet, and learn what everybody calls and where everybody's arrays are."""
        lane.number += 1
        write(lane.control, lane.number, call, source, target)
        lane.control.meet(str(call))
        return compare(lane.control, lane.number, self.rank)

    def _report(
        self, call: Call, algorithm: str, source: Place, target: Place, staging: list[int]
    ) -> Transfer:
        reasons = [place.reason for place in (source, target) if place.reason]
        others = [peer for peer in staging if peer != self.rank]
        if others:
            reasons.append(f"{name_ranks(others)} staged")
        return transfer_of(call, algorithm, self.size, reasons, staged=bool(staging))
