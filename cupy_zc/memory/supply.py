"""Where the memory of a device pool comes from and goes to: the driver, and streams that are gone.

Driver calls are made outside the region. What a call will change is claimed before (quota, offset)
and given back if it fails, so that a failure leaves the pool as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from ..errors import DriverError
from .blocks import Block, Home, Segment
from .pooled import active_hooks

if TYPE_CHECKING:
    from .device import DevicePool

__all__ = ["Supply", "Take"]

_T = TypeVar("_T")

#: What is done with a home that has enough: ``take(home, size)``, in the region; None: not enough.
Take = Callable[[Home, int], "_T | None"]


class Supply:
    """Segments of one device pool, coming and going. Sizes in bytes."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool

    # From the driver

    def grow(self, home: Home, size: int, take: Take[_T], wanted: int | None = None) -> _T | None:
        """Add a segment to a home and take ``size`` bytes; None where limit or addresses forbid.

        Args:
            home: Whose it will be.
            size: Bytes that must fit.
            take: What to do then.
            wanted: Bytes to ask the driver for; None for what suits the home.

        Raises:
            DriverError: the driver refused; nothing has changed.
        """
        pool, arena, accounts = self._pool, self._pool.arena, self._pool.accounts
        with pool.region:
            room = pool.limit - accounts.total_bytes if pool.limit else None
            if wanted is None:
                wanted = self._wanted(home)
            bytes_ = arena.segment_size(size, wanted, room)
            if room is not None and bytes_ > room:
                return None
            offset = arena.place(bytes_)
            if offset is None:
                return None
            accounts.total_bytes += bytes_
        try:
            segment = self._populate(offset, bytes_)
        except BaseException as error:
            with pool.region:
                arena.vacate(offset)
                accounts.total_bytes -= bytes_
            smaller = isinstance(error, DriverError) and error.out_of_memory and wanted
            if smaller and arena.segment_size(size, 0, room) < bytes_:
                return self.grow(home, size, take, 0)
            raise
        with pool.region:
            segment.first = Block(segment, offset, bytes_)
            arena.segments[offset] = segment
            accounts.grew()
            return self._move(segment, home, size, take)

    def _wanted(self, home: Home) -> int:
        """What to ask of the driver at a time. Graphs grow by doubling: many live at once."""
        pool = self._pool
        if home.capture is None:
            return pool.segment_size
        held = sum(s.size for s in pool.arena.segments.values() if s.home is home)
        return min(pool.segment_size, max(held, pool.arena.granule))

    def _populate(self, offset: int, size: int) -> Segment:
        """A new segment, with CuPy's memory hooks around the driver's work."""
        pool, hooks = self._pool, active_hooks()
        for hook in hooks:
            hook.alloc_preprocess(device_id=pool.device, mem_size=size)
        with ExitStack() as undo:
            address = 0
            try:
                segment = pool.arena.populate(offset, size)
                undo.callback(pool.arena.evict, segment)
                address = segment.address
            finally:
                for hook in hooks:
                    hook.alloc_postprocess(device_id=pool.device, mem_size=size, mem_ptr=address)
            undo.pop_all()
        return segment

    # From streams that are gone

    def adopt(self, home: Home, size: int, take: Take[_T]) -> _T | None:
        """Move a free segment of a stream that is gone to a home and take ``size`` bytes.

        Work of that stream may still run, and no event can be recorded on it any more, so the
        device is synchronised first. A capture, in which that cannot be, gets a segment that was of
        a graph that is gone.

        Raises:
            DriverError: the device failed; nothing has changed.
        """
        pool = self._pool
        if home.capture is not None:
            return self._adopt_settled(home, size, take)
        with pool.region:
            segment = self._orphan(size)
            if segment is None:
                return None
            segment.home.remove(segment.first)
        try:
            pool.driver.synchronize(pool.device)
        except BaseException as error:
            with pool.region:
                segment.home.insert(segment.first)
            if isinstance(error, DriverError) and "CAPTURE" in error.result:
                return None  # a capture on another thread forbids waiting; grow instead
            raise
        with pool.region:
            return self._move(segment, home, size, take)

    def _move(self, segment: Segment, home: Home, size: int, take: Take[_T]) -> _T | None:
        """Give a segment that was taken out of its home to another one. For the region."""
        home = home.latest()  # its capture may have ended meanwhile
        segment.home = home
        home.insert(segment.first)
        return take(home, size)

    def _adopt_settled(self, home: Home, size: int, take: Take[_T]) -> _T | None:
        """The same for a capture: the smallest that fits, and that no work uses any more."""
        pool = self._pool
        with pool.region:
            free = [s for home in pool.homes.values() for s in home.whole_segments()]
            fitting = [(s, s.settled) for s in sorted(free, key=lambda s: s.size) if s.size >= size]
        for segment, point in fitting:
            if point is None or not point.done:
                continue
            with pool.region:
                # Whether it was handed out meanwhile, or is on its way to the driver.
                if segment.settled is point and segment.whole and segment.staying:
                    segment.home.remove(segment.first)
                    return self._move(segment, home, size, take)
        return None

    def _orphan(self, size: int) -> Segment | None:
        for home in self._pool.homes_of_gone_streams():
            home.merge_parked()
            for segment in home.whole_segments():
                if segment.size >= size:
                    return segment
        return None

    # Back to the driver

    def pin(self, segments: Iterable[Segment] | None = None) -> list[Segment]:
        """Keep segments from going back to the driver; None: all. Those gone or going are left out.

        Returns:
            What is pinned now, once more than before; each of them needs an :meth:`unpin`.
        """
        live = self._pool.arena.segments
        with self._pool.region:
            wanted = list(live.values() if segments is None else segments)
            staying = [s for s in wanted if live.get(s.offset) is s and s.staying]
            for segment in staying:
                segment.pins += 1
            return staying

    def unpin(self, segments: Iterable[Segment]) -> None:
        """Take a pin of each segment back."""
        with self._pool.region:
            for segment in segments:
                segment.pins -= 1

    def release_free(self, key: int | None = None) -> int:
        """Release all free, unregistered segments, or those of one stream key; returns bytes.

        Raises:
            DriverError: the driver refused; what it refused is in the pool as before.
        """
        pool = self._pool
        with pool.region:
            pool.drain()
            homes = [h for h in pool.homes.values() if key is None or h.key == key]
            leaving: list[Segment] = []
            for home in homes:
                home.merge_parked()
                for segment in home.whole_segments():
                    home.remove(segment.first)
                    leaving.append(segment)
        released = 0
        try:
            if leaving:  # unmapping does not wait for work that uses the memory
                pool.driver.synchronize(pool.device)
            while leaving:
                segment = leaving[-1]
                pool.arena.evict(segment)
                leaving.pop()
                released += segment.size
                with pool.region:
                    pool.arena.vacate(segment.offset)
                    pool.accounts.total_bytes -= segment.size
        finally:
            with pool.region:
                for segment in leaving:
                    segment.home.insert(segment.first)
        return released
