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
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import ClosedError, Error, MismatchError, NotZeroCopyError
from ..group import Channel
from ..group.naming import name_ranks, sides
from ..registration import HostProbe, Probe, Registry, SymmetricHeap
from . import plan as planning
from .call import Call, Transfer, describe
from .checks import Checker, overlap
from .control import Control
from .dtypes import DTYPES
from .engine import Place
from .insist import insist_on_multicast, needs_multicast
from .memory import matrix
from .plan import ROLES, Capabilities, Operation, plan
from .point_to_point import Letter, Post
from .reductions import Array
from .rounds import NONE, OWN, STAGED, Reach, Where, do_share

__all__ = ["HostEngine"]

#: What must be equal: call number, operation, dtype, reduction, order, root, count.
_PRINT = struct.Struct("<QBBBBiq")
#: Arena and offset of input and output.
_PLACES = struct.Struct("<iqiq")
_WORD = struct.Struct(_PRINT.format + _PLACES.format[1:])


_ABSENT = Place(NONE, 0, "", None)
_LOCAL = Place(OWN, 0, "", None)


class HostEngine:
    """Carries out checked calls, one at a time.

    Collective to make. Its control area and scratch are blocks of the heap.

    Args:
        registry: Where arrays are.
        heap: Memory that all ranks reach.
        letters: The ranks, all of one node; for point-to-point calls alone.
        checker: The names of calls, for errors.
        departed: Gives the ranks that have died or closed.
        abandon: Called when the ranks have lost each other, to let the peers know.
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
        timeout: float,
    ) -> None:
        size = checker.size
        self.rank = registry.channel.rank
        self.size = size
        self.last: Transfer | None = None
        #: It carries no data by multicast: this is to have the life of the objects tested.
        self.multicast_probe: Probe | None = HostProbe(registry)
        self._registry = registry
        self._abandon = abandon
        self._timeout = timeout
        self._room = planning.SCRATCH_BYTES
        area = heap.reserve_private(Control.size(size))
        scratch = heap.reserve_private(2 * self._room)
        everybody = range(size)
        self._scratch_in = [registry.address(peer, 0, scratch) for peer in everybody]
        self._scratch_out = [address + self._room for address in self._scratch_in]
        addresses = [registry.address(peer, 0, area) for peer in everybody]
        self._control = Control(self.rank, addresses, departed, timeout)
        self._letters = letters
        self._post = Post(registry, letters, checker, timeout)
        self._number = 0
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    # Who may enter

    @contextmanager
    def entered(self, call: object) -> Iterator[None]:
        """One at a time; an error other than a mismatch leaves the ranks out of step for ever."""
        if not self._lock.acquire(timeout=self._timeout):
            raise Error(
                f"{call} (rank {self.rank}): another thread was inside a call of this communicator "
                f"for {self._timeout:g} s"
            )
        try:
            self.check(call)
            yield
        finally:
            self._lock.release()

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

    def fail(self, error: BaseException) -> None:
        """Make no further calls: the ranks have lost each other."""
        if self._failure is None:
            self._failure = error
        self._abandon()

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

    # A call

    def enqueue(self, work: Call | Letter, stream: Any) -> None:
        """Put a call at the end of a stream."""
        if isinstance(work, Call):
            stream.enqueue(functools.partial(self.run, work))
        else:
            stream.enqueue(functools.partial(self._deliver, work))

    def repeat(self) -> None:
        """None: a call is made anew each time, which costs little beside the work itself."""

    def close(self) -> None:
        """Nothing: all memory is the heap's."""

    def _deliver(self, letter: Letter) -> None:
        """Carry out a point-to-point call."""
        given, taken, peer = letter.given, letter.taken, letter.peer
        with self.entered(letter):
            if given is not None and taken is not None:
                with self.in_step():
                    reach = [(at.arena, at.offset) for at in self.places(letter) if not at.reason]
                    where = reach[0] if reach else None
                    self.last = self._post.send_recv(given, taken, peer, where)
                return
            try:
                if given is not None:
                    self.last = self._post.send(given, peer)
                elif taken is not None:
                    self.last = self._post.recv(taken, peer)
            except BaseException as error:
                if self._letters.closed:  # else the ranks are in step still
                    self.fail(error)
                raise

    def run(self, call: Call) -> None:
        """Carry out a call. Collective.

        Raises:
            MismatchError: ranks call different things; on all of them, and nothing was written.
            PeerTimeoutError: a rank has gone or did not come; the communicator is over.
            ClosedError: it was over before.
        """
        with self.entered(call), self.in_step():
            self._run(call)

    def _run(self, call: Call) -> None:
        source, target = self._two_places(call)
        role = ROLES[call.operation]
        given = self._own(call, call.input, role.input_rows)
        taken = self._own(call, call.output, role.output_rows)
        if given is not None and call.clash:
            given = given.copy()
        staged_in = given if source.arena == STAGED else None
        if STAGED in (source.arena, target.arena):
            columns = self._plan(call, staged=True).columns
            self._stage_in(call, staged_in, 0, min(columns, call.columns))
        where = self._negotiate(call, source, target)
        insist_on_multicast(self._registry, call, where)
        staging = [peer for peer, at in enumerate(where) if STAGED in (at.source, at.target)]
        how = self._plan(call, staged=bool(staging))
        reach = Reach(
            call, self.rank, where, self._registry.address,
            self._scratch_in, self._scratch_out, given, taken,
        )  # fmt: skip
        for start in range(0, call.columns, how.columns or 1):
            stop = min(start + how.columns, call.columns)
            if start:
                self._stage_in(call, staged_in, start, stop)
                self._control.meet(str(call))
            do_share(reach, start, stop)
            self._control.meet(str(call))
            if target.arena == STAGED and taken is not None:
                np.copyto(taken[:, start:stop], reach.target(self.rank, start, stop))
        if call.operation is not Operation.BARRIER:  # which moves nothing
            self.last = self._report(call, how.algorithm, source, target, staging)

    def _plan(self, call: Call, *, staged: bool) -> planning.Plan:
        known = Capabilities(self._room, staged)
        return plan(call.operation, call.columns, call.dtype.itemsize, self.size, known)

    def _own(self, call: Call, array: Any, per_rank: bool) -> Array | None:
        """An array of this rank as a matrix."""
        if array is None:
            return None
        rows = self.size if per_rank else 1
        return matrix(array.data.ptr, rows, call.columns, call.dtype)

    def _stage_in(self, call: Call, given: Array | None, start: int, stop: int) -> None:
        if given is not None:
            chunk = matrix(self._scratch_in[self.rank], len(given), stop - start, call.dtype)
            np.copyto(chunk, given[:, start:stop])

    def _negotiate(self, call: Call, source: Place, target: Place) -> list[Where]:
        """Meet, and learn what everybody calls and where everybody's arrays are."""
        self._number += 1
        parity = self._number & 1
        self._control.write(
            parity, _WORD, self._number, call.operation, call.code, call.reduction, call.fortran,
            call.root, call.columns, source.arena, source.offset, target.arena, target.offset,
        )  # fmt: skip
        self._control.meet(str(call))
        words = self._control.read(parity, _WORD.size)
        mine = words[self.rank][: _PRINT.size]
        if any(word[: _PRINT.size] != mine for word in words):
            raise self._mismatch([_PRINT.unpack(word[: _PRINT.size]) for word in words])
        return [Where(*_PLACES.unpack(word[_PRINT.size :])) for word in words]

    def _mismatch(self, prints: list[tuple[int, ...]]) -> MismatchError:
        calls = {
            peer: describe(operation, DTYPES[code], reduction, root, count, fortran)
            for peer, (_, operation, code, reduction, fortran, root, count) in enumerate(prints)
        }
        return MismatchError(
            f"the ranks do not make the same call: {sides(calls, 'is at')}; nothing was written, "
            "and all ranks can go on with the next call"
        )

    def _report(
        self,
        call: Call,
        algorithm: str,
        source: Place,
        target: Place,
        staging: list[int],
    ) -> Transfer:
        reasons = [place.reason for place in (source, target) if place.reason]
        others = [peer for peer in staging if peer != self.rank]
        if others:
            reasons.append(f"{name_ranks(others)} staged")
        role = ROLES[call.operation]
        rows = self.size if role.input_rows or role.output_rows else 1
        size = rows * call.columns * call.dtype.itemsize
        return Transfer(call.operation.call, algorithm, not staging, "; ".join(reasons), size)
