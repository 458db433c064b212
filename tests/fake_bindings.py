"""A fake of the functions of ``cuda.bindings.driver`` that the CUDA driver calls.

It records every call, keeps the few rules of CUDA that the tests lean on, and fails when told to.
Enumerations and structures are the real ones. So that it cannot drift from the real functions, a
test compares the parameters, and where there is no libcuda each call is also made to the real
function: that converts the arguments, and only then finds that there is no driver.
"""

# ruff: noqa: A002, N802, N803, N815 -- the names are CUDA's

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as real
import cupy
import pytest
from cuda.pathfinder import DynamicLibNotFoundError

from cupy_zc.driver import cuda, cuda_calls
from cupy_zc.driver.cuda import CudaDriver

OK = real.CUresult.CUDA_SUCCESS
INVALID = real.CUresult.CUDA_ERROR_INVALID_VALUE
GRANULE = 2 << 20

_libc = ctypes.CDLL(None)
_libc.sem_post.argtypes = (ctypes.c_void_p,)


def _has_libcuda() -> bool:
    try:
        real.cuDriverGetVersion()
    except DynamicLibNotFoundError:
        return False
    return True


HAS_LIBCUDA = _has_libcuda()


class FakeStream:
    """A stream as CuPy has them."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        self.ptr = ptr
        self.device_id = device_id


class FakeEvent:
    """An event as CuPy has them."""

    def __init__(self, *, disable_timing: bool) -> None:
        assert disable_timing
        self.ptr = 0x80
        self.recorded: Any = None

    def record(self, stream: Any) -> None:
        self.recorded = stream


def cuda_driver(patch: pytest.MonkeyPatch, fake: FakeBindings) -> CudaDriver:
    """A CUDA driver on the fake, and a CuPy that has the same devices and current stream 0x50."""
    runtime = SimpleNamespace(
        getDeviceCount=lambda: fake.devices,
        getDevice=lambda: 0,
        streamIsCapturing=lambda ptr: False,
        CUDARuntimeError=cupy.cuda.runtime.CUDARuntimeError,
    )
    stream = FakeStream(0x50, 0)
    patch.setattr(cuda_calls, "driver", fake)
    patch.setattr(cuda, "runtime", runtime)
    patch.setattr(cupy.cuda, "get_current_stream", lambda: stream)
    patch.setattr(cupy.cuda, "Event", FakeEvent)
    return CudaDriver()


class FakeBindings:
    """Stands in for the module. Every method ``cu...`` has the parameters of the real function."""

    def __init__(self, devices: int = 2, *, abilities: tuple[str, ...] = ("POSIX_FILE",)) -> None:
        self.devices = devices
        #: Parts of attribute names that the devices answer yes to.
        self.abilities = abilities
        #: Pairs of devices of which the first has no access to the second.
        self.apart: set[tuple[int, int]] = set()
        self.granularities = {
            "CU_MEM_ALLOC_GRANULARITY_MINIMUM": GRANULE,
            "CU_MEM_ALLOC_GRANULARITY_RECOMMENDED": GRANULE,
            "CU_MULTICAST_GRANULARITY_MINIMUM": GRANULE,
            "CU_MULTICAST_GRANULARITY_RECOMMENDED": GRANULE,
        }
        self.capture: tuple[Any, ...] = self._capture("NONE")
        self.events_done = False
        #: Result to give, by call; taken from the front, one for each call. None is success.
        self.fail: dict[str, list[real.CUresult | Exception | None]] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        #: What ``cuMemCreate`` and ``cuMulticastGetGranularity`` were given.
        self.properties: list[SimpleNamespace] = []
        self._numbers = itertools.count(0x1000)
        self._mode = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.contexts: list[int] = []
        self.handles: set[int] = set()
        self.ranges: dict[int, int] = {}
        self.mappings: dict[int, int] = {}
        self.allocations: set[int] = set()
        self.memory: dict[int, bytes] = {}
        self.user_objects: dict[int, int] = {}
        self.graph_holds: dict[int, list[int]] = {}

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return value

        def recorded(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            if not HAS_LIBCUDA:
                with contextlib.suppress(DynamicLibNotFoundError):
                    getattr(real, name)(*arguments)
            results = self.fail.get(name)
            outcome = results.pop(0) if results else None
            if isinstance(outcome, Exception):
                raise outcome
            answer: tuple[Any, ...] = value(*arguments) if outcome is None else (outcome, None)
            return answer

        return recorded

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(real, name)
        raise RuntimeError(f'Function "{name}" not found')  # as cuda-bindings, for an old libcuda

    # For the tests
    def called(self, name: str) -> int:
        return sum(call == name for call, _ in self.calls)

    def state(self) -> tuple[Any, ...]:
        """All that a call could leave behind."""
        return (
            list(self.contexts),
            set(self.handles),
            dict(self.ranges),
            dict(self.mappings),
            dict(self.user_objects),
            self._mode,
        )

    def start_capture(self, identity: int, graph: int) -> None:
        self.capture = self._capture("ACTIVE", identity, graph)

    def invalidate_capture(self) -> None:
        self.capture = self._capture("INVALIDATED")

    @staticmethod
    def _capture(status: str, identity: int = 0, graph: int = 0) -> tuple[Any, ...]:
        kind = getattr(real.CUstreamCaptureStatus, f"CU_STREAM_CAPTURE_STATUS_{status}")
        return (OK, kind, real.cuuint64_t(identity), real.CUgraph(graph), [], [], 0)

    def drop_graph(self, graph: int) -> None:
        """The last reference to a graph goes; its user objects are destroyed."""
        for number in self.graph_holds.pop(graph):
            self._destroy(number)

    def _destroy(self, number: int) -> None:
        _libc.sem_post(self.user_objects.pop(number))

    def _number(self) -> int:
        return next(self._numbers)

    # Kernels
    def cuLaunchKernelEx(
        self, config: Any, f: Any, kernelParams: Any, extra: Any
    ) -> tuple[Any, ...]:
        return (OK,)

    # Devices and contexts
    def cuInit(self, Flags: Any) -> tuple[Any, ...]:
        return (OK,)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return (OK, self.devices)

    def cuDeviceGet(self, ordinal: Any) -> tuple[Any, ...]:
        if not 0 <= ordinal < self.devices:
            return (real.CUresult.CUDA_ERROR_INVALID_DEVICE, None)
        return (OK, real.CUdevice(ordinal))

    def cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> tuple[Any, ...]:
        return (OK, int(any(ability in attrib.name for ability in self.abilities)))

    def cuDeviceGetName(self, length: Any, dev: Any) -> tuple[Any, ...]:
        return (OK, b"Fake H200".ljust(length, b"\0"))

    def cuDeviceGetUuid(self, dev: Any) -> tuple[Any, ...]:
        return (OK, SimpleNamespace(bytes=bytes([int(dev)]) * 16))

    cuDeviceGetUuid_v2 = cuDeviceGetUuid  # cuda-bindings 12.9 only

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return (OK, 13010)

    def cuDeviceCanAccessPeer(self, dev: Any, peerDev: Any) -> tuple[Any, ...]:
        return (OK, int((int(dev), int(peerDev)) not in self.apart))

    def cuDeviceGetP2PAttribute(
        self, attrib: Any, srcDevice: Any, dstDevice: Any
    ) -> tuple[Any, ...]:
        return (OK, int("ATOMIC" in attrib.name))

    def cuDevicePrimaryCtxRetain(self, dev: Any) -> tuple[Any, ...]:
        return (OK, real.CUcontext(0xC000 + int(dev)))

    def cuCtxPushCurrent(self, ctx: Any) -> tuple[Any, ...]:
        self.contexts.append(int(ctx))
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return (OK, real.CUcontext(self.contexts.pop()))

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return (OK,)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return (OK, self.contexts[-1], 1 << 40)

    # Memory
    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> tuple[Any, ...]:
        return (OK, self.granularities[option.name])

    def cuMulticastGetGranularity(self, prop: Any, option: Any) -> tuple[Any, ...]:
        self.properties.append(SimpleNamespace(devices=prop.numDevices, size=prop.size))
        return (OK, self.granularities[option.name])

    def cuMemCreate(self, size: Any, prop: Any, flags: Any) -> tuple[Any, ...]:
        # cuda-bindings cannot give a combination of handle types back, so it is read where it is.
        kinds = ctypes.c_int.from_address(prop.getPtr() + ctypes.sizeof(ctypes.c_int)).value
        self.properties.append(
            SimpleNamespace(
                pinned=prop.type == real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED,
                handle_types=kinds,
                device=prop.location.id,
                rdma=prop.allocFlags.gpuDirectRDMACapable,
            )
        )
        return self._new_handle()

    def cuMemRelease(self, handle: Any) -> tuple[Any, ...]:
        self.handles.remove(int(handle))
        return (OK,)

    def cuMemAddressReserve(
        self, size: Any, alignment: Any, addr: Any, flags: Any
    ) -> tuple[Any, ...]:
        address = self._number() << 40
        self.ranges[address] = size
        return (OK, real.CUdeviceptr(address))

    def cuMemAddressFree(self, ptr: Any, size: Any) -> tuple[Any, ...]:
        if self.ranges.get(ptr) != size:
            return (INVALID,)
        del self.ranges[ptr]
        return (OK,)

    def cuMemMap(
        self, ptr: Any, size: Any, offset: Any, handle: Any, flags: Any
    ) -> tuple[Any, ...]:
        self.mappings[ptr] = size
        return (OK,)

    def cuMemUnmap(self, ptr: Any, size: Any) -> tuple[Any, ...]:
        del self.mappings[ptr]
        return (OK,)

    def cuMemSetAccess(self, ptr: Any, size: Any, desc: Any, count: Any) -> tuple[Any, ...]:
        return (OK,)

    def cuMemExportToShareableHandle(
        self, handle: Any, handleType: Any, flags: Any
    ) -> tuple[Any, ...]:
        fd = os.open(os.devnull, os.O_RDONLY)
        os.set_inheritable(fd, True)  # the driver promises nothing about it
        return (OK, fd)

    def cuMemImportFromShareableHandle(self, osHandle: Any, shHandleType: Any) -> tuple[Any, ...]:
        os.fstat(osHandle)
        return self._new_handle()

    def _new_handle(self) -> tuple[Any, ...]:
        handle = self._number()
        self.handles.add(handle)
        return (OK, real.CUmemGenericAllocationHandle(handle))

    def cuMemAlloc(self, bytesize: Any) -> tuple[Any, ...]:
        pointer = self._number()
        self.allocations.add(pointer)
        return (OK, pointer)

    def cuMemFree(self, dptr: Any) -> tuple[Any, ...]:
        self.allocations.remove(dptr)
        return (OK,)

    # Multicast
    def cuMulticastCreate(self, prop: Any) -> tuple[Any, ...]:
        return self._new_handle()

    def cuMulticastAddDevice(self, mcHandle: Any, dev: Any) -> tuple[Any, ...]:
        return (OK,)

    def cuMulticastBindMem(
        self, mcHandle: Any, mcOffset: Any, memHandle: Any, memOffset: Any, size: Any, flags: Any
    ) -> tuple[Any, ...]:
        return (OK,)

    def cuMulticastUnbind(
        self, mcHandle: Any, dev: Any, mcOffset: Any, size: Any
    ) -> tuple[Any, ...]:
        return (OK,)

    # Streams and graphs
    def cuStreamGetId(self, hStream: Any) -> tuple[Any, ...]:
        return (OK, next(self._numbers))  # another one each time: a handle can be given out again

    def cuStreamGetCaptureInfo(self, hStream: Any) -> tuple[Any, ...]:
        return self.capture

    def cuEventQuery(self, hEvent: Any) -> tuple[Any, ...]:
        return (OK if self.events_done else real.CUresult.CUDA_ERROR_NOT_READY,)

    def cuStreamSynchronize(self, hStream: Any) -> tuple[Any, ...]:
        return (OK,)

    def cuStreamWaitValue32(
        self, stream: Any, addr: Any, value: int, flags: Any
    ) -> tuple[Any, ...]:
        return (OK,)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        before, self._mode = self._mode, mode
        return (OK, before)

    def cuUserObjectCreate(
        self, ptr: Any, destroy: Any, initialRefcount: Any, flags: Any
    ) -> tuple[Any, ...]:
        number = self._number()
        self.user_objects[number] = ptr
        return (OK, real.CUuserObject(number))

    def cuUserObjectRelease(self, object: Any, count: Any) -> tuple[Any, ...]:
        self._destroy(int(object))
        return (OK,)

    def cuGraphRetainUserObject(
        self,
        graph: Any,
        object: Any,
        count: Any,
        flags: Any,
    ) -> tuple[Any, ...]:
        self.graph_holds.setdefault(int(graph), []).append(int(object))
        return (OK,)

    # Copies
    def cuMemcpyDtoHAsync(
        self, dstHost: Any, srcDevice: Any, ByteCount: Any, hStream: Any
    ) -> tuple[Any, ...]:
        dstHost[:ByteCount] = self.memory[srcDevice][:ByteCount]
        return (OK,)

    def cuMemcpyHtoDAsync(
        self, dstDevice: Any, srcHost: Any, ByteCount: Any, hStream: Any
    ) -> tuple[Any, ...]:
        self.memory[dstDevice] = bytes(srcHost[:ByteCount])
        return (OK,)


def prepared(driver: CudaDriver) -> SimpleNamespace:
    """One of everything, to do something with."""
    base = driver.reserve(64 * GRANULE, GRANULE)
    segment = driver.create(0, 2 * GRANULE)
    driver.map(base, segment)
    return SimpleNamespace(
        base=base, segment=segment, empty=driver.reserve(GRANULE, GRANULE), fd=os.open(".", 0)
    )


#: The call that changes the capture mode of a thread, and the modes of one that is relaxed.
MODE = "cuThreadExchangeStreamCaptureMode"
RELAXED_THEN_GLOBAL = [2, 0]


def modes(fake: FakeBindings) -> list[int]:
    """The capture modes the thread went through."""
    return [int(arguments[0]) for name, arguments in fake.calls if name == MODE]
