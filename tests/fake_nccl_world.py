"""What ranks of :mod:`fake_nccl` share: communicators, their work, and where that meets."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import fake_nccl_data as data
from emulated_driver import EmulatedDriver
from fake_nccl_data import P2P, Part, Span

from cupy_zc.errors import DriverError

__all__ = ["FakeComm", "FakeWorld", "Work", "nccl_error"]

#: ``ncclResult_t``.
RESULTS = (
    "Success", "UnhandledCudaError", "SystemError", "InternalError", "InvalidArgument",
    "InvalidUsage", "RemoteError",
)  # fmt: skip
#: Functions of NCCL whose name is not that of the method.
_NAMES = {
    "init": "ncclCommInitRankConfig", "all_to_all": "ncclAlltoAll",
    "register": "ncclCommRegister", "deregister": "ncclCommDeregister",
    "register_window": "ncclCommWindowRegister", "deregister_window": "ncclCommWindowDeregister",
    "destroy": "ncclCommDestroy", "abort": "ncclCommAbort", "async_error": "ncclCommGetAsyncError",
}  # fmt: skip


def nccl_error(function: str, result: str, cause: str) -> DriverError:
    """The error of a call, by the name of the method."""
    name = _NAMES.get(function) or "nccl" + function.title().replace("_", "")
    return DriverError(name, result, RESULTS.index(result), cause=cause)


class _Meeting:
    """Calls that belong together: of all ranks, or a send and its receive."""

    def __init__(self, needed: int) -> None:
        self.needed = needed
        self.parts: dict[Any, tuple[FakeComm, Part]] = {}
        self.running = self.done = self.broken = False
        #: Who came last, and carries it out.
        self.last: FakeComm | None = None

    def left(self) -> None:
        """A rank that is in goes away: nothing will be done."""
        self.broken = not self.running and not self.done


class FakeComm:
    """A communicator on one rank. All fields are guarded by ``world.changed``."""

    def __init__(
        self, world: FakeWorld, group: dict[Any, Any], size: int, rank: int, sharp: bool
    ) -> None:
        self.world = world
        self.size = size
        self.rank = rank
        self.sharp = sharp
        self.most_blocks: int | None = None
        self.device = world.driver.current_device()
        #: "alive", "destroyed" or "aborted".
        self.state = "alive"
        self.aborted = False
        #: How much work was launched, and has ended.
        self.launched = self.ended = 0
        #: Graphs that hold work of it.
        self.graphs: set[weakref.ref[Any]] = set()
        #: Handles and windows that were not given back, and the memory of each.
        self.registered: dict[Any, Span] = {}
        self.windows: dict[Any, Span] = {}
        #: Meetings of all its ranks, by what meets there.
        self.group = group
        self._counts: Counter[tuple[str, int]] = Counter()

    def __repr__(self) -> str:
        return f"<{self.state} communicator of rank {self.rank} of {self.size}>"

    def key(self, part: Part) -> tuple[Any, ...]:
        """Where the next call of a kind meets its counterparts."""
        name: tuple[Any, ...]
        match part.function:
            case "send":
                name, counted = ("p2p", self.rank, part.root), ("send", part.root)
            case "recv":
                name, counted = ("p2p", part.root, self.rank), ("recv", part.root)
            case "register_window":
                name, counted = ("windows",), ("windows", 0)
            case _:
                name, counted = ("collectives",), ("collectives", 0)
        self._counts[counted] += 1
        return (*name, self._counts[counted])

    def meet(self, key: tuple[Any, ...], needed: int, slot: Any, part: Part) -> _Meeting:
        """Arrive; runs it where this is the last one."""
        meeting: _Meeting = self.group.setdefault(key, _Meeting(needed))
        meeting.parts[slot] = (self, part)
        if len(meeting.parts) == needed and not meeting.broken:
            del self.group[key]
            meeting.running, meeting.last = True, self
        self.world.changed.notify_all()
        return meeting

    def in_graphs(self) -> bool:
        """Whether a graph lives that holds work of it."""
        held = self.rank in self.world.graphs_hold
        return held or any(graph() is not None for graph in self.graphs)


class Work:
    """What one call, or one group, enqueues; runs once for each launch."""

    def __init__(self, comm: FakeComm, parts: Sequence[Part]) -> None:
        self._comm = comm
        self._parts = tuple(parts)
        self._turns: deque[tuple[int, list[tuple[Any, ...]]]] = deque()

    def launched(self) -> None:
        """It will run: its place among the work of the communicator is this one."""
        with self._comm.world.changed:
            self._launch()

    def _launch(self) -> None:
        comm = self._comm
        self._turns.append((comm.launched, [comm.key(part) for part in self._parts]))
        comm.launched += 1

    def __call__(self) -> None:
        """In the worker of the stream."""
        comm, world = self._comm, self._comm.world
        told = f"{', '.join(part.function for part in self._parts)} of rank {comm.rank}"
        with world.changed:
            if comm.state == "destroyed":
                world.mistake(f"{told} ran after its communicator was destroyed")
                return
            if not self._turns:  # on the null stream, which tells nothing
                self._launch()
            turn, keys = self._turns.popleft()
            world.wait(lambda: comm.aborted or comm.ended == turn, f"{told}, for work before it")
            meetings = [] if comm.aborted else self._arrive(keys)
        for meeting in dict.fromkeys(meetings):
            if meeting.last is comm:
                world.carry_out(meeting)
        with world.changed:
            world.wait(
                lambda: all(m.done or (comm.aborted and not m.running) for m in meetings), told
            )
            for meeting in meetings:
                meeting.left()
            comm.ended += 1
            world.changed.notify_all()

    def _arrive(self, keys: Sequence[tuple[Any, ...]]) -> list[_Meeting]:
        comm = self._comm
        found = []
        for key, part in zip(keys, self._parts, strict=True):
            pair = part.function in P2P
            needed, slot = (2, part.function) if pair else (comm.size, comm.rank)
            found.append(comm.meet(key, needed, slot, part))
        return found


class FakeWorld:
    """What all ranks share, and what a test sets and looks at. Ranks are those of communicators.

    Args:
        driver: The device; its threads are the ranks.
        version: Of NCCL.
        deadline: Seconds after which a wait is given up.
        distinct_devices: Whether two ranks on one device are refused, as by NCCL.
    """

    def __init__(
        self,
        driver: EmulatedDriver,
        *,
        version: int = 22809,
        deadline: float = 20.0,
        distinct_devices: bool = False,
    ) -> None:
        self.driver = driver
        self.version = version
        self.deadline = deadline
        self.distinct_devices = distinct_devices
        #: Guards everything here, and is notified of every change.
        self.changed = threading.Condition()
        #: What was done that NCCL would not stand.
        self.mistakes: list[str] = []
        #: Each call when it was made, also into a graph, and its rank.
        self.calls: list[tuple[int, Part]] = []
        #: Each registration that was asked for: rank and memory.
        self.registrations: list[tuple[int, Span]] = []
        self.made: list[FakeComm] = []
        #: Results that a method gives a rank, from the front; None: it does what it should.
        self.failures: dict[tuple[str, int], list[str | None]] = {}
        #: Ranks that do not arrive in ``init``, until they are taken out or ``stop``.
        self.hanging: set[int] = set()
        #: Seconds that ranks take before they arrive there.
        self.slow: dict[int, float] = {}
        #: Ranks that get no window.
        self.no_window: set[int] = set()
        #: What ``async_error`` says, by rank.
        self.async_errors: dict[int, str] = {}
        #: Ranks whose communicators are held by graphs; besides those whose graphs really live.
        self.graphs_hold: set[int] = set()
        self.groups: dict[bytes, dict[Any, Any]] = {}
        self.numbers = itertools.count(0x1000)
        self._stopped = False

    @property
    def alive(self) -> list[FakeComm]:
        """Communicators that were neither destroyed nor aborted."""
        return [comm for comm in self.made if comm.state == "alive"]

    def stop(self) -> None:
        """Let every wait end now, and all that come."""
        with self.changed:
            self._stopped = True
            self.changed.notify_all()

    def release(self, held: set[int]) -> None:
        """Empty ``hanging`` or ``graphs_hold``, and let go on what waits for it."""
        with self.changed:
            held.clear()
            self.changed.notify_all()

    def mistake(self, text: str) -> None:
        """Put one down."""
        self.mistakes.append(text)

    def fail(self, function: str, rank: int) -> None:
        """Raise what a test wants."""
        results = self.failures.get((function, rank))
        result = results.pop(0) if results else None
        if result is not None:
            raise nccl_error(function, result, "the test wants it")

    def wait(
        self, condition: Callable[[], bool], told: str = "", seconds: float | None = None
    ) -> bool:
        """Wait for a condition, holding ``changed``; whether it holds. ``told``: of a mistake."""
        until = time.monotonic() + (self.deadline if seconds is None else seconds)
        while not condition():
            left = until - time.monotonic()
            if self._stopped or left <= 0:
                if told and not self._stopped:
                    self.mistake(f"{told}: waited for {self.deadline:g} s")
                return False
            self.changed.wait(min(left, 0.05))  # graphs go without a word
        return True

    def carry_out(self, meeting: _Meeting) -> None:
        """Move the data of calls that have met."""
        given = [meeting.parts[slot] for slot in sorted(meeting.parts)]
        parts = [part for _, part in given]
        try:
            with self.driver._lock:  # nobody unmaps meanwhile
                problem = data.mismatch(parts) or self._unmapped(given)
                if problem:
                    self.mistake(problem)
                else:
                    data.carry_out(parts)
        except Exception as error:
            self.mistake(f"{parts}: {error!r}")
        with self.changed:
            meeting.running, meeting.done = False, True
            self.changed.notify_all()

    def _unmapped(self, given: Sequence[tuple[FakeComm, Part]]) -> str:
        for comm, part in given:
            for span in data.spans(part, comm.rank, comm.size):
                if span.size and not self._reachable(span):
                    return f"rank {comm.rank}: {part} has memory that is not mapped, {span}"
        return ""

    def _reachable(self, span: Span) -> bool:
        try:
            self.driver._space.check_bytes("", span.address, span.size)
        except DriverError:
            return _plain(span)
        return True


#: Bytes are written there to find out whether they can be read.
_nowhere = os.memfd_create("fake-nccl")


def _plain(span: Span) -> bool:
    """Whether memory that is no segment of the driver can be read."""
    try:
        content = (ctypes.c_char * span.size).from_address(span.address)
        return os.pwrite(_nowhere, content, 0) == span.size
    except OSError:
        return False
