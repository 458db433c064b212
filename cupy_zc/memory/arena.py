"""The reserved range of one device, and the segments mapped into it.

A segment is named by its *offset* from the arena's base. Peers map it at the same offset of a
range of their own, so (arena, offset, generation) is the same thing everywhere (docs: design).
Offsets are given lowest first, and a gap left by a released segment is filled again; the
*generation* tells the new segment from the old one.

:meth:`Arena.place`, :meth:`Arena.vacate` and the look-ups are bookkeeping, guarded by the pool's
lock; :meth:`Arena.populate` and :meth:`Arena.evict` call the driver, and are called without it.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import time
from contextlib import ExitStack

from ..config import settings
from ..driver.api import Driver, round_up
from ..errors import DriverError
from .blocks import Segment

__all__ = ["Arena"]

_log = logging.getLogger("cupy_zc")

#: Room for twice the memory keeps first fit from running out of gaps. Addresses cost no time (4 TiB
#: were reserved in none that could be measured), but a process has 128 TiB of them, and every rank
#: mirrors the arenas of every other one: 8 ranks in threads of a process with 141 GiB each use 60.
ADDRESSES_PER_BYTE = 2


class Arena:
    """One device's range. Sizes, offsets and addresses in bytes."""

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        granularity = driver.granularity(device, settings().segment_size)
        self.granule = granularity.size
        total = driver.memory_info(device).total
        self.size = 1 << (max(ADDRESSES_PER_BYTE * total, 4 * self.granule) - 1).bit_length()
        self.base = driver.reserve(self.size, max(granularity.alignment, self.granule))
        self.segments: dict[int, Segment] = {}
        self._taken: list[tuple[int, int]] = []
        self._generations = itertools.count(1)

    def place(self, size: int) -> int | None:
        """The lowest offset where ``size`` bytes fit, now taken; None where there is none."""
        start = 0
        for at, (offset, taken) in enumerate(self._taken):
            if offset - start >= size:
                self._taken.insert(at, (start, size))
                return start
            start = offset + taken
        if self.size - start < size:
            return None
        self._taken.append((start, size))
        return start

    def vacate(self, offset: int) -> None:
        """Give a placed offset back."""
        del self._taken[bisect.bisect_left(self._taken, (offset, 0))]
        self.segments.pop(offset, None)

    def populate(self, offset: int, size: int) -> Segment:
        """Create memory, map it at a placed offset and open it; all of it or nothing.

        Raises:
            DriverError: a step failed; what was done before it is undone.
        """
        driver, address = self.driver, self.base + offset
        with ExitStack() as undo:
            handle = driver.create(self.device, size)
            undo.callback(driver.release, handle)
            driver.map(address, handle)
            undo.callback(driver.unmap, address, size)
            driver.set_access(address, size, self.device)
            undo.pop_all()
        return Segment(handle, offset, address, next(self._generations), time.monotonic())

    def evict(self, segment: Segment) -> None:
        """Unmap and release a segment's memory; its offset stays placed.

        Raises:
            DriverError: the driver refused, and the segment is whole.
        """
        self.driver.unmap(segment.address, segment.size)
        try:
            self.driver.release(segment.handle)
        except DriverError as error:
            try:
                self.driver.map(segment.address, segment.handle)
                self.driver.set_access(segment.address, segment.size, self.device)
            except DriverError as again:  # then it must not be used any more: it is gone
                _log.error("%d bytes are lost: %s; then %s", segment.size, error, again)
                return
            raise

    def find(self, address: int) -> Segment | None:
        """The live segment that holds ``address``."""
        offset = address - self.base
        at = bisect.bisect_right(self._taken, (offset, self.size)) - 1
        if at < 0:
            return None
        start, size = self._taken[at]
        return self.segments.get(start) if offset < start + size else None

    def segment_size(self, size: int, wanted: int, room: int | None) -> int:
        """How large a segment to ask for, to serve ``size`` bytes.

        Args:
            size: What must fit.
            wanted: What the pool would like, at most ``room``.
            room: Bytes left under the limit; None for no limit.
        """
        least = round_up(size, self.granule)
        if least >= wanted:
            return least
        wanted = round_up(wanted, self.granule)
        if room is not None:
            wanted = min(wanted, room // self.granule * self.granule)
        return max(least, wanted)

    def close(self) -> None:
        """Give the range back; every segment must have been evicted."""
        self.driver.free_range(self.base, self.size)
