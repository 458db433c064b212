"""Ranks for the tests of ``cupy_zc.registration``: threads of this process, and processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import cupy
import group_workers
import numpy as np
from faults import FaultyDriver

import cupy_zc
from cupy_zc import MemoryPool, PeerTimeoutError
from cupy_zc.driver.host import HostDriver
from cupy_zc.group import Channel, discover, from_tcp
from cupy_zc.registration import Registry, SymmetricHeap

GRANULE = 1 << 16
UNKNOWN = ("CUDA_ERROR_UNKNOWN", 999)


@dataclass
class Rank:
    """One rank: a driver and a pool of its own."""

    channel: Channel
    driver: FaultyDriver
    registry: Registry = field(init=False)
    pool: MemoryPool = field(init=False)
    #: Closed with the rank.
    heaps: list[SymmetricHeap] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registry = Registry(self.driver, 0, self.channel, timeout=20)
        self.pool = MemoryPool(driver=self.driver, segment_size=GRANULE)

    @property
    def rank(self) -> int:
        return self.channel.rank

    def array(self, nbytes: int = 1000, fill: int | None = None) -> Any:
        array = cupy.ndarray(nbytes, np.uint8, memptr=self.pool.malloc(nbytes))
        if fill is not None and nbytes:
            cupy_zc.copyto(array, fill)
        return array

    def state(self) -> tuple[Any, ...]:
        """Everything that a registration that failed must leave as it was."""
        registry = self.registry
        published = {
            entry.name: (segment.pins, len(entry.holders))
            for segment, entry in registry._published.items()
        }
        windows = {
            key: (window.base, dict(window._mapped))
            for key, window in registry.windows._windows.items()
        }
        pins = [segment.pins for segment in self.pool.device_pool().segments()]
        return (
            published,
            list(registry._leaving),
            windows,
            pins,
            len(registry._registrations),
            self.driver.memory_info(0),
        )

    def read(self, rank: int, place: tuple[int, int], size: int = 1) -> bytes:
        return self.driver.read(self.registry.address(rank, *place), size)


@contextlib.contextmanager
def ranks(
    n: int, memory: int = 4096 * GRANULE, granularity: int = GRANULE, devices: int = 1
) -> Iterator[list[Rank]]:
    """Ranks as threads of this process, each with a driver and a pool of its own."""
    with group_workers.channels(n) as channels:
        drivers = [
            HostDriver(granularity=granularity, memory=memory, devices=devices) for _ in range(n)
        ]
        made = [Rank(c, FaultyDriver(d)) for c, d in zip(channels, drivers, strict=True)]
        try:
            yield made
        finally:
            for rank in made:
                rank.registry.close()
                for heap in rank.heaps:
                    heap.close()


def each(made: list[Rank], body: Callable[[Rank], Any]) -> list[Any]:
    """What ``body`` returned, or the exception it raised, on every rank at once."""
    return group_workers.in_threads(len(made), lambda r: body(made[r]))


def fine(made: list[Rank], body: Callable[[Rank], Any]) -> list[Any]:
    """What ``body`` returned on every rank; none may raise."""
    return list(group_workers.all_fine(each(made, body)))


def heaps(made: list[Rank]) -> list[SymmetricHeap]:
    return fine(made, lambda rank: SymmetricHeap(rank.registry, timeout=10))


# Processes


@contextlib.contextmanager
def _process(rank: int, n: int, port: int) -> Iterator[Rank]:
    with contextlib.ExitStack() as stack:
        bootstrap = stack.enter_context(from_tcp(n, rank, port=port, timeout=20))
        channel = stack.enter_context(Channel.open(bootstrap, discover(bootstrap), timeout=20))
        made = Rank(channel, FaultyDriver(HostDriver(granularity=GRANULE, memory=4096 * GRANULE)))
        stack.callback(made.registry.close)
        yield made


def use_registry(rank: int, n: int, port: int) -> list[Any]:
    """Register, read every peer's bytes, deregister; what was seen."""
    with _process(rank, n, port) as me:
        history = [me.array(GRANULE) for _ in range(rank)]  # so that the offsets differ
        del history[:-1]
        array = me.array(3000, fill=17 + rank)
        registration = me.registry.register(array)
        seen = [me.read(peer, registration.arrays[peer], 3000) for peer in range(n)]
        me.channel.all_gather(b"", tag="seen")
        right = [data == bytes([17 + peer]) * 3000 for peer, data in enumerate(seen)]
        peer = (rank + 1) % n
        me.driver.write(me.registry.address(peer, *registration.arrays[peer]), b"written")
        me.channel.all_gather(b"", tag="written")
        right.append(bytes(cupy_zc.asnumpy(array)[:7]) == b"written")
        segments = [len(window._mapped) for window in me.registry.windows._windows.values()]
        registration.deregister()
        me.registry.collect()
        left = [len(window._mapped) for window in me.registry.windows._windows.values()]
        place = registration.arrays[rank]
        assert place is not None
        return [right, segments, left, place[1]]


def use_heap(rank: int, n: int, port: int) -> list[Any]:
    """The offsets of symmetric arrays, and whether the peers' bytes are there."""
    with _process(rank, n, port) as me:
        heap = SymmetricHeap(me.registry, timeout=20)
        kept = [heap.allocate(5000 * (at + 1)) for at in range(20)]
        offsets = [pointer.ptr - heap.arena.base for pointer in kept]
        for at in range(rank, 20, n):
            kept[at] = None
        more = [heap.allocate(100 * GRANULE) for _ in range(2)]
        offsets += [pointer.ptr - heap.arena.base for pointer in more]
        me.driver.write(more[1].ptr, bytes([rank]) * 100)
        me.channel.all_gather(b"", tag="written")
        right = [me.read(peer, (0, offsets[-1]), 100) == bytes([peer]) * 100 for peer in range(n)]
        me.channel.all_gather(b"", tag="read")
        heap.close()
        return [offsets, right]


def be_killed_or_notice(rank: int, n: int, port: int) -> list[Any]:
    """Rank 1 is killed between two registrations; what the others see, and what is left of it."""
    with _process(rank, n, port) as me:
        array = me.array(fill=rank)
        registration = me.registry.register(array)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        other = me.array(10 * GRANULE)
        before = me.state()[:-1]
        try:
            me.registry.register(other)
            missed: tuple[int, ...] = ()
        except PeerTimeoutError as error:
            missed = error.ranks
        # The memory of the dead rank stays readable as long as it is mapped.
        data = me.read(1, registration.arrays[1])
        return [missed, data, me.state()[:-1] == before]
