"""Multicast objects of the CUDA driver, behind the guard.

``cuMulticastCreate`` is called in :meth:`CudaMulticast.create` and nowhere else in the package.
Whatever would make a multicast object, or make one grow, first asks
:func:`~.cuda_calls.require_multicast_allowed`, before anything is asked of the driver; and
:func:`~.cuda_calls.call`, which every call goes through, asks once more. No argument, attribute or
method to override leads a caller past it: whoever switched multicast off for a machine had a
reason. Giving up what exists (unbind, release) is never refused.

CUDA documents that binding to an object, and mapping it, *wait without end* until every device of
the team was added, by whichever process. What can be known here is refused instead of waited for:
:func:`require_team`. For the devices of other processes, the caller must have agreed with them
before (design: every step of a set-up ends in a vote).
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as driver

from ..errors import MulticastUnavailableError
from .cuda_calls import Contexts, Handle, call, failure, require_multicast_allowed
from .cuda_segments import POSIX_FD, CudaSegment, export_handle, multicast_properties

__all__ = ["CudaMulticast", "CudaMulticastObject", "require_team"]

_RESULT = driver.CUresult


class CudaMulticastObject(Handle):
    """A multicast object: a team of ``device_count`` devices, and ``size`` bytes to bind to."""

    __slots__ = ("device_count", "devices", "shared")

    def __init__(self, raw: Any, size: int, device_count: int, *, shared: bool) -> None:
        super().__init__(raw, size)
        self.device_count = device_count
        #: Ordinals of the devices added through this handle.
        self.devices: set[int] = set()
        #: Whether other processes can have added devices too.
        self.shared = shared


def require_team(handle: CudaMulticastObject, name: str) -> None:
    """Refuse what would wait without end for devices that nobody can have added.

    Raises:
        DriverError: ``CUDA_ERROR_ILLEGAL_STATE``, the team is not complete.
    """
    added = len(handle.devices)
    if added and (handle.shared or added == handle.device_count):
        return
    detail = f"{handle!r}, devices={sorted(handle.devices)} of {handle.device_count}"
    cause = "every device of the team must have been added first; the driver would wait for them"
    raise failure(name, _RESULT.CUDA_ERROR_ILLEGAL_STATE, detail, cause=cause)


class CudaMulticast:
    """The multicast calls of one driver, and the count of objects it created."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self._created = 0

    @property
    def created(self) -> int:
        """How many objects were created; imported ones were created, and counted, elsewhere."""
        return self._created

    def create(self, device_count: int, size: int) -> CudaMulticastObject:
        """Create an object; no device takes part yet."""
        require_multicast_allowed("cuMulticastCreate")
        detail = f"device_count={device_count}, size={size}"
        properties = multicast_properties("cuMulticastCreate", device_count, size)
        raw = call("cuMulticastCreate", properties, detail=detail, error=MulticastUnavailableError)
        self._created += 1
        return CudaMulticastObject(raw, size, device_count, shared=False)

    def import_object(self, fd: int, device_count: int, size: int) -> CudaMulticastObject:
        """Take part in an object that a peer created; ``fd`` stays the caller's."""
        name = "cuMemImportFromShareableHandle"
        detail = f"fd={fd}, device_count={device_count}, size={size}"
        require_multicast_allowed(name)
        if fd < 0:
            raise failure(name, _RESULT.CUDA_ERROR_INVALID_VALUE, detail)
        raw = call(name, fd, POSIX_FD, detail=detail, error=MulticastUnavailableError)
        return CudaMulticastObject(raw, size, device_count, shared=True)

    def export_object(self, handle: CudaMulticastObject) -> int:
        """A descriptor of the object for the peers; the caller owns it."""
        fd = export_handle(handle.raw("cuMemExportToShareableHandle"), repr(handle))
        handle.shared = True
        return fd

    def add_device(self, handle: CudaMulticastObject, device: int) -> None:
        """Make a device part of the team, for as long as the object lives."""
        name = "cuMulticastAddDevice"
        require_multicast_allowed(name)
        raw, detail = handle.raw(name), f"device={device}, {handle!r}"
        with self._contexts.current(device):
            number = self._contexts.device(device)
            call(name, raw, number, detail=detail, error=MulticastUnavailableError)
        handle.devices.add(device)

    def bind(
        self, handle: CudaMulticastObject, offset: int, segment: CudaSegment, size: int
    ) -> None:
        """Bind the first ``size`` bytes of a segment at ``offset`` of the object."""
        name = "cuMulticastBindMem"
        require_multicast_allowed(name)
        raw, memory = handle.raw(name), segment.raw(name)
        require_team(handle, name)
        detail = f"device={segment.device}, offset={offset}, size={size}, {handle!r}"
        arguments = (raw, offset, memory, 0, size, 0)  # from the segment's head, no flags
        with self._contexts.current(segment.device):
            call(name, *arguments, detail=detail, error=MulticastUnavailableError)

    def unbind(self, handle: CudaMulticastObject, device: int, offset: int, size: int) -> None:
        """Undo a bind of the same device, offset and size."""
        name = "cuMulticastUnbind"
        raw = handle.raw(name)
        detail = f"device={device}, offset={offset}, size={size}, {handle!r}"
        with self._contexts.current(device):
            call(name, raw, self._contexts.device(device), offset, size, detail=detail)
