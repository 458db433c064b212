"""Leases: registrations that live exactly as long as a CUDA graph.

The first call of a communicator in a capture opens a *lease* for the graph under construction; the
capture's later calls, on whatever stream, find it again. It holds the segments of the calls' arrays
registered, beside whoever else holds them, and it holds the arrays' memory, so that an array can be
dropped after the capture and nobody gets its bytes. Memory that belongs to the capture anyway is
left to the pool, which reuses it inside the capture.

A lease ends when the graph and every executable made from it are gone. A token of the driver says
so; it is looked at by pools, by collectives, at agreed points and by ``leases()``, and never from a
finalizer. What this rank held is free at once then. The peers' mappings, and the lane, follow at
the next agreed point.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..driver.api import CaptureInfo
from ..errors import DriverError
from ..memory.blocks import Segment
from ..memory.graphs import tie

if TYPE_CHECKING:
    from .registry import Registry

__all__ = ["Lease", "LeaseInfo", "LeasedArray", "Leases"]

_log = logging.getLogger("cupy_zc")

#: Seconds in which a driver tells of a graph that is gone. CUDA does it from a thread of its own.
_PATIENCE = 0.1


@dataclass(frozen=True, slots=True)
class LeasedArray:
    """An array that a captured call uses."""

    #: Number of its arena on this rank; -1 where the peers cannot reach it.
    arena: int
    #: Of its first byte from the base of the arena.
    offset: int
    nbytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A live lease, as ``Communicator.leases()`` shows it. All sizes in bytes, on this rank."""

    #: Number of the capture that made the graph; unique in the life of the process.
    graph: int
    #: What its calls use, each array once.
    arrays: tuple[LeasedArray, ...]
    #: Of the segments that it keeps registered. Leases, and registrations, may share segments.
    bytes: int
    #: None where only point-to-point calls were captured, which need none.
    lane: int | None
    lane_bytes: int
    #: How many calls were captured.
    calls: int
    #: Whether the capture has not ended.
    capturing: bool


class Lease:
    """What one communicator holds for one graph. A tie of :mod:`cupy_zc.memory.graphs`.

    Args:
        registry: Of the communicator.
        info: The capture.
        stream: A stream that takes part.

    Raises:
        DriverError: the driver cannot watch the graph.
    """

    def __init__(self, registry: Registry, info: CaptureInfo, stream: Any) -> None:
        self.graph = info.id
        #: Collectives that were captured, equal on all ranks; and calls of any kind.
        self.collectives = 0
        self.calls = 0
        self.lane: int | None = None
        #: By arena and offset of an array here: the same of what each rank passed in its place.
        self.counterparts: dict[tuple[int, int], dict[int, tuple[int, int] | None]] = {}
        #: Whether its graph reads memory of peers by itself, without a kernel that looks first.
        self.copies = False
        self._registry = registry
        #: What follows when the graph is gone.
        self._behind: list[Callable[[], None]] = []
        #: What gives its lane back; of two threads, one takes it out.
        self._close_lane: dict[int, Callable[[int], None]] = {}
        self._token = registry.driver.lease_graph(info.graph)
        # Weak: dropping a capturing stream ends the capture, and with it the lease.
        self._stream = weakref.ref(stream)
        self._segments: dict[Segment, None] = {}
        self._memory: dict[int, Any] = {}
        #: By address, bytes and dtype: arena and offset.
        self._arrays: dict[tuple[int, int, Any], tuple[int, int]] = {}

    @property
    def released(self) -> bool:
        """Whether the graph, and every executable made from it, is gone."""
        return self._token.released

    @property
    def over(self) -> bool:
        """Whether it was released."""
        return not hasattr(self, "_memory")

    def missing(self, segments: Iterable[Segment]) -> list[Segment]:
        """Which of these segments it does not hold, each once."""
        return [s for s in dict.fromkeys(segments) if s not in self._segments]

    def hold(self, segments: Iterable[Segment]) -> None:
        """Have segments that are pinned, and registered in its name, for as long as it lives."""
        for segment in segments:
            self._segments[segment] = None
        if self.over:  # another thread found the graph gone meanwhile
            self.unregister()

    def keep(self, arrays: Iterable[Any], engine: object) -> None:
        """Keep what a call needs when it is replayed, and count the call.

        Args:
            arrays: Of the call, whose memory is kept.
            engine: Has memory that replays read, though the communicator be closed and dropped.
        """
        self.calls += 1
        kept = getattr(self, "_memory", {})
        kept[id(engine)] = engine
        for array in arrays:
            memory = array.data.mem
            segment = getattr(memory, "segment", None)
            if not isinstance(segment, Segment) or segment.home.capture != self.graph:
                kept[id(memory)] = memory
            arena, offset, *_ = self._registry.locate(array)
            self._arrays[array.data.ptr, array.nbytes, array.dtype] = (arena, offset)

    def take_lane(self, lane: int, close: Callable[[int], None]) -> None:
        """Own a lane of an engine; ``close`` gives it back."""
        self.lane = lane
        self._close_lane[lane] = close
        if self.over:  # another thread found the graph gone meanwhile
            self._give_lane_back()

    def _give_lane_back(self) -> None:
        while self._close_lane:
            try:
                lane, close = self._close_lane.popitem()
            except KeyError:  # another thread was quicker
                return
            close(lane)

    def keep_windows(self) -> None:
        """Keep the memory of peers mapped here for as long as the graph may read it.

        Theirs, too: what this rank holds stays registered until the graphs of all ranks are gone.
        """
        self.copies = True

    def afterwards(self, act: Callable[[], None]) -> None:
        """Have something done when the graph is gone, by the thread that finds it out."""
        self._behind.append(act)
        if self.over:  # another thread found the graph gone meanwhile
            self._act()

    def _act(self) -> None:
        while self._behind:
            try:
                act = self._behind.pop()
            except IndexError:  # another thread was quicker
                return
            act()

    def release(self) -> None:
        """Let go of everything. Local, from any thread; again does nothing."""
        try:
            del self._memory  # of two threads, one gets past this
        except AttributeError:
            return
        if self.copies and self._close_lane:
            segments, self._segments = self._segments, {}
            self._registry.linger(self, self._close_lane, list(segments))
        self.unregister()
        self._give_lane_back()
        self._act()

    def unregister(self) -> None:
        """Let go of the segments alone: the communicator closes, and the graph may still run."""
        while self._segments:
            try:
                segment, _ = self._segments.popitem()
            except KeyError:  # another thread took the last one
                return
            self._registry.let_go(self, [segment])

    def info(self, lane_bytes: Callable[[int], int]) -> LeaseInfo:
        """What it holds now."""
        return LeaseInfo(
            self.graph,
            tuple(
                LeasedArray(arena, offset, nbytes, dtype.name)
                for (_, nbytes, dtype), (arena, offset) in self._arrays.items()
            ),
            sum(segment.size for segment in self._segments),
            self.lane,
            0 if self.lane is None else lane_bytes(self.lane),
            self.calls,
            self._capturing(),
        )

    def _capturing(self) -> bool:
        stream = self._stream()
        if stream is None:
            return False
        try:
            info = self._registry.driver.capture_info(stream)
        except DriverError:  # an invalid capture that was not ended
            return True
        return info is not None and info.id == self.graph


class Leases:
    """The live leases of one communicator.

    For one thread at a time (the communicator has a lock), but a :class:`Lease` may be released by
    any thread at any time.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._live: dict[int, Lease] = {}
        self._next = 0

    def find(self, capture: int) -> Lease | None:
        """The lease of a capture."""
        return self._live.get(capture)

    def open(self, info: CaptureInfo, stream: Any) -> Lease:
        """Open the lease of a graph under construction; :meth:`abandon` takes that back.

        Raises:
            DriverError: the driver cannot watch the graph.
        """
        lease = Lease(self._registry, info, stream)
        tie(lease)
        self._live[info.id] = lease
        _log.info("leased rank=%d graph=%d", self._registry.channel.rank, info.id)
        return lease

    def abandon(self, lease: Lease) -> None:
        """End a lease for which nothing was captured."""
        lease.release()
        if self._live.pop(lease.graph, None) is not None:
            _log.info("released rank=%d graph=%d", self._registry.channel.rank, lease.graph)

    def settle(self) -> None:
        """End the leases of graphs that are gone."""
        for lease in tuple(self._live.values()):
            self._look_at(lease)

    def glance(self) -> None:
        """Look at one lease, and the next time at another one: what an eager call can afford."""
        if self._live:
            self._next = (self._next + 1) % len(self._live)
            self._look_at(list(self._live.values())[self._next])

    def _look_at(self, lease: Lease) -> None:
        if lease.over or lease.released:
            self.abandon(lease)

    def live(self) -> Sequence[Lease]:
        """Leases of graphs that are not gone."""
        self.settle()
        return tuple(self._live.values())

    def lasting(self) -> tuple[int, ...]:
        """The graphs that will not go by themselves, by number: what is on its way is waited for.

        That is what only the garbage collector can free, and, for a moment, graphs that the driver
        has not told of yet.
        """
        until = time.monotonic() + _PATIENCE
        while self.live() and time.monotonic() < until:
            gc.collect()  # is nothing where another thread is at it, so it may take a second one
            time.sleep(0.001)
        return tuple(lease.graph for lease in self.live())

    def behind_copies(self, act: Callable[[], None]) -> None:
        """Do something when no graph is left that copies from peers; now, where there is none.

        Raises:
            DriverError: what is done now raised it. Later it is logged.
        """
        copying = [lease for lease in self.live() if lease.copies]
        if not copying:
            act()
            return
        others = deque(copying[1:])

        def one_gone() -> None:
            try:
                others.pop()
            except IndexError:  # the last one
                try:
                    act()
                except DriverError as error:  # out of what the thread was at
                    _log.error("memory that a graph read is left behind: %s", error)

        for lease in copying:
            lease.afterwards(one_gone)

    def unregister(self) -> None:
        """The communicator closes: no lease holds a segment any more, only memory."""
        for lease in self._live.values():
            lease.unregister()
