"""Arrays of either driver filled and read by plain copies, without a kernel."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

import cupy_zc
from cupy_zc import Communicator
from cupy_zc.arrays import on_host
from cupy_zc.driver import select

__all__ = ["filled", "got", "put"]


def put(array: cupy.ndarray, numbers: np.ndarray[Any, Any]) -> None:
    """Fill an array by plain copies: to load a kernel can wait for another rank's that runs."""
    if on_host(array):
        cupy_zc.copyto(array, numbers)
    else:
        select("cuda").write(array.data.ptr, numbers.tobytes())


def got(array: cupy.ndarray) -> np.ndarray[Any, Any]:
    """What is in an array; without the page-locked memory of CuPy, which may wait as well."""
    if on_host(array):
        return cupy_zc.asnumpy(array)
    data = select("cuda").read(array.data.ptr, array.nbytes)
    return np.frombuffer(data, array.dtype).reshape(array.shape)


def filled(comm: Communicator, numbers: Any) -> cupy.ndarray:
    """A registered array with these numbers. Collective."""
    values = np.asarray(numbers)
    array = comm.empty(values.shape, values.dtype)
    put(array, values)
    return array
