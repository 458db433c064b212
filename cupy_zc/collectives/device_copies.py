"""Memory for one call, and copies of arrays that a call must not read where they are."""

from __future__ import annotations

from typing import Any

import cupy

from ..driver.api import Driver, KernelDriver, using_stream
from ..memory import MemoryPool

__all__ = ["Copies", "Extra"]


class Extra:
    """Memory of a pool of its own, which keeps for the graph what is allocated in a capture.

    The allocator of the caller may be another one, which would hand it on; every replay would
    overwrite what it became.

    Args:
        driver: Of the memory.
    """

    def __init__(self, driver: Driver) -> None:
        self._current_stream = driver.current_stream
        self._pool = MemoryPool(driver=driver)

    def empty(self, nbytes: int, stream: Any) -> cupy.ndarray:
        """Bytes, for work of a stream; they are freed in its order."""
        with using_stream(stream, self._current_stream):
            return cupy.ndarray(nbytes, "u1", self._pool.malloc(nbytes))

    def record_stream(self, array: cupy.ndarray, stream: Any) -> None:
        """Free an array behind another stream as well."""
        self._pool.record_stream(array, stream)

    def close(self) -> None:
        """Give back what is free."""
        self._pool.free_all_blocks()


class Copies(Extra):
    """Copies of arrays.

    Args:
        driver: Of the arrays.
    """

    def __init__(self, driver: KernelDriver) -> None:
        super().__init__(driver)
        self._copy = driver.copy

    def of(self, address: int, nbytes: int, stream: Any) -> cupy.ndarray:
        """Bytes, copied in a stream."""
        copy = self.empty(nbytes, stream)
        self._copy(copy.data.ptr, address, nbytes, stream)
        return copy
