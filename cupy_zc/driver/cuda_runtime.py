"""What is asked of CUDA through CuPy's runtime API: its errors as ours, and events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import cuda.bindings.driver as driver
import cupy
from cupy.cuda import runtime

from ..errors import DriverError
from .cuda_calls import call, failure, relaxed_capture

__all__ = ["CudaEvent", "record", "runtime_call"]

_NOT_READY = "CUDA_ERROR_NOT_READY"
#: What CUDA says of an event that was recorded in a capture, before and after its end.
_CAPTURED = ("CUDA_ERROR_CAPTURED_EVENT", "CUDA_ERROR_INVALID_VALUE")


@contextlib.contextmanager
def runtime_call(name: str, detail: str = "") -> Iterator[None]:
    """Turn an error of CuPy's runtime API into ours; both APIs number their errors alike."""
    try:
        yield
    except runtime.CUDARuntimeError as error:
        cause = str(error)  # "cudaErrorName: what it means"
        try:
            result = driver.CUresult(error.status)
        except ValueError:  # an error that only the runtime API knows
            name_of_error = cause.partition(":")[0]
            raise DriverError(
                name, name_of_error, error.status, detail=detail, cause=cause
            ) from error
        raise failure(name, result, detail, cause=cause) from error


class CudaEvent:
    """A point in a stream, which can be asked for beside a capture without harming it."""

    __slots__ = ("_event", "_recorded", "_seen")

    def __init__(self, event: cupy.cuda.Event) -> None:
        self._event = event
        #: How often it was recorded, twice over; odd while it is. And when that was seen done:
        #: another thread may ask while it is recorded anew.
        self._recorded = 0
        self._seen = -1

    @property
    def ptr(self) -> int:
        """The handle, by which CuPy's streams wait for it."""
        handle: int = self._event.ptr
        return handle

    def record(self, stream: Any) -> None:
        """Make it the end of a stream of its device, which is current. Below a microsecond.

        Raises:
            DriverError: CUDA refused.
        """
        self._recorded += 1
        try:
            runtime.eventRecord(self._event.ptr, stream.ptr)
        except runtime.CUDARuntimeError:
            with runtime_call("cudaEventRecord", f"stream={stream.ptr:#x}"):
                raise
        finally:
            self._recorded += 1

    @property
    def captured(self) -> bool:
        """Whether it was recorded in a capture that has ended; another one is no matter.

        Raises:
            DriverError: a kernel before the point failed.
        """
        return self._ask(_NOT_READY, *_CAPTURED) in _CAPTURED

    @property
    def done(self) -> bool:
        """Whether all work before the point is done. Never waits.

        Raises:
            DriverError: a kernel before the point failed, so the answer is not to be had.
        """
        asked = self._recorded
        if asked != self._seen:
            if self._ask(_NOT_READY):
                return False
            self._seen = asked
        return asked == self._recorded

    def _ask(self, *expected: str) -> str:
        """What CUDA says of it, of what is expected; empty: it is done."""
        with relaxed_capture():
            try:
                call("cuEventQuery", self._event.ptr)
            except DriverError as error:
                if error.result not in expected:
                    raise
                return error.result
        return ""


def record(stream: Any, device: int) -> cupy.cuda.Event:
    """Record a new event at the end of a stream, captured or not. Its device is current.

    Raises:
        DriverError: CUDA refused.
    """
    detail = f"stream={stream.ptr:#x}, device={device}"
    with runtime_call("cudaEventCreateWithFlags", detail):
        event = cupy.cuda.Event(disable_timing=True)
    with runtime_call("cudaEventRecord", detail):
        event.record(stream)
    return event
