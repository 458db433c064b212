"""Blocks that other streams still use: ``MemoryPool.record_stream``.

A block with recorded streams does not go back to its home when its array is dropped. The next
look-up that has to leave the fast path records an event on each of those streams, and the block
goes home when all of them are done. Until then it counts as used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..driver.api import Driver, GraphLease
from .blocks import Bin, Block
from .region import Region

__all__ = ["Deferred"]


class Deferred:
    """What waits for other streams, on one device."""

    def __init__(self, driver: Driver, region: Region) -> None:
        self._driver = driver
        self._region = region
        #: Where a dropped array puts its block; only appended to from outside.
        self.returned = Bin()
        self._streams: dict[Block, dict[int, Any]] = {}
        self._leases: dict[Block, list[GraphLease]] = {}
        self._waiting: list[tuple[Block, list[Callable[[], bool]]]] = []

    def record(self, block: Block, stream: Any) -> None:
        """Note that ``stream`` uses the block; it is kept alive until the block is home."""
        capture = self._driver.capture_info(stream)
        if capture is not None:
            lease = self._driver.lease_graph(capture.graph)
            with self._region:
                self._leases.setdefault(block, []).append(lease)
                self._keep(block)
            return
        key = self._driver.stream_key(stream)
        if key == block.segment.home.key and block.segment.home.capture is None:
            return  # the home's own order is enough
        with self._region:
            self._streams.setdefault(block, {})[key] = stream
            self._keep(block)

    def _keep(self, block: Block) -> None:
        """Have the block come here when it is dropped."""
        if block.bin is not self.returned:
            block.bin.members -= 1
            block.bin = self.returned

    @property
    def idle(self) -> bool:
        """Whether nothing came back and nothing waits."""
        return not self.returned and not self._waiting

    def waiting_bytes(self) -> int:
        """Bytes of dropped arrays that other streams still hold."""
        with self._region:
            return sum(b.size for b, _ in self._waiting) + sum(b.size for b in self.returned.copy())

    def settle(self) -> bool:
        """Send home what is done; whether anything was. Calls the driver; not for the region."""
        if self.idle:
            return False
        with self._region:
            waiting, self._waiting = self._waiting, []
        done = False
        try:
            for block in self._take_returned():
                waiting.append((block, self._conditions(block)))
            for at in reversed(range(len(waiting))):
                block, conditions = waiting[at]
                if all(condition() for condition in conditions):
                    del waiting[at]
                    self._send_home(block)
                    done = True
        finally:
            with self._region:
                self._waiting += waiting
        return done

    def _take_returned(self) -> list[Block]:
        with self._region:
            taken = self.returned.copy()
            del self.returned[: len(taken)]  # what was appended since stays
            return taken

    def _send_home(self, block: Block) -> None:
        with self._region:
            block.bin = block.segment.home.returned
            block.bin.members += 1
        block.bin.append(block)

    def _conditions(self, block: Block) -> list[Callable[[], bool]]:
        with self._region:
            streams = self._streams.pop(block, {})
            leases = self._leases.pop(block, [])
        conditions = [_released(lease) for lease in leases]
        return conditions + [self._passed(stream) for stream in streams.values()]

    def _passed(self, stream: Any) -> Callable[[], bool]:
        """True once ``stream`` has passed the point of the first question outside a capture."""
        event: Any = None

        def passed() -> bool:
            nonlocal event
            if event is None:
                event = self._driver.try_record_event(stream)
            return event is not None and bool(event.done)

        return passed


def _released(lease: GraphLease) -> Callable[[], bool]:
    return lambda: lease.released
