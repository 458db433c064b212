"""Kernels of ``cuda/``: compiled once for each device, loaded before anything waits, launched.

CuPy compiles them (NVRTC) and keeps the machine code on disk. Its cache does not look into headers,
so a hash of all sources is part of the options. Loading may have to wait for kernels that run, and
a kernel of a rank can wait for another rank: so of all threads that want one kernel the first one
loads it, and the others wait for that.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import cupy
from cupy.cuda import driver as _driver
from cupy.cuda import runtime

from .. import kernels
from ..config import settings
from ..errors import DriverError
from .api import KernelName
from .cuda_calls import relaxed_capture

__all__ = ["launch", "load"]

# The call of the driver as CuPy has it: 2 us less than a ``RawKernel`` takes with one argument.
_launch = _driver.launchKernel


def launch(function: int, blocks: int, threads: int, stream: Any, parameters: int) -> None:
    """Launch a kernel.

    Args:
        function: What :func:`load` gave.
        blocks: Of a one-dimensional grid.
        threads: Of a block.
        stream: Where; of the current device.
        parameters: Address of an array of addresses of arguments.

    Raises:
        DriverError: CUDA refused.
    """
    try:
        _launch(function, blocks, 1, 1, threads, 1, 1, 0, stream.ptr, parameters, 0)
    except _driver.CUDADriverError as error:
        detail = f"blocks={blocks}, threads={threads}, stream={stream.ptr:#x}"
        cause = str(error)
        raise DriverError(
            "cupy.cuda.driver.launchKernel",
            cause.partition(":")[0],
            error.status,
            detail=detail,
            cause=cause,
        ) from error


@functools.cache
def _hash_of_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(kernels.path("types.cuh").parent.glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


#: Kernels that are loaded or on their way, by device. A module is never unloaded.
_loaded: dict[tuple[int, KernelName], Future[tuple[int, Any]]] = {}
_lock = threading.Lock()


def load(device: int, name: KernelName) -> int:
    """The function of a kernel on a device, for :func:`launch`.

    Args:
        device: Ordinal.
        name: Which kernel.

    Raises:
        DriverError: it does not compile or load, or another thread did not get it loaded in time.
        InvalidValueError: there is no such source.
    """
    key = (device, name)
    with _lock:
        future = _loaded.get(key)
        mine = future is None
        if future is None:
            future = _loaded[key] = Future()
    if not mine:
        return _await(future, device, name)
    try:
        loaded = _load(device, name)
    except BaseException as error:
        with _lock:
            del _loaded[key]
        # An interrupt is for this thread alone: the others learn that it is not loaded.
        future.set_exception(error if isinstance(error, Exception) else _not_loaded(device, name))
        raise
    future.set_result(loaded)
    return loaded[0]


def _await(future: Future[tuple[int, Any]], device: int, name: KernelName) -> int:
    """What another thread loads."""
    try:
        return future.result(timeout=settings().setup_timeout)[0]
    except FutureTimeoutError:
        raise _not_loaded(device, name) from None


def _not_loaded(device: int, name: KernelName) -> DriverError:
    cause = f"another thread did not get {name.source} loaded on device {device}; try again"
    return DriverError("cupy.RawModule", "NOT_LOADED", 0, cause=cause)


def _load(device: int, name: KernelName) -> tuple[int, Any]:
    folder = kernels.path(name.source).parent
    options = (
        "-std=c++17",
        f"-I{folder}",
        f"-DCUPY_ZC_SOURCES={_hash_of_sources()}",
        *(f"-D{define}" for define in name.defines),
    )
    try:
        with cupy.cuda.Device(device), relaxed_capture():
            module = cupy.RawModule(code=kernels.source(name.source), options=options)
            function = module.get_function(name.function)
            return function.kernel.ptr, function
    except (
        cupy.cuda.compiler.CompileException,
        runtime.CUDARuntimeError,
        _driver.CUDADriverError,
    ) as error:
        cause = f"{name.source} cannot be used on device {device}: {error}"
        code = getattr(error, "status", 0)
        raise DriverError("cupy.RawModule", type(error).__name__, code, cause=cause) from error
