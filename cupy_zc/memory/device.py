"""The pool of one device: how a request is served, how memory grows and goes back to the driver.

A request that the fast path of :class:`~cupy_zc.memory.MemoryPool` cannot serve comes here:

1. an exact-size parked block of the stream's home, or its best fit after merging;
2. blocks and graphs that became free meanwhile, then segments of streams that are gone;
3. a new segment;
4. the same again after releasing all free segments, and after a garbage collection;
5. :class:`~cupy_zc.errors.OutOfMemoryError`, with the sizes.

Driver calls are made outside the region. What a call will change is claimed before (quota, offset)
and given back if it fails, so that a failure leaves the pool as it was.
"""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from ..driver.api import Driver
from ..errors import DriverError, OutOfMemoryError
from .accounts import Accounts
from .arena import Arena
from .blocks import Bin, Block, Home, Run, Segment
from .captures import Captures
from .deferred import Deferred
from .pooled import active_hooks
from .region import Region

__all__ = ["DevicePool"]


class DevicePool:
    """All memory of one pool on one device. Sizes in bytes; requests in multiples of 512."""

    def __init__(self, driver: Driver, device: int, segment_size: int, limit: int) -> None:
        self.driver = driver
        self.device = device
        self.segment_size = segment_size
        self.limit = limit
        self.arena = Arena(driver, device)
        self.region = Region()
        self.captures = Captures(self)
        self.deferred = Deferred(driver, self.region)
        #: By the driver's stream key.
        self.homes: dict[int, Home] = {}
        #: Their bins of single sizes, for the fast path.
        self.hot: dict[int, dict[int, Bin]] = {}
        self._streams: dict[int, Callable[[], Any]] = {}
        #: Keys for streams that went before they could be asked; no driver gives such ones.
        self._gone = itertools.count(-(1 << 62))
        self.accounts = Accounts(self._returned)

    # Homes

    def home(self, stream: Any) -> Home:
        """The home that serves ``stream`` now: its own, or that of the capture it is in."""
        if stream.ptr and self.driver.is_capturing(stream.ptr):
            home = self.captures.home(stream)
            if home is not None:
                return home
        return self.eager_home(stream)

    def eager_home(self, stream: Any) -> Home:
        """The home of a stream that is not capturing; None is a stream that is gone."""
        key = next(self._gone) if stream is None else self.driver.stream_key(stream)
        with self.region:
            self._streams[key] = _no_stream if stream is None else weakref.ref(stream)
            home = self.homes.get(key)
            if home is None:
                home = self.homes[key] = Home(self, key)
                self.hot[key] = home.hot
            return home

    def drain(self) -> None:
        """Park everything that was given back. For the region."""
        for home in (*self.homes.values(), *self.captures.homes()):
            for bin_ in home.bins():
                self._drain_bin(home, bin_)

    def _drain_bin(self, home: Home, bin_: Bin) -> None:
        if not bin_:
            return
        count = 0
        while True:
            try:
                block = bin_.pop()
            except IndexError:  # all, or the fast path of another thread took the last one
                break
            self.accounts.came_back(block)
            block.segment.home.park(block)
            count += 1
        bin_.members -= count
        self.captures.came_back(home, count)

    # Serving a request

    def allocate(self, home: Home, size: int) -> Block:
        """A block of exactly ``size`` bytes.

        Raises:
            OutOfMemoryError: even after releasing free segments and collecting garbage.
            DriverError: the driver refused for another reason than memory; nothing has changed.
        """
        block = home.reuse(size) or self._fit_quickly(home, size) or self._fit(home, size)
        if block is not None:
            return block
        if size > self.arena.size:
            raise self._out_of_memory(home, size, "the device has not so many addresses")
        if self.limit and size > self.limit:
            raise self._out_of_memory(home, size, "the request alone is above the limit")
        refusal = ""
        for relief in (self._settle, self._release_quietly, self._collect):
            reason = relief()
            block = self._fit(home, size) or self._adopt(home, size)
            if block is None:
                try:
                    block = self._grow(home, size)
                except DriverError as error:
                    if not error.out_of_memory:
                        raise
                    reason = str(error)
            if block is not None:
                return block
            refusal = reason or refusal
        raise self._out_of_memory(home, size, refusal)

    def _fit_quickly(self, home: Home, size: int) -> Block | None:
        """Leave the bins of single sizes alone, or the sizes of a loop would chase each other."""
        with self.region:
            for other in (*self.homes.values(), *self.captures.homes()):
                self._drain_bin(other, other.returned)
            return self._take(home, size)

    def _fit(self, home: Home, size: int) -> Block | None:
        with self.region:
            self.drain()
            return self._take(home, size)

    def _take(self, home: Home, size: int) -> Block | None:
        block = home.unpark(size)
        if block is None:
            home.merge_parked()
            block = home.take(size)
        if block is not None:
            self._hand_out(block)
        return block

    def _hand_out(self, block: Block) -> None:
        block.bin = block.segment.home.bin_for(block.size)
        block.bin.members += 1
        block.since = time.monotonic()
        self.accounts.handed_out(block)

    def _settle(self) -> str:
        self.deferred.settle()
        self.captures.poll()
        return ""

    def _release_quietly(self) -> str:
        """Release free segments; what the driver said if it could not."""
        try:
            self.release_free()
        except DriverError as error:
            return str(error)
        return ""

    def _collect(self) -> str:
        gc.collect()
        self._settle()
        return self._release_quietly()

    def _out_of_memory(self, home: Home, size: int, reason: str) -> OutOfMemoryError:
        with self.region:
            self.drain()
            home.merge_parked()
            free = self.accounts.total_bytes - self.accounts.used_bytes
            hole, total = home.largest(), self.accounts.total_bytes
        return OutOfMemoryError(
            size, total, self.limit, largest_hole=hole, free=free, reason=reason
        )

    # Growth

    def _wanted(self, home: Home) -> int:
        """What to ask of the driver at a time. Graphs grow by doubling: many live at once."""
        if home.capture is None:
            return self.segment_size
        held = sum(s.size for s in self.arena.segments.values() if s.home is home)
        return min(self.segment_size, max(held, self.arena.granule))

    def _grow(self, home: Home, size: int, *, least: bool = False) -> Block | None:
        """Serve ``size`` from a new segment; None where limit or addresses do not allow one."""
        with self.region:
            room = self.limit - self.accounts.total_bytes if self.limit else None
            wanted = 0 if least else self._wanted(home)
            bytes_ = self.arena.segment_size(size, wanted, room)
            if room is not None and bytes_ > room:
                return None
            offset = self.arena.place(bytes_)
            if offset is None:
                return None
            self.accounts.total_bytes += bytes_
        try:
            segment = self._populate(offset, bytes_)
        except BaseException as error:
            with self.region:
                self.arena.vacate(offset)
                self.accounts.total_bytes -= bytes_
            smaller = isinstance(error, DriverError) and error.out_of_memory and wanted
            if smaller and self.arena.segment_size(size, 0, room) < bytes_:
                return self._grow(home, size, least=True)
            raise
        with self.region:
            segment.home = home
            segment.first = Block(segment, offset, bytes_)
            self.arena.segments[offset] = segment
            self.accounts.grew()
            home.insert(segment.first)
            return self._take(home, size)

    def _populate(self, offset: int, size: int) -> Segment:
        """A new segment, with CuPy's memory hooks around the driver's work."""
        hooks = active_hooks()
        for hook in hooks:
            hook.alloc_preprocess(device_id=self.device, mem_size=size)
        with ExitStack() as undo:
            address = 0
            try:
                segment = self.arena.populate(offset, size)
                undo.callback(self.arena.evict, segment)
                address = segment.address
            finally:
                for hook in hooks:
                    hook.alloc_postprocess(device_id=self.device, mem_size=size, mem_ptr=address)
            undo.pop_all()
        return segment

    def reserve(self, home: Home, size: int) -> int:
        """Make sure ``size`` contiguous bytes are free for ``home``; returns bytes added."""
        with self.region:
            self.drain()
            home.merge_parked()
            if home.largest() >= size:
                return 0
            before = self.accounts.total_bytes
        block = self.allocate(home, size)
        block.bin.append(block)
        return max(0, self.accounts.total_bytes - before)

    def _adopt(self, home: Home, size: int) -> Block | None:
        """Serve ``size`` from a free segment of a stream that is gone.

        Work of that stream may still run, and no event can be recorded on it any more, so the
        device is synchronised first.
        """
        if home.capture is not None:
            return None
        with self.region:
            segment = self._orphan(size)
            if segment is None:
                return None
            segment.home.remove(segment.first)
        try:
            self.driver.synchronize(self.device)
        except BaseException as error:
            with self.region:
                segment.home.insert(segment.first)
            if isinstance(error, DriverError) and "CAPTURE" in error.result:
                return None  # a capture on another thread forbids waiting; grow instead
            raise
        with self.region:
            segment.home = home
            home.insert(segment.first)
            return self._take(home, size)

    def _orphan(self, size: int) -> Segment | None:
        """A free segment of a stream that is gone. For the region."""
        alive = {id(segment.home) for segment in self.arena.segments.values()}
        for key in [key for key, stream in self._streams.items() if key and stream() is None]:
            home = self.homes[key]
            home.merge_parked()
            for segment in home.whole_segments():
                if segment.size >= size:
                    return segment
            if id(home) not in alive:
                del self.homes[key], self.hot[key], self._streams[key]
        return None

    # Giving memory back to the driver

    def pin(self, segments: Iterable[Segment] | None = None) -> list[Segment]:
        """Keep segments from going back to the driver; None: all. Those gone or going are left out.

        Returns:
            What is pinned now, once more than before; each of them needs an :meth:`unpin`.
        """
        with self.region:
            wanted = list(self.arena.segments.values() if segments is None else segments)
            staying = [s for s in wanted if self.arena.segments.get(s.offset) is s and s.staying]
            for segment in staying:
                segment.pins += 1
            return staying

    def unpin(self, segments: Iterable[Segment]) -> None:
        """Take a pin of each segment back."""
        with self.region:
            for segment in segments:
                segment.pins -= 1

    def release_free(self, key: int | None = None) -> int:
        """Release all free, unregistered segments, or those of one stream key; returns bytes.

        Raises:
            DriverError: the driver refused; what it refused is in the pool as before.
        """
        with self.region:
            self.drain()
            homes = [h for h in self.homes.values() if key is None or h.key == key]
            leaving: list[Segment] = []
            for home in homes:
                home.merge_parked()
                for segment in home.whole_segments():
                    home.remove(segment.first)
                    leaving.append(segment)
        released = 0
        try:
            if leaving:  # unmapping does not wait for work that uses the memory
                self.driver.synchronize(self.device)
            while leaving:
                segment = leaving[-1]
                self.arena.evict(segment)
                leaving.pop()
                released += segment.size
                with self.region:
                    self.arena.vacate(segment.offset)
                    self.accounts.total_bytes -= segment.size
        finally:
            with self.region:
                for segment in leaving:
                    segment.home.insert(segment.first)
        return released

    def close(self) -> bool:
        """Release everything that is free, and the range when nothing is left; whether it is."""
        self._settle()
        self.release_free()
        if self.accounts.total_bytes:
            return False
        self.arena.close()
        return True

    # Figures; none of these changes what a later request is given

    def used_bytes(self) -> int:
        """Bytes of blocks in the user's hands."""
        with self.region:
            return self.accounts.exactly_used()

    def _returned(self) -> list[Block]:
        """Blocks that came back and were not looked at yet. For the region."""
        homes = (*self.homes.values(), *self.captures.homes())
        return [block for home in homes for bin_ in home.bins() for block in bin_.copy()]

    def handed_out(self) -> tuple[int, int]:
        """How many blocks were ever handed out, and their bytes in all."""
        with self.region:
            uses, size = self.accounts.retired_uses, self.accounts.retired_bytes
            for segment in self.arena.segments.values():
                for block in segment.blocks():
                    uses += block.uses
                    size += block.uses * block.size
            return uses, size

    def runs(self) -> list[Run]:
        """Every segment as runs of used blocks and merged free bytes, in address order."""
        with self.region:
            back = set(self._returned())
            segments = sorted(self.arena.segments.items())
            return [run for _, segment in segments for run in segment.runs(back)]

    def segments(self) -> list[Segment]:
        """The segments, by offset."""
        with self.region:
            return [segment for _, segment in sorted(self.arena.segments.items())]

    def find(self, address: int) -> Segment | None:
        """The live segment that holds ``address``, or None."""
        with self.region:
            return self.arena.find(address)


def _no_stream() -> None:
    """What a weak reference to a stream that is gone gives."""
