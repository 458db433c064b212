"""Ranks in threads, on every engine, for tests of graphs.

Without a GPU the device engine runs on kernels that the host runs; see ``emulated_driver``.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cupy
import group_workers
import numpy as np
import pytest
from emulated import build_directory
from emulated_driver import emulated_device

import cupy_zc
from cupy_zc import (
    Communicator,
    MemoryPool,
    enqueue,
    view,
)
from cupy_zc.driver.host import HostDriver


@dataclass
class Rank:
    """One rank: its communicator, and a stream for its work and one for eager calls."""

    comm: Communicator
    pool: MemoryPool
    stream: Any
    other: Any

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def empty(self, count: int = 1000, dtype: str = "i4") -> cupy.ndarray:
        return cupy.empty(count, dtype)

    def fill(self, array: cupy.ndarray, value: Any, stream: Any = None) -> None:
        """In the order of the rank's stream."""
        enqueue(lambda: view(array).__setitem__(slice(None), value), stream or self.stream)

    def read(self, array: cupy.ndarray) -> np.ndarray:
        """After the work of the rank's stream; others are not waited for."""
        self.stream.synchronize()
        with self.stream:
            return cupy_zc.asnumpy(array)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[list[Any]]:
        """A capture; the list has the graph afterwards."""
        made: list[Any] = []
        with self.stream:
            self.stream.begin_capture()
            try:
                yield made
            finally:
                made.append(self.stream.end_capture())

    def graph(self, *arrays: cupy.ndarray) -> Any:
        """A graph that sums each array in place. Collective."""
        with self.capturing() as made:
            for array in arrays:
                self.comm.all_reduce(array, array)
        return made.pop()

    def meet(self) -> None:
        """Wait for the other ranks, on the host alone."""
        self.comm._talk.all_gather(b"")

    def leases_end(self) -> None:
        """All leases end soon: CUDA tells of a graph's end from a thread of its own."""
        until = time.monotonic() + 5
        while self.comm.leases():
            assert time.monotonic() < until
            gc.collect()


def make(backend: str, n: int, **options: Any) -> list[Communicator]:
    """Communicators, and a pool for CuPy."""
    if backend == "host":
        driver: Any = HostDriver(granularity=1 << 16, memory=1 << 32)
    else:
        driver = "cuda"
    pool = cupy_zc.install(MemoryPool(driver=driver, segment_size=1 << 21))
    devices = list(range(n)) if backend == "device, 2 GPUs" else None
    return Communicator.in_process(
        n, backend=backend.partition(",")[0], driver=pool.driver, devices=devices, **options
    )


@contextlib.contextmanager
def ranks(backend: str, n: int = 2, **options: Any) -> Iterator[list[Communicator]]:
    comms = make(backend, n, **{"timeout": 20, **options})
    try:
        yield comms
    finally:
        for comm in comms:
            comm.close(force=True)
        cupy_zc.uninstall()
        assert comms[0]._driver.multicast_objects_created == 0


BACKENDS = pytest.mark.parametrize(
    "backend",
    [
        "host",
        "device, emulated",
        pytest.param("device", marks=pytest.mark.gpu),
        pytest.param("device, 2 GPUs", marks=pytest.mark.multi_gpu),
    ],
)


@pytest.fixture
def emulated(backend: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """A device where the test is for one that is emulated."""
    if backend != "device, emulated":
        yield
        return
    with emulated_device(build_directory(request.config)):
        yield


def run(comms: list[Communicator], body: Callable[[Rank], Any]) -> list[Any]:
    """``body(rank)`` on all ranks, each in a thread with its device and streams."""

    def one(number: int) -> Any:
        comm = comms[number]
        with comm._driver.use_device(comm._device):
            pool = cupy_zc.memory.installed_pool()
            assert pool is not None
            streams = [comm._driver.make_stream(non_blocking=True) for _ in range(2)]
            rank = Rank(comm, pool, *streams)
            with rank.stream:
                warm = rank.empty(4)
                rank.fill(warm, 1)  # kernels are loaded before a rank waits for another one
                enqueue(lambda: view(warm).__iadd__(1), rank.stream)
            rank.stream.synchronize()
            rank.meet()
            try:
                with rank.stream:
                    return body(rank)
            except BaseException:
                comm.close(force=True)
                raise

    return list(group_workers.all_fine(group_workers.in_threads(len(comms), one)))


def on_all(backend: str, body: Callable[[Rank], Any], n: int = 2, **options: Any) -> list[Any]:
    with ranks(backend, n, **options) as comms:
        return run(comms, body)
