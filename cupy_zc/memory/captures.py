"""Memory that belongs to a CUDA graph: private to its capture, returned when the graph is gone.

Without this, a temporary dropped inside a capture is handed to the next eager array, and every
replay of the graph overwrites it. Here each capture has homes of its own, one for each stream that
takes part (two branches of a graph may run at once, so a block is reused only in the branch it came
from). They get segments of their own and no one else is served from them, until the graph and all
executables made from it are gone; then the segments join the home of the stream that captured. From
there captures take those first that nothing uses any more: arrays may have outlived the capture, so
the work of the stream until then must have ended, and nobody may have got a block since.

A failed capture destroys its graph, so it takes the same way out.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..driver.api import Event, GraphLease
from ..errors import DriverError
from .blocks import Home, Segment

if TYPE_CHECKING:
    from .device import DevicePool

__all__ = ["Captures"]


@dataclass(slots=True)
class _Capture:
    lease: GraphLease
    homes: dict[int, Home] = field(default_factory=dict)
    #: Where its memory goes afterwards. Weak, since dropping a capturing stream ends the capture.
    streams: dict[int, weakref.ref[Any]] = field(default_factory=dict)


class Captures:
    """The graph-private homes of one device pool."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._captures: dict[int, _Capture] = {}
        #: Homes of graphs that are gone, of which the user still holds arrays: blocks to come.
        self._ghosts: list[Home] = []

    def home(self, stream: Any) -> Home | None:
        """The home of a capturing stream; None if it is not capturing after all."""
        driver, region = self._pool.driver, self._pool.region
        info = driver.capture_info(stream)
        if info is None:
            return None
        capture = self._captures.get(info.id)
        if capture is None:
            lease = driver.lease_graph(info.graph)
            with region:
                capture = self._captures.setdefault(info.id, _Capture(lease))
        with region:
            home = capture.homes.get(info.stream)
            if home is None:
                home = capture.homes[info.stream] = Home(self._pool, 0, info.id)
                capture.streams[info.stream] = weakref.ref(stream)
            return home

    # For the region

    def homes(self) -> list[Home]:
        """All homes that blocks of graphs may come back to, dead or alive."""
        live = [home for capture in self._captures.values() for home in capture.homes.values()]
        return live + self._ghosts

    def forget_ghosts(self) -> None:
        """Forget the ghosts that no block will come back to any more."""
        if self._ghosts:
            self._ghosts = [g for g in self._ghosts if any(bin_.members for bin_ in g.bins())]

    def leased(self, segments: list[Segment]) -> int:
        """Bytes of the segments that belong to graphs."""
        return sum(s.size for s in segments if s.home.capture is not None)

    # Not for the region

    def poll(self) -> bool:
        """Return the memory of graphs that are gone; whether there was any."""
        if not self._captures:
            return False
        gone = [(number, c) for number, c in list(self._captures.items()) if c.lease.released]
        done = False
        for number, capture in gone:
            streams = [(which, stream()) for which, stream in list(capture.streams.items())]
            targets = {which: self._target(stream) for which, stream in streams}
            points = {which: self._point(stream) for which, stream in streams}
            with self._pool.region:
                if number not in self._captures:
                    continue  # another thread was faster
                self._pool.drain()  # what the capture left in its bins as well
                del self._captures[number]
                for which, home in capture.homes.items():
                    self._dissolve(home, targets[which], points[which])
                done = True
        return done

    def _target(self, stream: Any) -> Home:
        """Where memory of a graph goes that was captured on a stream; None: one that is gone.

        One that captures the next graph, perhaps since just now, may be impossible to ask for its
        key. Then the memory goes where that of streams goes that are gone: whoever is next gets it.
        """
        try:
            return self._pool.eager_home(stream)
        except DriverError as error:
            if "CAPTURE" not in error.result:
                raise
            return self._pool.eager_home(None)

    def _point(self, stream: Any) -> Event | None:
        """A point behind the work of a stream; None where it cannot be asked for one."""
        return None if stream is None else self._pool.driver.try_record_event(stream)

    def _dissolve(self, home: Home, target: Home, point: Event | None) -> None:
        home.merge_parked()
        home.heir = target
        segments = [each for each in self._pool.arena.segments.values() if each.home is home]
        for segment in segments:
            segment.home = target
        for block in list(home.index.values()):
            home.remove(block)
            target.insert(block)
        for segment in segments:
            segment.settled = point if segment.whole else None
        self._ghosts.append(home)
        self.forget_ghosts()
