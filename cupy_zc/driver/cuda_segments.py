"""Physical memory of the CUDA driver: what devices can do, granules, and segments.

Segments follow the CUDA virtual memory management API: pinned memory on one device, exportable as
a POSIX file descriptor. Where the device says it can, also as a FABRIC handle (several nodes over
NVLink); that right can still be refused, for want of an IMEX channel, and a segment is then made
without it, and so are all later ones of that device.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import cuda.bindings.driver as driver

from ..errors import DriverError
from .api import DeviceInfo, Granularity
from .cuda_calls import Contexts, Handle, call, failure

__all__ = ["POSIX_FD", "CudaSegment", "CudaSegments", "export_handle", "multicast_properties"]

_log = logging.getLogger("cupy_zc")

POSIX_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_FABRIC = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
_ATTRIBUTE = driver.CUdevice_attribute
_SIZE = driver.CUmemAllocationGranularity_flags
_TEAM_SIZE = driver.CUmulticastGranularity_flags
_INVALID_VALUE = driver.CUresult.CUDA_ERROR_INVALID_VALUE
_REFUSED = ("CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED")
#: How many answers about granules are kept: sizes above the segment size come without end.
_KEPT = 1024
#: The call that gives the UUID of a MIG instance and not of its GPU: CUDA 13 dropped the suffix.
_GET_UUID = "cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"


class CudaSegment(Handle):
    """One physical allocation of ``size`` bytes on ``device``, made here or imported."""

    __slots__ = ("device", "handle_types")

    def __init__(self, raw: Any, size: int, device: int, handle_types: tuple[str, ...]) -> None:
        super().__init__(raw, size)
        self.device = device
        self.handle_types = handle_types


def multicast_properties(name: str, device_count: int, size: int) -> Any:
    """The description of a multicast object, for the call ``name``."""
    if device_count < 1 or size < 1:
        detail, cause = f"device_count={device_count}, size={size}", "both must be positive"
        raise failure(name, _INVALID_VALUE, detail, cause=cause)
    properties = driver.CUmulticastObjectProp()
    properties.numDevices = device_count
    properties.size = size
    properties.handleTypes = int(POSIX_FD)
    return properties


def export_handle(raw: Any, detail: str) -> int:
    """A file descriptor of memory or of a multicast object; the caller owns it."""
    fd: int = call("cuMemExportToShareableHandle", raw, POSIX_FD, 0, detail=detail)
    os.set_inheritable(fd, False)  # a child that execs must not keep the memory alive
    return fd


class CudaSegments:
    """Devices and their memory. Answers that cannot change are kept."""

    def __init__(self, contexts: Contexts, device_count: int) -> None:
        self._contexts = contexts
        self._device_count = device_count
        self._infos: dict[int, DeviceInfo] = {}
        self._fabric: dict[int, bool] = {}
        self._granularities: dict[tuple[int, int], Granularity] = {}

    def info(self, device: int) -> DeviceInfo:
        """What a device is and can do."""
        if device not in self._infos:
            self._infos[device] = self._ask_info(device)
        return self._infos[device]

    def _ask_info(self, device: int) -> DeviceInfo:
        handle, detail = self._contexts.device(device), f"device={device}"

        def has(attribute: Any) -> bool:
            text = f"{attribute.name}, {detail}"
            return bool(call("cuDeviceGetAttribute", attribute, handle, detail=text))

        name: bytes = call("cuDeviceGetName", 256, handle, detail=detail)
        return DeviceInfo(
            ordinal=device,
            uuid=bytes(call(_GET_UUID, handle, detail=detail).bytes),
            name=name.split(b"\0")[0].decode(errors="replace"),
            posix_fd=has(
                _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            ),
            fabric=has(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED),
            gpu_direct_rdma=has(
                _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
            ),
            multicast=has(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED),
        )

    def _properties(self, device: int, *, fabric: bool) -> Any:
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        # A plain number: cuda-bindings has no enumerator for the two together.
        properties.requestedHandleTypes = int(POSIX_FD) | (int(_FABRIC) if fabric else 0)
        properties.allocFlags.gpuDirectRDMACapable = int(self.info(device).gpu_direct_rdma)
        return properties

    def granularity(self, device: int, size: int) -> Granularity:
        """Granules for a segment of about ``size`` bytes."""
        if size <= 0:  # also where there is no multicast, which alone would refuse it
            name, detail = "cuMulticastGetGranularity", f"device={device}, size={size}"
            raise failure(name, _INVALID_VALUE, detail, cause="the size must be positive")
        key = (device, size)
        if key not in self._granularities:
            if len(self._granularities) >= _KEPT:
                self._granularities.clear()
            self._granularities[key] = self._ask_granularity(device, size)
        return self._granularities[key]

    def _ask_granularity(self, device: int, size: int) -> Granularity:
        properties = self._properties(device, fabric=self._has_fabric(device))
        name, detail = "cuMemGetAllocationGranularity", f"device={device}"
        minimum = call(name, properties, _SIZE.CU_MEM_ALLOC_GRANULARITY_MINIMUM, detail=detail)
        recommended = call(
            name, properties, _SIZE.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, detail=detail
        )
        return Granularity(int(minimum), int(recommended), *self._team_granularity(device, size))

    def _team_granularity(self, device: int, size: int) -> tuple[int, int]:
        """Minimum and recommended granule of multicast, or zeros.

        Asking creates nothing, so it is asked even where multicast is switched off: segments made
        by one process can be registered by others.
        """
        if not self.info(device).multicast:
            return 0, 0
        name, detail = "cuMulticastGetGranularity", f"device={device}, size={size}"
        properties = multicast_properties(name, max(2, self._device_count), size)
        try:
            minimum = call(
                name, properties, _TEAM_SIZE.CU_MULTICAST_GRANULARITY_MINIMUM, detail=detail
            )
            recommended = call(
                name, properties, _TEAM_SIZE.CU_MULTICAST_GRANULARITY_RECOMMENDED, detail=detail
            )
        except DriverError as error:
            if error.result not in _REFUSED:
                raise
            _log.warning("device %d has multicast but cannot be asked about it: %s", device, error)
            return 0, 0
        return int(minimum), int(recommended)

    def _has_fabric(self, device: int) -> bool:
        return self._fabric.get(device, self.info(device).fabric)

    def create(self, device: int, size: int) -> CudaSegment:
        """Allocate a segment; ``size`` must be a multiple of the allocation granule."""
        self._require_granules("cuMemCreate", device, size)
        fabric = self._has_fabric(device)
        with self._contexts.current(device):
            try:
                raw = self._create(device, size, fabric=fabric)
            except DriverError as error:
                if not fabric or error.result not in _REFUSED:
                    raise
                raw = self._create(device, size, fabric=False)
                self._fabric[device] = fabric = False
                _log.info("segments of device %d go without FABRIC handles: %s", device, error)
        return CudaSegment(raw, size, device, ("posix_fd", "fabric") if fabric else ("posix_fd",))

    def _require_granules(self, name: str, device: int, size: int) -> None:
        granule = self.granularity(device, max(size, 1)).allocation_minimum
        if size <= 0 or size % granule:
            cause = f"the size must be a positive multiple of the granularity, {granule} bytes"
            raise failure(name, _INVALID_VALUE, f"device={device}, size={size}", cause=cause)

    def _create(self, device: int, size: int, *, fabric: bool) -> Any:
        properties = self._properties(device, fabric=fabric)
        detail = f"device={device}, size={size}, handle_types=posix_fd{'+fabric' * fabric}"
        return call("cuMemCreate", size, properties, 0, detail=detail)

    def import_segment(self, fd: int, size: int, device: int) -> CudaSegment:
        """The memory behind a peer's descriptor, for use by ``device``.

        CUDA does not tell the size; another one than the peer's is refused when it is mapped.
        """
        name, detail = "cuMemImportFromShareableHandle", f"fd={fd}, size={size}, device={device}"
        if fd < 0:
            raise failure(name, _INVALID_VALUE, detail)
        self._require_granules(name, device, size)
        with self._contexts.current(device):
            raw = call(name, fd, POSIX_FD, detail=detail)
        return CudaSegment(raw, size, device, ("posix_fd",))

    def export_segment(self, segment: CudaSegment) -> int:
        """A descriptor of the segment; the caller owns it."""
        raw = segment.raw("cuMemExportToShareableHandle")
        with self._contexts.current(segment.device):
            return export_handle(raw, f"device={segment.device}, {segment!r}")
