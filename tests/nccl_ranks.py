"""Ranks as threads that call NCCL's functions: a communicator, a stream and memory for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import group_workers as workers
import numpy as np
from emulated_driver import DeviceStream, EmulatedDriver
from fake_nccl import FakeNccl
from fake_nccl_world import FakeComm

from cupy_zc.base_memory import BaseMemory

__all__ = ["BYTES", "FLOAT", "SUM", "Rank", "each_rank", "rank_of"]

#: ``ncclFloat32``, and ``ncclSum``.
FLOAT, SUM = 7, 0
#: Memory of a rank.
BYTES = 1 << 12


class Rank(NamedTuple):
    """One rank, and what it works with."""

    nccl: FakeNccl
    comm: FakeComm
    stream: DeviceStream
    memory: BaseMemory

    @property
    def number(self) -> int:
        return self.comm.rank

    @property
    def at(self) -> int:
        """Where its memory begins."""
        return self.memory.ptr

    @property
    def driver(self) -> EmulatedDriver:
        return self.nccl.world.driver

    def put(self, array: Any, offset: int = 0) -> None:
        self.driver.write(self.at + offset, np.ascontiguousarray(array).tobytes())

    def got(self, count: int, dtype: Any = "f4", offset: int = 0) -> np.ndarray[Any, Any]:
        """What is in memory when the stream is done."""
        self.stream.synchronize()
        kind = np.dtype(dtype)
        return np.frombuffer(self.driver.read(self.at + offset, count * kind.itemsize), kind)

    def add_all(self, count: int = 4, stream: DeviceStream | None = None) -> None:
        """All-reduce the first floats, in place."""
        where = (stream or self.stream).ptr
        self.nccl.all_reduce(self.at, self.at, count, FLOAT, SUM, self.comm, where)


def rank_of(nccl: FakeNccl, size: int, rank: int, identity: bytes, *, sharp: bool = False) -> Rank:
    """Join, with memory full of the rank's number plus one."""
    driver = nccl.world.driver
    comm = nccl.init(size, identity, rank, sharp=sharp, most_blocks=None)
    made = Rank(nccl, comm, driver.make_stream(non_blocking=True), driver.plain_memory(BYTES))
    made.put(np.full(BYTES // 4, rank + 1, "f4"))
    return made


def each_rank(
    nccl: FakeNccl, size: int, body: Callable[[Rank], Any], *, sharp: bool = False
) -> list[Any]:
    """``body(rank)`` in a thread for each rank; destroys what it did not give back."""
    identity = nccl.unique_id()

    def run(number: int) -> Any:
        rank = rank_of(nccl, size, number, identity, sharp=sharp)
        try:
            return body(rank)
        except BaseException:
            nccl.world.stop()
            raise
        finally:
            if rank.comm.state == "alive":
                nccl.destroy(rank.comm)

    return list(workers.all_fine(workers.in_threads(size, run)))
