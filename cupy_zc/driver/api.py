"""The driver seam: what the rest of the package may ask of a GPU driver, and nothing more.

Two modules fulfil :class:`Driver`: :mod:`cupy_zc.driver.cuda` (cuda-python) and
:mod:`cupy_zc.driver.host` (memfd and mmap). Both obey one set of rules, which
``tests/test_driver.py`` runs against either:

* A range is reserved, then segments are mapped into it, then access is opened. Undone in reverse.
* Sizes, addresses and offsets are multiples of the granularity; anything else is refused.
* A call returns or raises :class:`~cupy_zc.errors.DriverError`. It never half-succeeds.
* Descriptors: :meth:`Driver.export_segment` gives one that the *caller* owns and must close;
  the ``import_*`` calls borrow theirs, and the caller still closes it.
* No call blocks on another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

__all__ = [
    "CaptureInfo",
    "DeviceInfo",
    "Driver",
    "Event",
    "Granularity",
    "GraphLease",
    "KernelDriver",
    "KernelName",
    "MemoryInfo",
    "MulticastHandle",
    "SegmentHandle",
    "Stream",
    "capturing",
    "round_up",
    "using_stream",
]


def round_up(size: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is at least ``size``; both in bytes."""
    return -(-size // unit) * unit


@contextmanager
def using_stream(stream: Any, current_stream: Callable[[], Any]) -> Iterator[None]:
    """Make a stream of the current device the current one for a block, and then the one before.

    ``with stream:`` does not: in CuPy the stream that a caller chose by ``use()`` is lost after it.

    Args:
        stream: It.
        current_stream: Gives the one before; :attr:`Driver.current_stream`.
    """
    before = current_stream()
    stream.use()
    try:
        yield
    finally:
        before.use()


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device is and can do."""

    ordinal: int
    #: 16 bytes that name the device across processes. An ordinal does not.
    uuid: bytes
    name: str
    posix_fd: bool
    fabric: bool
    gpu_direct_rdma: bool
    #: What the device says; whether multicast *may* be used is ``settings().multicast``.
    multicast: bool


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of device memory, free and in all."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Granularity:
    """Granules in bytes. The multicast ones are 0 where the device has no multicast."""

    allocation_minimum: int
    allocation_recommended: int
    multicast_minimum: int
    multicast_recommended: int

    @property
    def alignment(self) -> int:
        """What a segment's address must be aligned to, in bytes."""
        return max(self.allocation_recommended, self.multicast_minimum)

    @property
    def size(self) -> int:
        """What a segment's size must be a multiple of, in bytes.

        The multicast *recommended* granule is preferred, but not where it is more than four times
        the minimum: on some machines it is 512 MiB, and every small pool would pay for it.
        """
        if self.multicast_recommended <= 4 * self.multicast_minimum:
            return max(self.alignment, self.multicast_recommended)
        return self.alignment


class SegmentHandle(Protocol):
    """One physical allocation, made here or imported from a peer."""

    @property
    def size(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def handle_types(self) -> tuple[str, ...]:
        """What it can be exported as: ``"posix_fd"``, ``"fabric"``."""
        ...


class MulticastHandle(Protocol):
    """A multicast object: a team of devices and what each has bound to it."""

    @property
    def size(self) -> int: ...
    @property
    def device_count(self) -> int: ...


class Event(Protocol):
    """A point in a stream."""

    @property
    def done(self) -> bool: ...
    def record(self, stream: Any) -> Any:
        """Make it the end of a stream, which must not be capturing. Its device is current."""
        ...


class Stream(Protocol):
    """The part of ``cupy.cuda.Stream`` that both drivers have."""

    @property
    def ptr(self) -> int: ...
    def begin_capture(self, mode: int | None = None) -> None: ...
    def end_capture(self) -> Any: ...
    def is_capturing(self) -> bool: ...
    def synchronize(self) -> None: ...


class GraphLease(Protocol):
    """Tells when a graph, and every executable made from it, is gone."""

    @property
    def released(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """The capture a stream takes part in; forked streams give the same one."""

    #: Unique in the life of the process.
    id: int
    #: The graph under construction, for :meth:`Driver.lease_graph`.
    graph: Any
    #: Which of the streams in the capture this is; unique while the capture lasts.
    stream: int


class Driver(Protocol):
    """Everything the package asks of a driver. All sizes and offsets in bytes, addresses as int."""

    #: ``"cuda"`` or ``"host"``.
    name: str
    #: The calling thread's current stream. An attribute, so that a hot path can bind it.
    current_stream: Callable[[], Any]
    #: ``is_capturing(stream.ptr)``; not to be asked of the legacy default stream (``ptr`` 0).
    is_capturing: Callable[[int], bool]
    #: Ordinal of the calling thread's current device.
    current_device: Callable[[], int]

    # Devices
    def device_count(self) -> int: ...
    def device_info(self, device: int) -> DeviceInfo: ...
    def memory_info(self, device: int) -> MemoryInfo: ...
    def granularity(self, device: int, size: int) -> Granularity:
        """Granules for a segment of about ``size`` bytes, which must be positive."""
        ...

    def synchronize(self, device: int) -> None:
        """Wait until all work enqueued on the device is done, without harm to a relaxed capture.

        Raises:
            DriverError: also where a capture under way on the device forbids it.
        """
        ...

    def use_device(self, device: int) -> AbstractContextManager[Any]:
        """Make a device the current one of the calling thread for a block."""
        ...

    def make_current(self, device: int) -> None:
        """Make a device the current one of the calling thread, until another one is."""
        ...

    # Ranges
    def reserve(self, size: int, alignment: int) -> int:
        """Reserve addresses; they hold nothing yet. Returns the first."""
        ...

    def free_range(self, address: int, size: int) -> None:
        """Give a reserved range back; it must be the whole one, with nothing mapped."""
        ...

    # Segments
    def create(self, device: int, size: int) -> SegmentHandle:
        """Allocate memory that can be shared by descriptor; it has no address yet."""
        ...

    def map(self, address: int, handle: SegmentHandle | MulticastHandle) -> None:
        """Give the whole of a handle an address inside a reserved range; no access yet."""
        ...

    def set_access(self, address: int, size: int, device: int) -> None:
        """Open a mapping for reads and writes by ``device``."""
        ...

    def unmap(self, address: int, size: int) -> None:
        """Take back exactly one mapping."""
        ...

    def release(self, handle: SegmentHandle | MulticastHandle) -> None:
        """Drop the handle; the memory lives on while it is mapped, bound, or held elsewhere."""
        ...

    def export_segment(self, handle: SegmentHandle) -> int:
        """A descriptor of the memory. The caller owns it."""
        ...

    def import_segment(self, fd: int, size: int, device: int) -> SegmentHandle:
        """A peer's memory, from its descriptor, for ``device``. ``fd`` stays the caller's."""
        ...

    # Multicast
    @property
    def multicast_objects_created(self) -> int:
        """How many multicast objects this driver ever made, for tests that assert zero."""
        ...

    def multicast_create(self, device_count: int, size: int) -> MulticastHandle:
        """A multicast object for ``device_count`` devices.

        Raises:
            MulticastUnavailableError: multicast is off (design, section 6) or not supported.
        """
        ...

    def multicast_export(self, handle: MulticastHandle) -> int: ...
    def multicast_import(self, fd: int, device_count: int, size: int) -> MulticastHandle: ...
    def multicast_add_device(self, handle: MulticastHandle, device: int) -> None: ...
    def multicast_bind(
        self, handle: MulticastHandle, offset: int, segment: SegmentHandle, size: int
    ) -> None:
        """Bind the head of a segment at ``offset``; every device must have been added before."""
        ...

    def multicast_unbind(
        self, handle: MulticastHandle, device: int, offset: int, size: int
    ) -> None: ...

    # Streams, events, captures
    def make_stream(self, *, non_blocking: bool = False) -> Any:
        """A new stream on the current device."""
        ...

    def keeps_stream(self, stream: Any) -> bool:
        """Whether the object is one queue of work that lives as long as it does.

        An event behind what was enqueued can be recorded later then, and in any thread.
        """
        ...

    def resolve_stream(self, call: str, stream: Any) -> Any:
        """The stream of this driver that a caller of ``call`` means.

        Raises:
            InvalidTypeError: it is no stream of this driver.
            DriverError: it is one of another instance of the driver.
        """
        ...

    def stream_key(self, stream: Any) -> int:
        """Which queue of work a stream is, never reused: 0 for the legacy default stream.

        A handle can be given to a new stream after the old one is destroyed; a key cannot. The
        per-thread default stream has a key for each thread. Not to be asked of a stream that is
        capturing: CUDA refuses.
        """
        ...

    def record_event(self, stream: Any) -> Event:
        """Record a new event at the end of ``stream``, which must not be capturing."""
        ...

    def try_record_event(self, stream: Any) -> Event | None:
        """As :meth:`record_event`, of any thread's stream; None where it is, or was, capturing."""
        ...

    def follow(self, stream: Any, other: Any) -> None:
        """Let later work of a stream wait for all that is enqueued on another one now.

        Where the other one is capturing, ``stream`` takes part in its capture from here on.
        """
        ...

    def capture_info(self, stream: Any) -> CaptureInfo | None:
        """The capture ``stream`` takes part in, or None."""
        ...

    def lease_graph(self, graph: Any) -> GraphLease:
        """Attach a token to a graph (under construction or finished) that tells when it is gone."""
        ...

    def plain_memory(self, size: int) -> Any:
        """A ``cupy.cuda.BaseMemory`` of the current device that belongs to no segment.

        It cannot be shared, and is given back when it is dropped.
        """
        ...

    def fill(self, address: int, value: int, size: int, stream: Any) -> None:
        """Set bytes of device memory, in the order of a stream; the host driver does it at once."""
        ...

    # Bytes, for those who may wait for them
    def read(self, address: int, size: int) -> bytes:
        """Copy device memory to the host, after all work of the current stream."""
        ...

    def write(self, address: int, data: bytes) -> None:
        """Copy host bytes to device memory, after all work of the current stream."""
        ...


def capturing(driver: Driver, stream: Any) -> bool:
    """Whether work on a stream is recorded and not run; so it is in an invalid capture."""
    try:
        return bool(stream.ptr) and bool(driver.is_capturing(stream.ptr))
    except RuntimeError:  # CuPy's answer for a capture that is invalid and was not ended
        return True


@dataclass(frozen=True, slots=True)
class KernelName:
    """Which kernel: a source of ``cuda/``, a function in it, and what it is compiled for."""

    source: str
    function: str
    #: ``-D`` options.
    defines: tuple[str, ...] = ()


@runtime_checkable
class KernelDriver(Driver, Protocol):
    """A driver that runs the kernels of ``cuda/``: what the device engine asks of it beyond."""

    #: ``load(device, name)``: the function of a kernel, compiled where nobody has used it yet.
    load: Callable[[int, KernelName], int]
    #: ``launch(function, blocks, threads, stream, parameters)``: of a one-dimensional grid, with
    #: the address of an array of addresses of arguments, which are read before it returns.
    launch: Callable[[int, int, int, Any, int], None]

    def multiprocessors(self, device: int) -> int:
        """How many multiprocessors a device has, each with room for a block of any kernel."""
        ...

    def mapped_memory(self, size: int) -> Any:
        """Zeroed memory of the host, at ``ptr``, for kernels of the current device.

        They reach it at the same address. To drop it waits for nothing.
        """
        ...

    def kept_memory(self, size: int) -> Any:
        """Memory of the current device for kernels, at ``ptr``. To drop it waits for nothing."""
        ...

    def wait_until_zero(self, stream: Any, address: int) -> None:
        """Let later work of a stream wait until a word of 4 bytes is 0; it can be captured."""
        ...

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        """Copy device memory, in the order of a stream."""
        ...
