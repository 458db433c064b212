"""The CUDA driver, on cuda-python: what :class:`~cupy_zc.driver.api.Driver` asks, and no more.

The parts: :mod:`.cuda_calls` makes calls and names failures, :mod:`.cuda_segments` is physical
memory, :mod:`.cuda_multicast` multicast objects behind their guard, :mod:`.cuda_graphs` the leases.
Works with cuda-bindings 12.9 and 13, whose result tuples agree in everything used here.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as driver
import cupy
from cupy.cuda import runtime

from ..errors import InvalidTypeError
from .api import (
    CaptureInfo,
    DeviceInfo,
    Granularity,
    MemoryInfo,
    MulticastHandle,
    SegmentHandle,
    capturing,
)
from .cuda_calls import Contexts, Handle, call, failure, own, relaxed_capture
from .cuda_graphs import CudaGraphLease, lease_graph
from .cuda_kept import Keeper, KeptMemory
from .cuda_kernels import launch, load
from .cuda_multicast import CudaMulticast, CudaMulticastObject, require_team
from .cuda_runtime import CudaEvent, record, runtime_call
from .cuda_segments import CudaSegment, CudaSegments
from .cuda_waiting import Waiting
from .cuda_work import copy, fill, mapped_memory, plain_memory, wait_until_zero

__all__ = ["CudaDriver", "CudaEvent"]

_RESULT = driver.CUresult
_ACTIVE = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
_NOT_CAPTURING = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
_READ_WRITE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_ON_DEVICE = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE

#: The legacy default stream has two names, and the per-thread default stream one.
_LEGACY = (0, 1)
_PER_THREAD = 2


class CudaDriver:
    """The driver of the GPUs of this process.

    Thread-safe without locks: what is kept is the answer to a question that has only one.

    Raises:
        DriverError: there is no NVIDIA driver, no GPU, or CuPy cannot use what there is.
    """

    name = "cuda"
    load, launch = staticmethod(load), staticmethod(launch)
    copy, fill = staticmethod(copy), staticmethod(fill)
    wait_until_zero = staticmethod(wait_until_zero)
    plain_memory = staticmethod(plain_memory)

    def __init__(self) -> None:
        call("cuInit", 0)
        self._count = int(call("cuDeviceGetCount"))
        if self._count == 0:
            raise failure("cuDeviceGetCount", _RESULT.CUDA_ERROR_NO_DEVICE)
        with runtime_call("cudaGetDeviceCount"):
            runtime.getDeviceCount()  # fails where the driver is too old for CuPy's runtime
        self._contexts = Contexts()
        self._segments = CudaSegments(self._contexts, self._count)
        self._multicast = CudaMulticast(self._contexts)
        self._thread = threading.local()
        self._thread_keys = itertools.count(-1, -1)
        self._waiting = Waiting(self._contexts)
        self._keeper = Keeper()
        #: Bytes mapped at an address.
        self._mappings: dict[int, int] = {}
        self.current_stream: Callable[[], Any] = cupy.cuda.get_current_stream
        self.is_capturing: Callable[[int], bool] = runtime.streamIsCapturing
        self.current_device: Callable[[], int] = runtime.getDevice

    # Devices
    def use_device(self, device: int) -> contextlib.AbstractContextManager[Any]:
        """Make a device current in the calling thread, for CuPy as well."""
        device_context: contextlib.AbstractContextManager[Any] = cupy.cuda.Device(device)
        return device_context

    def make_current(self, device: int) -> None:
        """Make a device the current one of the calling thread, for CuPy as well."""
        with runtime_call("cudaSetDevice", f"device={device}"):
            cupy.cuda.Device(device).use()

    def multiprocessors(self, device: int) -> int:
        """How many multiprocessors a device has."""
        with runtime_call("cudaDeviceGetAttribute", f"device={device}"):
            return int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device))

    def device_count(self) -> int:
        """How many GPUs this process sees."""
        return self._count

    def device_info(self, device: int) -> DeviceInfo:
        """What a device is and can do. ``uuid`` is that of the MIG instance where there is one."""
        return self._segments.info(device)

    def memory_info(self, device: int) -> MemoryInfo:
        """Bytes of device memory, free and in all, for all processes together."""
        with self._contexts.current(device):
            free, total = call("cuMemGetInfo", detail=f"device={device}")
        return MemoryInfo(int(free), int(total))

    def granularity(self, device: int, size: int) -> Granularity:
        """Granules for a segment of about ``size`` bytes."""
        return self._segments.granularity(device, size)

    def synchronize(self, device: int) -> None:
        """Wait until all work enqueued on the device is done, without harm to any capture.

        Raises:
            DriverError: an earlier kernel failed; or memory is used up to the last and a stream of
                the device is being captured.
        """
        with self._keeper.waiting(device):
            self._waiting.wait(device)

    # Memory for kernels
    def mapped_memory(self, size: int) -> KeptMemory:
        """Zeroed memory of the host that kernels of the current device reach at this address."""
        memory = self._keeper.take("mapped", self.current_device(), size, mapped_memory)
        ctypes.memset(memory.ptr, 0, size)
        return memory

    def kept_memory(self, size: int) -> KeptMemory:
        """Memory of the current device; to drop it waits for nothing."""
        return self._keeper.take("plain", self.current_device(), size, plain_memory)

    # Ranges
    def reserve(self, size: int, alignment: int) -> int:
        """Reserve addresses, at a place of the driver's choice; they hold nothing yet."""
        detail = f"size={size}, alignment={alignment}"
        return int(call("cuMemAddressReserve", size, alignment, 0, 0, detail=detail))

    def free_range(self, address: int, size: int) -> None:
        """Give a reserved range back; the whole one, with nothing mapped."""
        call("cuMemAddressFree", address, size, detail=f"address={address:#x}, size={size}")

    # Segments
    def create(self, device: int, size: int) -> CudaSegment:
        """Allocate memory that can be shared by descriptor; it has no address yet."""
        self._waiting.prepare(device)
        return self._segments.create(device, size)

    def map(self, address: int, handle: SegmentHandle | MulticastHandle) -> None:
        """Give the whole of a handle an address inside a reserved range; no access yet.

        Raises:
            DriverError: also for a multicast object whose team is known to be incomplete. CUDA
                waits there until other processes have added their devices.
        """
        detail = f"address={address:#x}, {handle!r}"
        mine: Handle = own("cuMemMap", handle, CudaSegment, CudaMulticastObject)
        raw = mine.raw("cuMemMap")
        if isinstance(mine, CudaMulticastObject):
            require_team(mine, "cuMemMap")
        call("cuMemMap", address, mine.size, 0, raw, 0, detail=detail)
        self._mappings[address] = mine.size

    def set_access(self, address: int, size: int, device: int) -> None:
        """Open a mapping for reads and writes by ``device``."""
        access = driver.CUmemAccessDesc()
        access.location.type = _ON_DEVICE
        access.location.id = device
        access.flags = _READ_WRITE
        detail = f"address={address:#x}, size={size}, device={device}"
        with self._contexts.current(device):
            call("cuMemSetAccess", address, size, [access], 1, detail=detail)

    def unmap(self, address: int, size: int) -> None:
        """Take back exactly one mapping."""
        detail = f"address={address:#x}, size={size}"
        if self._mappings.get(address) != size:  # CUDA takes it in silence (seen with driver 580)
            cause = "no mapping of that size begins there; unmap exactly what map() mapped"
            raise failure("cuMemUnmap", _RESULT.CUDA_ERROR_INVALID_VALUE, detail, cause=cause)
        call("cuMemUnmap", address, size, detail=detail)
        del self._mappings[address]

    def release(self, handle: SegmentHandle | MulticastHandle) -> None:
        """Drop the handle; the memory lives on while it is mapped, bound, or held elsewhere."""
        own("cuMemRelease", handle, CudaSegment, CudaMulticastObject).release()

    def export_segment(self, handle: SegmentHandle) -> int:
        """A descriptor of the memory. The caller owns it."""
        segment = own("cuMemExportToShareableHandle", handle, CudaSegment)
        return self._segments.export_segment(segment)

    def import_segment(self, fd: int, size: int, device: int) -> CudaSegment:
        """The memory behind a peer's descriptor ``fd``, which stays the caller's."""
        return self._segments.import_segment(fd, size, device)

    # Multicast
    @property
    def multicast_objects_created(self) -> int:
        """How many multicast objects this driver ever made."""
        return self._multicast.created

    def multicast_create(self, device_count: int, size: int) -> CudaMulticastObject:
        """A multicast object for ``device_count`` devices.

        Raises:
            MulticastUnavailableError: multicast is switched off, or not to be had here.
        """
        return self._multicast.create(device_count, size)

    def multicast_export(self, handle: MulticastHandle) -> int:
        """A descriptor of the object. The caller owns it."""
        mine = own("cuMemExportToShareableHandle", handle, CudaMulticastObject)
        return self._multicast.export_object(mine)

    def multicast_import(self, fd: int, device_count: int, size: int) -> CudaMulticastObject:
        """The object behind a peer's descriptor; ``fd`` stays the caller's. Raises as creation."""
        return self._multicast.import_object(fd, device_count, size)

    def multicast_add_device(self, handle: MulticastHandle, device: int) -> None:
        """Make a device part of the team. Raises as creation."""
        mine = own("cuMulticastAddDevice", handle, CudaMulticastObject)
        self._multicast.add_device(mine, device)

    def multicast_bind(
        self, handle: MulticastHandle, offset: int, segment: SegmentHandle, size: int
    ) -> None:
        """Bind the head of a segment at ``offset``. Raises as creation, and as :meth:`map`."""
        mine = own("cuMulticastBindMem", handle, CudaMulticastObject)
        memory = own("cuMulticastBindMem", segment, CudaSegment)
        self._multicast.bind(mine, offset, memory, size)

    def multicast_unbind(
        self, handle: MulticastHandle, device: int, offset: int, size: int
    ) -> None:
        """Undo a bind of the same device, offset and size."""
        mine = own("cuMulticastUnbind", handle, CudaMulticastObject)
        self._multicast.unbind(mine, device, offset, size)

    # Streams, events, captures
    def make_stream(self, *, non_blocking: bool = False) -> cupy.cuda.Stream:
        """A new stream on the current device."""
        with runtime_call("cudaStreamCreateWithPriority", f"non_blocking={non_blocking}"):
            return cupy.cuda.Stream(non_blocking=non_blocking)

    def keeps_stream(self, stream: Any) -> bool:
        """Whether it is a stream that CuPy made, and one queue.

        The owner of another one destroys it when he likes, and the per-thread default stream is
        another queue in each thread.
        """
        return stream.ptr != _PER_THREAD and not isinstance(stream, cupy.cuda.ExternalStream)

    def resolve_stream(self, call: str, stream: Any) -> Any:
        """The CuPy stream that a caller means; other libraries' come by ``__cuda_stream__``.

        Raises:
            InvalidTypeError: it is no stream.
        """
        if isinstance(stream, (cupy.cuda.Stream, cupy.cuda.ExternalStream)):
            return stream
        if hasattr(stream, "__cuda_stream__"):
            return cupy.cuda.Stream.from_external(stream)
        raise InvalidTypeError(call, "stream", stream, "a cupy.cuda.Stream, or None")

    def stream_key(self, stream: Any) -> int:
        """Which queue of work a stream is, never reused: 0 for the legacy default stream.

        It is CUDA's own stream id plus one, which is unique in the life of the process; it is kept
        on the CuPy object. The per-thread default stream has a negative key for each thread, never
        kept.

        Raises:
            DriverError: ``CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED``, the stream is capturing and its
                key was not asked for before. CUDA would refuse too, and invalidate the capture
                (seen with driver 580; the documentation says nothing of it).
        """
        try:
            key: int = stream._cupy_zc_key
        except AttributeError:
            key = self._ask_stream_key(stream)
        return key

    def _ask_stream_key(self, stream: Any) -> int:
        pointer = stream.ptr
        if pointer == _PER_THREAD:
            return self._thread_key()
        if pointer in _LEGACY:
            key = 0
        else:
            if runtime.streamIsCapturing(pointer):  # to ask for the id would invalidate the capture
                refused = _RESULT.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                raise failure("cuStreamGetId", refused, f"stream={pointer:#x}")
            key = 1 + int(call("cuStreamGetId", pointer, detail=f"stream={pointer:#x}"))
        # Some classes of other libraries take no attributes; their streams are asked each time.
        with contextlib.suppress(AttributeError):
            stream._cupy_zc_key = key
        return key

    def _thread_key(self) -> int:
        try:
            key: int = self._thread.key
        except AttributeError:
            key = self._thread.key = next(self._thread_keys)
        return key

    def record_event(self, stream: Any) -> CudaEvent:
        """Record a new event at the end of ``stream``, which must not be capturing."""
        return CudaEvent(self._record(stream))

    def try_record_event(self, stream: Any) -> CudaEvent | None:
        """The same for a stream of another thread, which may begin and end a capture meanwhile."""
        if capturing(self, stream):
            return None
        event = self.record_event(stream)
        return None if capturing(self, stream) or event.captured else event

    def follow(self, stream: Any, other: Any) -> None:
        """Let a stream wait for another one of its device, captured or not."""
        event = self._record(other)
        with runtime_call("cudaStreamWaitEvent", f"stream={stream.ptr:#x}"):
            stream.wait_event(event)

    def _record(self, stream: Any) -> cupy.cuda.Event:
        device = stream.device_id if stream.device_id >= 0 else self.current_device()
        with self._contexts.current(device):
            return record(stream, device)

    def capture_info(self, stream: Any) -> CaptureInfo | None:
        """The capture ``stream`` takes part in, or None.

        Raises:
            DriverError: ``CUDA_ERROR_STREAM_CAPTURE_INVALIDATED``, an earlier error ended it; with
                cuda-bindings 12.9 also ``CUDA_ERROR_LOSSY_QUERY``, where kernels with programmatic
                dependencies were captured.
        """
        pointer = stream.ptr
        if pointer in _LEGACY:  # cannot be captured, and to ask can disturb other captures
            return None
        detail = f"stream={pointer:#x}"
        status, identity, graph = call("cuStreamGetCaptureInfo", pointer, detail=detail)[:3]
        if status == _NOT_CAPTURING:
            return None
        if status != _ACTIVE:
            invalidated = _RESULT.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            raise failure("cuStreamGetCaptureInfo", invalidated, detail)
        which = self._thread_key() if pointer == _PER_THREAD else pointer
        return CaptureInfo(int(identity), graph, which)

    def lease_graph(self, graph: Any) -> CudaGraphLease:
        """Attach a token to a graph that tells when it is gone.

        Args:
            graph: :attr:`CaptureInfo.graph`, any ``CUgraph`` or its address, or a finished
                ``cupy.cuda.Graph``. An executable holds what its graph held when it was
                instantiated. So a lease taken during the capture lasts until the executables are
                gone and their last launch is done; one taken on a finished ``cupy.cuda.Graph``,
                which was instantiated already, lasts until that object is dropped.

        Raises:
            DriverError: CUDA refused; nothing stays behind.
            InvalidTypeError: ``graph`` is none of these. InvalidValueError: it is null.
        """
        return lease_graph(graph)

    # Bytes, for those who may wait for them
    def read(self, address: int, size: int) -> bytes:
        """Copy device memory to the host, after all work of the current stream."""
        data = bytearray(size)
        self._copy("cuMemcpyDtoHAsync", data, address, size, f"address={address:#x}, size={size}")
        return bytes(data)

    def write(self, address: int, data: bytes) -> None:
        """Copy host bytes to device memory, after all work of the current stream."""
        size = len(data)
        self._copy("cuMemcpyHtoDAsync", address, data, size, f"address={address:#x}, size={size}")

    def _copy(self, name: str, target: Any, source: Any, size: int, detail: str) -> None:
        if size == 0:
            return
        stream = self.current_stream()
        if self.capture_info(stream) is not None:
            captured = _RESULT.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            raise failure(name, captured, detail)  # it would become a node, and read nothing
        with self._contexts.current(self.current_device()), relaxed_capture():
            # A copy of pageable memory that waits for its stream holds up those of other streams
            # (seen with driver 580): ranks that are threads would wait for each other.
            call("cuStreamSynchronize", stream.ptr, detail=detail)
            call(name, target, source, size, stream.ptr, detail=detail)
            call("cuStreamSynchronize", stream.ptr, detail=detail)
