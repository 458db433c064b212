"""The pool of one device: how a request is served.

A request that the fast path of :class:`~cupy_zc.memory.MemoryPool` cannot serve comes here:

1. an exact-size parked block of the stream's home, or its best fit after merging;
2. blocks and graphs that became free meanwhile, then segments of streams that are gone;
3. a new segment;
4. the same again after releasing all free segments, and after a garbage collection;
5. :class:`~cupy_zc.errors.OutOfMemoryError`, with the sizes.

:mod:`.supply` has what the steps 2 to 4 do with the driver.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from ..driver.api import Driver, capturing
from ..errors import DriverError, OutOfMemoryError
from . import graphs
from .accounts import Accounts
from .arena import Arena
from .blocks import Bin, Block, Home, Run, Segment
from .captures import Captures
from .deferred import Deferred
from .region import Region
from .supply import Supply, Take

__all__ = ["DevicePool"]

_T = TypeVar("_T")


class DevicePool:
    """All memory of one pool on one device. Sizes in bytes; requests in multiples of 512."""

    def __init__(
        self,
        driver: Driver,
        device: int,
        segment_size: int,
        limit: int,
        hot: dict[int, dict[int, Bin]] | None = None,
    ) -> None:
        self.driver = driver
        self.device = device
        self.segment_size = segment_size
        self.limit = limit
        self.arena = Arena(driver, device)
        self.region = Region()
        self.captures = Captures(self)
        self.deferred = Deferred(driver, self.region)
        #: By the driver's stream key.
        self.homes: dict[int, Home] = {0: Home(self, 0)}
        #: For the fast path, the bins of single sizes of all homes but that of the legacy default
        #: stream. May be shared by devices, whose other streams have different keys; the key of a
        #: per-thread default stream stands for one on each device, and is never looked up here.
        self.hot: dict[int, dict[int, Bin]] = {} if hot is None else hot
        self._streams: dict[int, Callable[[], Any]] = {}
        #: Keys for streams that went before they could be asked; no driver gives such ones.
        self._gone = itertools.count(-(1 << 62))
        self.accounts = Accounts(self._returned)
        self.supply = Supply(self)

    # Homes

    def home(self, stream: Any) -> Home:
        """The home that serves ``stream`` now: its own, or that of the capture it is in."""
        if capturing(self.driver, stream):
            home = self.captures.home(stream)
            if home is not None:
                return home
        return self.eager_home(stream)

    def eager_home(self, stream: Any) -> Home:
        """The home of a stream that is not capturing; None is a stream that is gone."""
        alive: Callable[[], Any] = _no_stream
        if stream is None:
            key = next(self._gone)
        else:
            key = self.driver.stream_key(stream)
            # A per-thread default stream is gone when its thread is.
            alive = weakref.ref(threading.current_thread() if key < 0 else stream)
        with self.region:
            self._streams[key] = alive
            home = self.homes.get(key)
            if home is None:
                home = self.homes[key] = Home(self, key)
                self.hot[key] = home.hot
            return home

    def homes_of_gone_streams(self) -> list[Home]:
        """Homes whose stream is gone and that hold memory; others are forgotten. For the region."""
        holding = {id(segment.home) for segment in self.arena.segments.values()}
        found = []
        for key in [key for key, stream in self._streams.items() if key and stream() is None]:
            if id(self.homes[key]) in holding:
                found.append(self.homes[key])
            else:
                del self.homes[key], self._streams[key]
                self.hot.pop(key, None)
        return found

    def drain(self) -> None:
        """Park everything that was given back. For the region."""
        for home in self._all_homes():
            for bin_ in home.bins():
                self._drain_bin(bin_)
        self.captures.forget_ghosts()

    def _all_homes(self) -> tuple[Home, ...]:
        return (*self.homes.values(), *self.captures.homes())

    def _drain_bin(self, bin_: Bin) -> None:
        while bin_:
            try:
                block = bin_.pop()
            except IndexError:  # all, or the fast path of another thread took the last one
                break
            bin_.members -= 1
            self.accounts.came_back(block)
            block.segment.home.park(block)

    # Serving a request

    def allocate(self, home: Home, size: int) -> Block:
        """A block of exactly ``size`` bytes.

        Raises:
            OutOfMemoryError: even after releasing free segments and collecting garbage.
            DriverError: the driver refused for another reason than memory; nothing has changed.
        """
        self.deferred.settle()
        return home.reuse(size) or self._obtain(home, size, self._take)

    def reserve(self, home: Home, size: int) -> int:
        """Make sure ``size`` contiguous bytes are free for ``home``; returns bytes added.

        Raises: as :meth:`allocate`.
        """
        before = self.accounts.total_bytes
        self._obtain(home, size, self._has)
        return max(0, self.accounts.total_bytes - before)

    def _obtain(self, home: Home, size: int, take: Take[_T]) -> _T:
        found = self._fit_quickly(home, size, take) or self._fit(home, size, take)
        if found is not None:
            return found
        if size > self.arena.size:
            raise self._out_of_memory(home, size, "the device has not so many addresses")
        if self.limit and size > self.limit:
            raise self._out_of_memory(home, size, "the request alone is above the limit")
        refusal = ""
        for relief in (self.settle, self._release_quietly, self._collect):
            reason = relief()
            found = self._fit(home, size, take) or self.supply.adopt(home, size, take)
            if found is None:
                try:
                    found = self.supply.grow(home, size, take)
                except DriverError as error:
                    if not error.out_of_memory:
                        raise
                    reason = str(error)
            if found is not None:
                return found
            refusal = reason or refusal
        raise self._out_of_memory(home, size, refusal)

    def _fit_quickly(self, home: Home, size: int, take: Take[_T]) -> _T | None:
        """Leave the bins of single sizes alone, or the sizes of a loop would chase each other."""
        with self.region:
            for other in self._all_homes():
                self._drain_bin(other.returned)
            return take(home.latest(), size)

    def _fit(self, home: Home, size: int, take: Take[_T]) -> _T | None:
        with self.region:
            self.drain()
            return take(home.latest(), size)

    def _take(self, home: Home, size: int) -> Block | None:
        block = home.unpark(size)
        if block is None:
            home.merge_parked()
            block = home.take(size)
        if block is not None:
            self._hand_out(block)
        return block

    def _has(self, home: Home, size: int) -> bool | None:
        home.merge_parked()
        return home.largest() >= size or None

    def _hand_out(self, block: Block) -> None:
        block.bin = block.segment.home.bin_for(block.size)
        block.bin.members += 1
        block.since = time.monotonic()
        block.segment.settled = None
        self.accounts.handed_out(block)

    def settle(self) -> str:
        """Take back what graphs and streams are done with; nothing to say of it."""
        graphs.settle()
        self.deferred.settle()
        self.captures.poll()
        return ""

    def _release_quietly(self) -> str:
        """Release free segments; what the driver said if it could not."""
        try:
            self.supply.release_free()
        except DriverError as error:
            return str(error)
        return ""

    def _collect(self) -> str:
        gc.collect()
        self.settle()
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

    def close(self) -> bool:
        """Release everything that is free, and the range when nothing is left; whether it is."""
        self.settle()
        self.supply.release_free()
        if self.accounts.total_bytes:
            return False
        self.arena.close()
        return True

    # Figures; none of these changes what a later request is given

    def free_bytes(self) -> int:
        """Bytes held and not in the user's hands."""
        with self.region:
            return self.accounts.total_bytes - self.accounts.exactly_used()

    def used_bytes(self) -> int:
        """Bytes of blocks in the user's hands."""
        with self.region:
            return self.accounts.exactly_used()

    def _returned(self) -> list[Block]:
        """Blocks that came back and were not looked at yet. For the region."""
        return [
            block for home in self._all_homes() for bin_ in home.bins() for block in bin_.copy()
        ]

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
