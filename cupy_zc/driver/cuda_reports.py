"""What only a report asks the CUDA driver: versions, and which GPUs reach each other.

Questions, nothing else: nothing is created, and no context is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as driver

from .cuda_calls import call

__all__ = ["Reach", "capability", "driver_version", "reach"]

_ATTRIBUTE = driver.CUdevice_attribute
_P2P = driver.CUdevice_P2PAttribute


@dataclass(frozen=True, slots=True)
class Reach:
    """How one GPU gets at the memory of another one."""

    access: bool
    #: Whether atomic operations work there as well.
    atomics: bool
    #: CUDA's ranking of the link; 0 is the best that the machine has.
    rank: int


def driver_version() -> str:
    """The CUDA version of the driver, such as ``"13.0"``.

    Raises:
        DriverError: there is no driver.
    """
    number = int(call("cuDriverGetVersion"))
    return f"{number // 1000}.{number % 1000 // 10}"


def capability(device: int) -> str:
    """The compute capability of a device, such as ``"9.0"``."""
    handle = call("cuDeviceGet", device, detail=f"device={device}")
    names = (
        _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    )
    return ".".join(
        str(int(call("cuDeviceGetAttribute", name, handle, detail=f"{name.name}, {device=}")))
        for name in names
    )


def reach(device: int, peer: int) -> Reach:
    """What the driver says of the way from one GPU to the memory of another one."""
    detail = f"device={device}, peer={peer}"
    ends = [call("cuDeviceGet", each, detail=detail) for each in (device, peer)]
    access = bool(call("cuDeviceCanAccessPeer", *ends, detail=detail))
    atomics, rank = (
        int(call("cuDeviceGetP2PAttribute", attribute, *ends, detail=detail))
        for attribute in (
            _P2P.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
            _P2P.CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK,
        )
    )
    return Reach(access, bool(atomics), rank)
