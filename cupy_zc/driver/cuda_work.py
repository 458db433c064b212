"""Memory and work of streams that kernels need beside them, on CUDA."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as driver
import cupy
from cupy.cuda import runtime

from .cuda_calls import call, relaxed_capture
from .cuda_runtime import runtime_call

__all__ = ["copy", "fill", "mapped_memory", "plain_memory", "wait_until_zero"]


def mapped_memory(size: int) -> cupy.cuda.PinnedMemory:
    """Memory of the host that kernels of any device reach at the same address."""
    flags = runtime.hostAllocPortable | runtime.hostAllocMapped
    with runtime_call("cudaHostAlloc", f"size={size}"), relaxed_capture():
        return cupy.cuda.PinnedMemory(size, flags)


def wait_until_zero(stream: Any, address: int) -> None:
    """Let later work of a stream wait until a word of 4 bytes is 0. It keeps no kernel busy."""
    equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    call("cuStreamWaitValue32", stream.ptr, address, 0, equal, detail=f"address={address:#x}")


def plain_memory(size: int) -> cupy.cuda.Memory:
    """Memory of ``cudaMalloc``, which belongs to no segment; freed when it is dropped."""
    with runtime_call("cudaMalloc", f"size={size}"), relaxed_capture():
        return cupy.cuda.Memory(size)


def copy(target: int, source: int, size: int, stream: Any) -> None:
    """Enqueue a copy of device memory."""
    if not size:
        return
    with runtime_call("cudaMemcpyAsync", f"size={size}"):
        runtime.memcpyAsync(target, source, size, runtime.memcpyDeviceToDevice, stream.ptr)


def fill(address: int, value: int, size: int, stream: Any) -> None:
    """Enqueue to set bytes of device memory."""
    if not size:
        return
    with runtime_call("cudaMemsetAsync", f"address={address:#x}, size={size}"):
        runtime.memsetAsync(address, value, size, stream.ptr)
