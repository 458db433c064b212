"""What tests of graphs share: arrays of pools, captures, and ranks in threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import collective_workers as work
import cupy
import numpy as np

import cupy_zc
from cupy_zc import Communicator
from cupy_zc.memory import graphs

__all__ = [
    "GRANULE", "array_of", "captured", "capturing", "clean", "fill", "fill_now", "live_ties",
    "meet", "pool_of", "run", "state",
]  # fmt: skip

GRANULE = 1 << 12


def pool_of(comm: Communicator, segment_size: int = 1 << 16) -> cupy_zc.MemoryPool:
    return cupy_zc.MemoryPool(driver=comm._driver, segment_size=segment_size)


def array_of(pool: cupy_zc.MemoryPool, count: int = 100, dtype: str = "i4") -> cupy.ndarray:
    kind = np.dtype(dtype)
    return cupy.ndarray(count, kind, pool.malloc(count * kind.itemsize))


def captured(comm: Communicator, *arrays: cupy.ndarray) -> tuple[Any, Any]:
    """A graph that sums each array in place, and its stream. Collective."""
    stream = comm._driver.make_stream()
    stream.begin_capture()
    for array in arrays:
        comm.all_reduce(array, array, stream=stream)
    return stream.end_capture(), stream


def meet(comm: Communicator) -> None:
    """A barrier of the hosts: one on a stream would be waited for by who closes beside it."""
    comm._talk.all_gather(b"")


def fill(array: cupy.ndarray, value: Any) -> None:
    cupy_zc.copyto(array, value)


def run(n: int, body: Callable[[Communicator], Any], **options: Any) -> list[Any]:
    with work.communicators(n, timeout=10, **options) as comms:
        return work.run(comms, body)


def fill_now(array: cupy.ndarray, value: int) -> None:
    """From inside a stream, where :func:`fill` would wait for that stream."""
    cupy_zc.view(array)[...] = value


def live_ties() -> list[Any]:
    graphs.settle()
    return list(graphs._ties)


@contextmanager
def capturing(comm: Communicator) -> Iterator[Any]:
    """A stream that is capturing; the graph is thrown away."""
    stream = comm._driver.make_stream()
    stream.begin_capture()
    try:
        yield stream
    finally:
        stream.end_capture()


def state(comm: Communicator) -> tuple[Any, ...]:
    """What a capture that failed must leave as it was."""
    registry = comm._registry
    segments = [
        (entry.name, segment.pins, len(entry.holders))
        for segment, entry in registry._published.items()
        if entry.wanted
    ]
    windows = {key: dict(window._mapped) for key, window in comm._registry.windows._windows.items()}
    return segments, windows, registry.lanes.held


def clean(comm: Communicator) -> None:
    """No lease is left, and the next capture works on all ranks."""
    assert comm.leases() == ()
    comm.collect()
    assert comm._registry.lanes.held == ()
    array, stream = comm.zeros(10, "i4"), comm._driver.make_stream()
    stream.begin_capture()
    comm.all_reduce(array, array, stream=stream)
    graph = stream.end_capture()
    cupy_zc.copyto(array, comm.rank + 1)
    comm.barrier()
    graph.launch(stream)
    stream.synchronize()
    assert (cupy_zc.view(array) == sum(range(1, comm.size + 1))).all()
    comm.barrier()
