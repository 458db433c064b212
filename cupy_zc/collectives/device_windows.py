"""The bases of all windows, where kernels find them."""

from __future__ import annotations

import ctypes
from typing import Any

from ..driver.api import KernelDriver, using_stream
from ..registration import Registry

__all__ = ["WindowTable"]


class WindowTable:
    """A table in device memory: a row for each rank and one for multicast, a column for each arena.

    Bases never move and numbers of arenas are never given twice, so a kernel that runs, or a graph
    that is replayed, reads right values beside a refresh. A table that has become too small is
    kept, for the graphs that know it.
    """

    #: Columns of the first table.
    FIRST = 32

    def __init__(self, driver: KernelDriver, registry: Registry, ranks: int, side: Any) -> None:
        self._driver = driver
        self._windows = registry.windows
        self._rows = ranks + 1
        self._side = side
        self._kept: list[Any] = []
        #: Which bases are written.
        self.version = -1
        self.arenas = 0
        self.address = 0
        self._grow(self.FIRST)

    def _grow(self, arenas: int) -> None:
        memory = self._driver.kept_memory(8 * arenas * self._rows)
        self._kept.append(memory)
        self.arenas, self.address = arenas, memory.ptr

    def close(self) -> None:
        """Give the tables back. No kernel reads them any more."""
        self._kept.clear()

    def refresh(self) -> None:
        """Write what is new. Local; waits for nothing but the write itself."""
        version = self._windows.version
        if version == self.version:
            return
        bases = self._windows.bases()
        most = 1 + max(arena for _, arena in bases)
        if most > self.arenas:
            self._grow(2 * most)
        table = (ctypes.c_uint64 * (self.arenas * self._rows))()
        for (rank, arena), base in bases.items():
            table[rank * self.arenas + arena] = base
        with using_stream(self._side, self._driver.current_stream):
            self._driver.write(self.address, bytes(table))
        self.version = version
