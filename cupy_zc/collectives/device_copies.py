"""Copies of arrays that a call must not read where they are."""

from __future__ import annotations

from typing import Any

import cupy

from ..driver.api import KernelDriver, using_stream
from ..memory import MemoryPool

__all__ = ["Copies"]


class Copies:
    """Makes them in a pool of its own, which keeps what is copied in a capture for the graph.

    The allocator of the caller may be another one, which would hand the copy on; every replay would
    overwrite what it became.

    Args:
        driver: Of the arrays.
    """

    def __init__(self, driver: KernelDriver) -> None:
        self._driver = driver
        self._pool = MemoryPool(driver=driver)

    def of(self, address: int, nbytes: int, stream: Any) -> cupy.ndarray:
        """Bytes, copied in a stream; they are freed in its order."""
        with using_stream(stream, self._driver.current_stream):
            copy = cupy.ndarray(nbytes, "u1", self._pool.malloc(nbytes))
        self._driver.copy(copy.data.ptr, address, nbytes, stream)
        return copy

    def record_stream(self, copy: cupy.ndarray, stream: Any) -> None:
        """Free a copy behind another stream as well."""
        self._pool.record_stream(copy, stream)

    def close(self) -> None:
        """Give back what is free."""
        self._pool.free_all_blocks()
