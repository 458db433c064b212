"""Memory as NumPy sees it: views of addresses, and memory handed over by a descriptor."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ..driver.api import Driver, SegmentHandle, round_up
from .reductions import Array

__all__ = ["matrix", "opened", "packed"]


class _Span:
    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


@functools.lru_cache(maxsize=4096)
def matrix(address: int, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
    """A view of memory. It owns nothing, so one can be kept: it says no more than its arguments.

    Making one takes 2 us, finding it again a tenth of that; a loop uses the same ones every time.
    """
    size = math.prod((rows, columns, dtype.itemsize))
    if size == 0:
        return np.empty((rows, columns), dtype)
    return np.asarray(_Span(address, size)).view(dtype).reshape(rows, columns)


@contextmanager
def _mapped(driver: Driver, device: int, handle: SegmentHandle) -> Iterator[int]:
    """An address for a handle, which is released at the end of the block."""
    with ExitStack() as stack:
        stack.callback(driver.release, handle)
        granularity = driver.granularity(device, handle.size)
        address = driver.reserve(handle.size, granularity.alignment)
        stack.callback(driver.free_range, address, handle.size)
        driver.map(address, handle)
        stack.callback(driver.unmap, address, handle.size)
        driver.set_access(address, handle.size, device)
        yield address


@contextmanager
def packed(driver: Driver, device: int, data: Array) -> Iterator[list[int]]:
    """A copy of an array in memory of its own, as a descriptor; none for an array without bytes.

    Raises:
        DriverError: there is no memory for it.
    """
    if not data.nbytes:
        yield []
        return
    size = round_up(data.nbytes, driver.granularity(device, data.nbytes).size)
    handle = driver.create(device, size)
    with _mapped(driver, device, handle) as address:
        np.copyto(matrix(address, 1, data.size, data.dtype)[0], data)
        fd = driver.export_segment(handle)
    try:
        yield [fd]
    finally:
        os.close(fd)


@contextmanager
def opened(
    driver: Driver, device: int, fds: tuple[int, ...], count: int, dtype: np.dtype[Any]
) -> Iterator[Array]:
    """What was :func:`packed`, of which this process got a descriptor; it stays the caller's.

    Raises:
        DriverError: it cannot be mapped.
    """
    if not fds:
        yield np.empty(0, dtype)
        return
    nbytes = count * dtype.itemsize
    size = round_up(nbytes, driver.granularity(device, nbytes).size)
    handle = driver.import_segment(fds[0], size, device)
    with _mapped(driver, device, handle) as address:
        yield matrix(address, 1, count, dtype)[0]
