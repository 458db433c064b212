"""The driver without a GPU: memory that processes really share, and CUDA's rules.

Physical memory is a sealed memfd, addresses are reserved and filled by ``mmap``, a descriptor is a
descriptor: another process can import and map it. What CUDA refuses is refused here with the same
call and result names, so a test that is green on this driver means something. Devices are pretend
ones; they differ in what they count as free and in which team they can join.

Kept apart by meaning: :mod:`.host_memory` counts who holds what, over :mod:`.host_address` (ranges
and mappings), :mod:`.host_segment` (memfds) and :mod:`.host_multicast`; :mod:`.host_stream` and
:mod:`.host_graph` are the queues of work; :mod:`.host_result` has the codes.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..config import settings
from ..errors import Error, InvalidValueError
from .api import CaptureInfo, DeviceInfo
from .host_event import HostEvent
from .host_graph import HostLease, lease
from .host_memory import HostMemory, hold_for_fork
from .host_plain import HostPlainMemory
from .host_result import Result, refused
from .host_stream import HostStream, HostStreams

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["HostDriver"]

_MOST_DEVICES = 64
_drivers: weakref.WeakSet[HostDriver] = weakref.WeakSet()


class HostDriver(HostMemory):
    """Fulfils :class:`~cupy_zc.driver.api.Driver` with memory of the host.

    A context manager; :meth:`close` gives everything back. Without it all memory stays until the
    process ends, as on CUDA. Safe to call from several threads. Unlike CUDA it works in a forked
    child too, on devices of the child's own; what was mapped before is shared with the parent.

    Args:
        granularity: The granule in bytes, a power of two and at least a page; None:
            ``CUPY_ZC_HOST_GRANULARITY``.
        devices: How many devices to pretend, 1 to 64; None: ``CUPY_ZC_HOST_DEVICES``.
        memory: Bytes of each device; None: the physical memory of the machine.

    Raises:
        InvalidValueError: an argument is outside these limits.
    """

    #: Which driver this is.
    name: str = "host"
    #: The calling thread's current stream.
    current_stream: Callable[[], Any]
    #: Whether the stream with this ``ptr`` takes part in a capture.
    is_capturing: Callable[[int], bool]
    #: Ordinal of the calling thread's current device.
    current_device: Callable[[], int]

    def __init__(
        self,
        *,
        granularity: int | None = None,
        devices: int | None = None,
        memory: int | None = None,
    ) -> None:
        if granularity is None:
            granularity = settings().host_granularity
        if devices is None:
            devices = settings().host_devices
        if memory is None:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if granularity < mmap.PAGESIZE or granularity & (granularity - 1):
            allowed = f"a power of two of at least {mmap.PAGESIZE}"
            raise InvalidValueError("HostDriver", "granularity", granularity, allowed)
        if not 1 <= devices <= _MOST_DEVICES:
            raise InvalidValueError("HostDriver", "devices", devices, f"1 to {_MOST_DEVICES}")
        if memory <= 0:
            raise InvalidValueError("HostDriver", "memory", memory, "a positive number of bytes")
        super().__init__(granularity, devices, memory)
        self._streams = HostStreams(devices)
        self.current_stream = self._streams.current_stream
        self.current_device = self._streams.current_device
        self.is_capturing = self._streams.capturing.__contains__
        _drivers.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Devices

    def device_info(self, device: int) -> DeviceInfo:
        """What a device is and can do."""
        self._check_device("cuDeviceGet", device)
        return DeviceInfo(
            ordinal=device,
            uuid=self._uuids[device],
            name=f"host device {device}",
            posix_fd=True,
            fabric=False,
            gpu_direct_rdma=False,
            multicast=True,
        )

    def use_device(self, device: int) -> AbstractContextManager[None]:
        """Make a device, and the stream last current on it, current in the calling thread."""
        self._check_device("cuCtxSetCurrent", device)
        return self._streams.use_device(device)

    def make_current(self, device: int) -> None:
        """As :meth:`use_device`, until another device is made current."""
        self._check_device("cuCtxSetCurrent", device)
        self._streams.make_current(device)

    def synchronize(self, device: int) -> None:
        """Wait for all work of a device, without harm to any capture.

        Errors of queued work are left to the ``synchronize()`` of its stream.

        Raises:
            DriverError: the work did not finish within ``settings().timeout``.
        """
        self._check_device("cuCtxSynchronize", device)
        self._streams.synchronize(device)

    # Streams, events, captures

    def make_stream(self, *, non_blocking: bool = False) -> HostStream:
        """A new stream on the current device."""
        return HostStream(self._streams, self.current_device(), non_blocking=non_blocking)

    def keeps_stream(self, stream: HostStream) -> bool:
        """True: a stream lives as long as its object."""
        del stream
        return True

    def resolve_stream(self, call: str, stream: Any) -> HostStream:
        """The stream that a caller means; any with ``ptr`` 0 is the null stream.

        Raises:
            InvalidTypeError: it is no stream. DriverError: it is one of another driver.
        """
        return self._streams.resolve(call, stream)

    def stream_key(self, stream: Any) -> int:
        """Which queue of work a stream is: its ``ptr``, which the host driver never reuses.

        Raises:
            InvalidTypeError: it is no stream. DriverError: it is one of another driver.
        """
        return self._streams.resolve("cuStreamGetId", stream)._cupy_zc_key

    def record_event(self, stream: Any) -> HostEvent:
        """Record a new event at the end of ``stream``, which must not be capturing."""
        event = self.try_record_event(stream)
        if event is None:
            cause = "the stream is capturing; an event recorded now could not be waited for"
            raise refused("cuEventRecord", Result.STREAM_CAPTURE_UNSUPPORTED, repr(stream), cause)
        return event

    def try_record_event(self, stream: Any) -> HostEvent | None:
        """As :meth:`record_event`; None where the stream is capturing."""
        return self._streams.resolve("cuEventRecord", stream).record_outside_capture()

    def follow(self, stream: Any, other: Any) -> None:
        """Let a stream wait for another one, captured or not."""
        resolve = self._streams.resolve
        event = resolve("cuEventRecord", other).record()
        resolve("cuStreamWaitEvent", stream).wait_event(event)

    def capture_info(self, stream: Any) -> CaptureInfo | None:
        """The capture ``stream`` takes part in, or None.

        Raises:
            DriverError: the capture was invalidated and has to be ended.
        """
        return self._streams.resolve("cuStreamGetCaptureInfo", stream).capture_info()

    def lease_graph(self, graph: Any) -> HostLease:
        """Tells when a graph (a HostGraph, or that of a CaptureInfo) is gone.

        Raises:
            InvalidTypeError: it is no graph. DriverError: it is gone already.
        """
        return lease(graph)

    def plain_memory(self, size: int) -> HostPlainMemory:
        """Memory of this process alone, which belongs to no segment; freed when it is dropped."""
        return HostPlainMemory(size, self.current_device())

    # Bytes

    def read(self, address: int, size: int) -> bytes:
        """Copy mapped memory to bytes, after all work of the current stream."""
        call = "cuMemcpyDtoH"
        self.current_stream().synchronize()
        with self._entered(call):  # held while copying, so that nobody unmaps meanwhile
            self._space.check_bytes(call, address, size)
            return ctypes.string_at(address, size)

    def fill(self, address: int, value: int, size: int, stream: Any) -> None:
        """Set bytes of mapped memory, at once, whatever is enqueued."""
        del stream
        call = "cuMemsetD8"
        with self._entered(call):
            self._space.check_bytes(call, address, size)
            ctypes.memset(address, value, size)

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to mapped memory, after all work of the current stream."""
        call = "cuMemcpyHtoD"
        self.current_stream().synchronize()
        with self._entered(call):
            self._space.check_bytes(call, address, len(data))
            ctypes.memmove(address, data, len(data))

    # Forks

    def before_fork(self) -> None:
        """Hold every lock across a fork."""
        super().before_fork()
        try:
            hold_for_fork(self._streams.changed)
        except Error:
            super().after_fork(child=False)
            raise

    def after_fork(self, *, child: bool) -> None:
        """Let go of them, in the parent and in the child."""
        if child:
            self._streams.forget_threads()
        self._streams.changed.release()
        super().after_fork(child=child)


class _Forking(threading.local):
    """The drivers whose locks the calling thread holds across its fork; None: it has no turn."""

    drivers: list[HostDriver] | None = None


#: Held from before a fork until after it, so that one thread forks at a time, with all locks.
_fork = threading.Lock()
_forking = _Forking()


def _before_fork() -> None:
    hold_for_fork(_fork)
    held = _forking.drivers = []
    for driver in list(_drivers):
        driver.before_fork()
        held.append(driver)


def _after_fork(*, child: bool) -> None:
    held, _forking.drivers = _forking.drivers, None
    if held is None:  # it got no turn, of which Python has told; a fork cannot be refused
        return
    for driver in held:
        driver.after_fork(child=child)
    _fork.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=functools.partial(_after_fork, child=False),
    after_in_child=functools.partial(_after_fork, child=True),
)
