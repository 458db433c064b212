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
from importlib.metadata import version
from typing import Any

import cuda.bindings.driver as driver
import cupy
from cupy.cuda import driver as cupy_driver
from cupy.cuda import runtime

from .. import kernels
from ..config import settings
from ..errors import DriverError
from .api import KernelName
from .cuda_calls import failure, relaxed_capture

__all__ = ["launch", "load"]

_launch = driver.cuLaunchKernelEx
_OVERLAP = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

#: The macro that a kernel is defined by which waits for those before it (``cuda/kernel.cuh``).
_WAITS = "CUPY_ZC_KERNEL"
#: The first architecture that has that wait.
_SM_90 = 90
#: cuda-bindings 12.9 asks a capture for its state in a way that it may refuse once it has kernels
#: that overlap; nobody tried that on a GPU.
_CAPTURES_HAVE_OVERLAPS = int(version("cuda-bindings").partition(".")[0]) >= 13
#: The legacy default stream, which 0 is not where the bindings are told to take another one for it.
_LEGACY = 1

#: Functions that :func:`load` gave, as the bindings take them, and whether a launch may overlap
#: with the end of the kernel before it.
_functions: dict[int, tuple[driver.CUfunction, bool]] = {}

#: What launches need that were made, by function, blocks, threads and stream; costly to make.
_launches: dict[tuple[int, int, int, int], tuple[driver.CUlaunchConfig, driver.CUfunction]] = {}
_KEPT = 4096


def launch(function: int, blocks: int, threads: int, stream: Any, parameters: int) -> None:
    """Launch a kernel.

    It starts while the kernel before it on the stream still ends, where it is one that waits for
    that by itself and the GPU can (programmatic dependent launch, compute capability 9.0; with
    cuda-bindings 13).

    Args:
        function: What :func:`load` gave.
        blocks: Of a one-dimensional grid.
        threads: Of a block.
        stream: Where; of the current device.
        parameters: Address of an array of addresses of arguments.

    Raises:
        DriverError: CUDA refused.
    """
    key = (function, blocks, threads, stream.ptr)
    made = _launches.get(key)
    if made is None:
        made = _configure(*key)
    result = _launch(*made, parameters, 0)[0]
    if result:
        detail = f"blocks={blocks}, threads={threads}, stream={stream.ptr:#x}"
        raise failure("cuLaunchKernelEx", result, detail)


def _may_overlap(source: str, capability: int) -> bool:
    return _CAPTURES_HAVE_OVERLAPS and _WAITS in source and capability >= _SM_90


def _configure(
    function: int, blocks: int, threads: int, stream: int
) -> tuple[driver.CUlaunchConfig, driver.CUfunction]:
    handle, overlaps = _functions[function]
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = 0, driver.CUstream(stream or _LEGACY)
    if overlaps:
        attribute = driver.CUlaunchAttribute()
        attribute.id = _OVERLAP
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
    config.numAttrs = int(overlaps)
    if len(_launches) >= _KEPT:
        _launches.clear()
    made = _launches[function, blocks, threads, stream] = (config, handle)
    return made


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
            source = kernels.source(name.source)
            function = cupy.RawModule(code=source, options=options).get_function(name.function)
            pointer: int = function.kernel.ptr
            overlaps = _may_overlap(source, int(cupy.cuda.Device().compute_capability))
            _functions[pointer] = (driver.CUfunction(pointer), overlaps)
            return pointer, function
    except (
        cupy.cuda.compiler.CompileException,
        runtime.CUDARuntimeError,
        cupy_driver.CUDADriverError,
    ) as error:
        cause = f"{name.source} cannot be used on device {device}: {error}"
        code = getattr(error, "status", 0)
        raise DriverError("cupy.RawModule", type(error).__name__, code, cause=cause) from error
