"""How a CUDA driver call is made: by name, with its result turned into a value or an error.

Nothing else in the package calls ``cuda.bindings.driver``, but for the launch of a kernel, which
every collective pays for (``cuda_kernels.py``). :func:`call` is one line in each place that needs
the driver, so every failure names its call, result, arguments and likely cause, and a test can put
a recording fake behind all of them at once.

Contexts
--------
CuPy works in the primary context of each device, and so does this driver: :class:`Contexts`
retains it once and pushes it around the calls that name a device, so that the caller's own context
is back afterwards, whatever it was. The calls that name no device (reserving, freeing and
unmapping addresses, stream and capture queries) do not list an invalid context among their results
in the CUDA documentation, and are made in whatever context the thread has, or in none; that way a
thread that only tidies up never creates a context on device 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import cuda.bindings.driver as driver
from cuda.pathfinder import DynamicLibNotFoundError

from ..config import multicast_refusal
from ..errors import DriverError, InvalidTypeError, MulticastUnavailableError

__all__ = [
    "CAUSES",
    "Contexts",
    "Handle",
    "call",
    "failure",
    "own",
    "relaxed_capture",
    "require_multicast_allowed",
]

_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

_CAPTURE = (
    "a stream capture under way forbids it; make the call before the capture begins or after it "
    "ended"
)
_MULTICAST_DOWN = (
    "the NVSwitch fabric did not form the multicast team: look at the Fabric Manager service and "
    "at the fabric state in nvidia-smi -q; CUPY_ZC_MULTICAST=off goes without multicast"
)
_UNALIGNED = "a size, address or offset is not a multiple of the granularity, or out of range"

#: (call, result) or ("", result) -> the likely cause and the remedy. Sources: the CUDA driver API
#: reference, and what public bug reports of NCCL, PyTorch and DeepEP found.
CAUSES: Mapping[tuple[str, str], str] = {
    ("", "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED"): (
        "the NVIDIA driver library libcuda.so.1 cannot be loaded; install the NVIDIA driver, or "
        "use CUPY_ZC_DRIVER=host"
    ),
    ("", "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND"): (
        "the installed NVIDIA driver is older than this call; update it"
    ),
    ("", "CUDA_ERROR_NO_DEVICE"): (
        "no CUDA GPU is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use "
        "CUPY_ZC_DRIVER=host"
    ),
    ("", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"): (
        "libcuda and the kernel module are of different versions; reload the module or restart"
    ),
    ("", "CUDA_ERROR_SYSTEM_NOT_READY"): (
        "the Fabric Manager service is not running or not done; NVSwitch machines need it"
    ),
    ("", "CUDA_ERROR_INVALID_DEVICE"): (
        "there is no such device in this process; look at CUDA_VISIBLE_DEVICES"
    ),
    ("", "CUDA_ERROR_INVALID_VALUE"): "an argument is not one the driver accepts",
    ("", "CUDA_ERROR_INVALID_HANDLE"): "the handle was released, or belongs to another context",
    ("", "CUDA_ERROR_OUT_OF_MEMORY"): (
        "the device has no memory left; other pools and other processes count too"
    ),
    ("", "CUDA_ERROR_NOT_INITIALIZED"): (
        "CUDA is not initialised in this process; a forked child cannot use its parent's CUDA"
    ),
    ("", "CUDA_ERROR_DEINITIALIZED"): "CUDA is shutting down; the process is about to end",
    ("", "CUDA_ERROR_NOT_SUPPORTED"): "the device or the driver does not support this",
    ("", "CUDA_ERROR_NOT_PERMITTED"): "the process may not do this, for instance in a container",
    ("", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"): _CAPTURE,
    ("", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"): (
        "a stream capture under way forbids the legacy default stream; use a stream of your own"
    ),
    ("", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"): (
        "an earlier error ended the capture; end it, look for the first error, and capture again"
    ),
    ("", "CUDA_ERROR_UNKNOWN"): "the driver does not say; look for Xid messages in the kernel log",
    ("", "CUDA_ERROR_ILLEGAL_ADDRESS"): (
        "an earlier kernel accessed memory it may not; the context is lost, restart the process"
    ),
    ("cuMemAddressReserve", "CUDA_ERROR_OUT_OF_MEMORY"): (
        "no address range of that size is left; look at ulimit -v"
    ),
    ("cuMemAddressReserve", "CUDA_ERROR_INVALID_VALUE"): (
        "the size is not a multiple of the granularity, or the alignment is not a power of two"
    ),
    ("cuMemAddressFree", "CUDA_ERROR_INVALID_VALUE"): (
        "it is not the whole of a reserved range, or something is still mapped in it"
    ),
    ("cuMemCreate", "CUDA_ERROR_INVALID_VALUE"): _UNALIGNED,
    ("cuMemCreate", "CUDA_ERROR_NOT_SUPPORTED"): (
        "the device cannot share memory by POSIX file descriptor (for instance some vGPUs)"
    ),
    ("cuMemMap", "CUDA_ERROR_INVALID_VALUE"): (
        "the addresses are not reserved, already mapped or unaligned, or the size is not the "
        "size the memory was created with"
    ),
    ("cuMemUnmap", "CUDA_ERROR_INVALID_VALUE"): (
        "the range is not the whole of what was mapped, or not mapped at all"
    ),
    ("cuMemSetAccess", "CUDA_ERROR_INVALID_VALUE"): (
        "the range is not wholly mapped, or the device cannot reach the memory"
    ),
    ("cuMemSetAccess", "CUDA_ERROR_INVALID_DEVICE"): (
        "there is no such device, or it has no peer access to where the memory is"
    ),
    ("cuMemExportToShareableHandle", "CUDA_ERROR_INVALID_VALUE"): (
        "the memory was not created shareable, or was itself imported"
    ),
    ("cuMemImportFromShareableHandle", "CUDA_ERROR_INVALID_VALUE"): (
        "the descriptor is closed, or is not one of CUDA memory"
    ),
    ("cuMemImportFromShareableHandle", "CUDA_ERROR_INVALID_DEVICE"): (
        "the exporting device is not visible here; let CUDA_VISIBLE_DEVICES show every GPU to "
        "every rank"
    ),
    ("cuMulticastCreate", "CUDA_ERROR_OUT_OF_MEMORY"): (
        "the NVSwitch has no multicast slot left (about 128 a machine, all processes together)"
    ),
    ("cuMulticastCreate", "CUDA_ERROR_INVALID_VALUE"): _UNALIGNED,
    ("cuMulticastBindMem", "CUDA_ERROR_INVALID_VALUE"): (
        "an offset or size is not a multiple of the multicast granularity, or the fabric is in "
        "disorder; " + _MULTICAST_DOWN
    ),
    ("cuMulticastBindMem", "CUDA_ERROR_SYSTEM_NOT_READY"): _MULTICAST_DOWN,
    ("cuMulticastBindMem", "CUDA_ERROR_ILLEGAL_STATE"): (
        "not every device of the team has been added, or the fabric failed; " + _MULTICAST_DOWN
    ),
    ("cuMulticastAddDevice", "CUDA_ERROR_INVALID_VALUE"): (
        "the device was added before, or the team is full"
    ),
    ("cuCtxSynchronize", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"): (
        "a stream of the device is being captured; synchronise before or after the capture"
    ),
}


def failure(
    name: str,
    result: driver.CUresult,
    detail: str = "",
    *,
    cause: str = "",
    error: type[DriverError] = DriverError,
) -> DriverError:
    """The error for a call that gave ``result``, or that would have given it."""
    unexpected = f"see {result.name} in the CUDA driver API reference"
    cause = cause or CAUSES.get((name, result.name)) or CAUSES.get(("", result.name), unexpected)
    return error(name, result.name, int(result), detail=detail, cause=cause)


#: What makes a multicast object, or makes it reach further.
_GUARDED = frozenset({"cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem"})


def require_multicast_allowed(name: str) -> None:
    """Refuse the call ``name`` where multicast is switched off (design, section 6).

    Raises:
        MulticastUnavailableError: it is, and the message says by which switch.
    """
    switch = multicast_refusal()
    if switch is None:
        return
    cause = (
        f"{switch} switches multicast off, now or when the process started; nothing was asked of "
        "the driver. Start the process without it if this machine may use multicast"
    )
    error = MulticastUnavailableError
    raise failure(name, driver.CUresult.CUDA_ERROR_NOT_PERMITTED, cause=cause, error=error)


def call(
    name: str, *arguments: Any, detail: str = "", error: type[DriverError] = DriverError
) -> Any:
    """Make the driver call ``name``.

    Args:
        name: The driver's name of the call, for instance ``"cuMemCreate"``.
        *arguments: What cuda-bindings takes for it.
        detail: The values that matter, for the error message.
        error: The exception to raise.

    Returns:
        None, the one value, or a tuple of the values that follow the result.

    Raises:
        MulticastUnavailableError: the call needs multicast, which is switched off.
        DriverError: the driver refused; or libcuda is missing
            (``CUDA_ERROR_SHARED_OBJECT_INIT_FAILED``) or too old for the call
            (``CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND``); or a number does not fit.
    """
    if name in _GUARDED:  # here too: whoever adds a caller cannot forget it
        require_multicast_allowed(name)
    results = driver.CUresult
    try:
        result, *values = getattr(driver, name)(*arguments)
    except OverflowError as overflow:
        invalid = results.CUDA_ERROR_INVALID_VALUE
        cause = f"a number is negative or too large ({overflow})"
        raise failure(name, invalid, detail, cause=cause, error=error) from overflow
    except DynamicLibNotFoundError as missing:
        unloaded = results.CUDA_ERROR_SHARED_OBJECT_INIT_FAILED
        raise failure(name, unloaded, detail, error=error) from missing
    except RuntimeError as missing:  # cuda-bindings: the function is not in this libcuda
        unresolved = results.CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND
        raise failure(name, unresolved, detail, error=error) from missing
    if int(result) != 0:
        raise failure(name, result, detail, error=error)
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow this thread calls that CUDA forbids by default while any thread captures.

    Such a call would otherwise fail *and* invalidate the capture, even one of another thread.
    """
    before = call("cuThreadExchangeStreamCaptureMode", _RELAXED)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


class Contexts:
    """The devices of this process by ordinal, and their primary contexts, retained once."""

    def __init__(self) -> None:
        self._devices: dict[int, Any] = {}
        self._primary: dict[int, Any] = {}

    def device(self, ordinal: int) -> Any:
        """The ``CUdevice`` of an ordinal."""
        if ordinal not in self._devices:
            self._devices[ordinal] = call("cuDeviceGet", ordinal, detail=f"device={ordinal}")
        return self._devices[ordinal]

    @contextlib.contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        """Have the primary context of a device current, and the caller's again afterwards."""
        detail = f"device={ordinal}"
        if ordinal not in self._primary:
            # Kept to the end of the process, as CuPy keeps it. Two threads that meet here retain
            # it twice, which changes nothing.
            primary = call("cuDevicePrimaryCtxRetain", self.device(ordinal), detail=detail)
            self._primary[ordinal] = primary
        call("cuCtxPushCurrent", self._primary[ordinal], detail=detail)
        try:
            yield
        finally:
            call("cuCtxPopCurrent", detail=detail)


class Handle:
    """A driver handle that refuses to be used once it was released.

    The driver gives the numbers of released handles out again, so a stale one could name, and
    release, somebody else's memory.
    """

    __slots__ = ("_raw", "size")

    def __init__(self, raw: Any, size: int) -> None:
        self._raw = raw
        self.size = size

    def raw(self, name: str) -> Any:
        """The driver's handle, for the call ``name``."""
        if self._raw is None:
            raise failure(
                name,
                driver.CUresult.CUDA_ERROR_INVALID_HANDLE,
                repr(self),
                cause="the handle was released; keep it until it is mapped, bound and exported",
            )
        return self._raw

    def release(self) -> None:
        """Release the driver's handle; a second time is refused."""
        raw, name = self.raw("cuMemRelease"), "cuMemRelease"
        self._raw = None
        try:
            call(name, raw, detail=repr(self))
        except DriverError:
            self._raw = raw
            raise

    def __repr__(self) -> str:
        return f"{type(self).__name__}(size={self.size})"


_H = TypeVar("_H", bound=Handle)


def own(name: str, handle: object, *kinds: type[_H]) -> _H:
    """``handle``, if it is one of ours and of a kind that the call ``name`` takes."""
    if isinstance(handle, kinds):
        return handle
    wanted = " or ".join(kind.__name__ for kind in kinds)
    raise InvalidTypeError(name, "handle", handle, f"a {wanted} of the CUDA driver")
