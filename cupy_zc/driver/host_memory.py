"""Ranges, segments and multicast objects of the host driver, and who holds what.

A memfd is held by handles, mappings and bindings, and closed when the last of them is gone; only
then do its bytes count as free again. A multicast object is held by handles and mappings, and ends
with the last of them, and its bindings with it. One lock covers it all.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import Error, InvalidTypeError
from .api import Granularity, MemoryInfo, MulticastHandle, SegmentHandle
from .host_address import AddressSpace
from .host_multicast import Binding, HostMulticast, MulticastObject, MulticastObjects
from .host_result import Result, refused
from .host_segment import (
    Handle,
    HostSegment,
    Memory,
    create_memfd,
    describe_memfd,
    duplicate,
    key_of,
)

__all__ = ["HostMemory", "hold_for_fork"]

#: Seconds to wait, before a fork, for a lock that is never held for longer than some milliseconds.
FORK_DEADLINE = 60.0


def hold_for_fork(lock: Any) -> None:
    """Acquire a lock of a driver before a fork.

    Raises:
        Error: another thread held it for very long. Python reports it and forks all the same; the
            child should not use the driver then.
    """
    if not lock.acquire(timeout=FORK_DEADLINE):
        raise Error(
            f"another thread has held a lock of the host driver for {FORK_DEADLINE:.0f} s; the "
            "child of this fork cannot use it"
        )


def _new_uuids(devices: int) -> tuple[bytes, ...]:
    """A random name for each device: no other process, machine or driver has the same."""
    return tuple(uuid.uuid4().bytes for _ in range(devices))


class HostMemory:
    """The memory half of :class:`~cupy_zc.driver.host.HostDriver`, which checks the arguments.

    Args:
        granularity: The granule in bytes.
        devices: How many devices.
        memory: Bytes of each device.
    """

    def __init__(self, granularity: int, devices: int, memory: int) -> None:
        self._granularity = granularity
        self._total = memory
        self._used = [0] * devices
        self._uuids = _new_uuids(devices)
        self._owner = object()  # what handles point to, so that a handle does not keep a driver
        self._closed = False
        self._lock = threading.RLock()
        self._memories: dict[tuple[int, int], Memory] = {}
        self._space: AddressSpace[Memory | MulticastObject] = AddressSpace(granularity)
        self._multicast = MulticastObjects(granularity)

    def close(self) -> None:
        """Unmap, unbind and release everything; what is called afterwards is refused. Idempotent.

        Nothing may touch an address of this driver any more.
        """
        with self._lock:
            if self._closed:
                return
            for target in self._space.close():
                self._drop(target)
            for multicast in self._multicast.live():
                self._end_multicast(multicast)
            for memory in tuple(self._memories.values()):
                self._end_memory(memory)
            self._closed = True

    # Devices

    def device_count(self) -> int:
        """How many devices the driver pretends to have."""
        return len(self._uuids)

    def memory_info(self, device: int) -> MemoryInfo:
        """Bytes free and in all. What was imported from another driver counts there, not here."""
        self._check_device("cuMemGetInfo", device)
        return MemoryInfo(self._total - self._used[device], self._total)

    def granularity(self, device: int, size: int) -> Granularity:
        """All four granules are the one the driver was made with, for any positive size."""
        self._check_device("cuMemGetAllocationGranularity", device)
        if size <= 0:
            call, detail = "cuMulticastGetGranularity", f"device={device}, size={size}"
            raise refused(call, Result.INVALID_VALUE, detail, "the size must be positive")
        return Granularity(*[self._granularity] * 4)

    # Ranges

    def reserve(self, size: int, alignment: int) -> int:
        """Reserve addresses; ``alignment`` is a power of two, or 0 for the granule."""
        with self._entered("cuMemAddressReserve"):
            return self._space.reserve(size, alignment)

    def free_range(self, address: int, size: int) -> None:
        """Give a reserved range back; it must be the whole one, with nothing mapped."""
        with self._entered("cuMemAddressFree"):
            self._space.free(address, size)

    # Segments

    def create(self, device: int, size: int) -> HostSegment:
        """Allocate memory that can be shared by descriptor; zeroed, without an address."""
        call, detail = "cuMemCreate", f"device={device}, size={size}"
        self._check_device(call, device)
        with self._entered(call):
            if size <= 0 or size % self._granularity:
                cause = f"the size must be a positive multiple of {self._granularity} bytes"
                raise refused(call, Result.INVALID_VALUE, detail, cause)
            free = self._total - self._used[device]
            if size > free:
                cause = f"{free} of {self._total} bytes are free on the device; release segments"
                raise refused(call, Result.OUT_OF_MEMORY, detail, cause)
            home = self._uuids[device]
            fd = create_memfd(call, "segment", home, size, detail)
            self._used[device] += size
            return self._segment(Memory(fd, key_of(fd), size, home, device), device)

    def map(self, address: int, handle: SegmentHandle | MulticastHandle) -> None:
        """Give the whole of a handle an address inside a reserved range; no access yet."""
        call = "cuMemMap"
        with self._entered(call):
            if isinstance(handle, HostMulticast):
                multicast = self._check_multicast(call, handle)
                detail = f"ptr={address:#x}, size={multicast.size}"
                self._multicast.check_team(call, multicast, detail)
                self._space.map(address, multicast.size, None, multicast)
                multicast.references += 1
            else:
                memory = self._check_segment(call, handle).memory
                self._space.map(address, memory.size, memory.fd, memory)
                memory.references += 1

    def set_access(self, address: int, size: int, device: int) -> None:
        """Open one mapping, or several that follow each other. A multicast one stays without bytes.

        On the host, access for one device is access for all of the process.
        """
        call = "cuMemSetAccess"
        self._check_device(call, device)
        with self._entered(call):
            detail = f"ptr={address:#x}, size={size}, device={device}"
            self._space.set_access(address, size, detail)

    def unmap(self, address: int, size: int) -> None:
        """Take back exactly one mapping; the addresses stay reserved."""
        with self._entered("cuMemUnmap"):
            self._drop(self._space.unmap(address, size))

    def release(self, handle: SegmentHandle | MulticastHandle) -> None:
        """Drop the handle; the memory lives on while it is mapped, bound, or held elsewhere."""
        call = "cuMemRelease"
        with self._entered(call):
            if isinstance(handle, HostMulticast):
                target: Memory | MulticastObject = self._check_multicast(call, handle)
                handle.released = True
            else:
                segment = self._check_segment(call, handle)
                target = segment.memory
                segment.released = True
            self._drop(target)

    def export_segment(self, handle: SegmentHandle) -> int:
        """A descriptor of the memory, closed on exec. The caller owns it."""
        call = "cuMemExportToShareableHandle"
        with self._entered(call):
            memory = self._check_segment(call, handle).memory
            return duplicate(call, memory.fd, f"size={memory.size}")

    def import_segment(self, fd: int, size: int, device: int) -> HostSegment:
        """The memory behind a peer's descriptor, for use by ``device``. ``fd`` stays the caller's.

        Memory that this driver itself holds is recognised, and stays counted once.
        """
        call = "cuMemImportFromShareableHandle"
        self._check_device(call, device)
        with self._entered(call):
            detail = f"osHandle={fd}, size={size}"
            key, has_size, home = describe_memfd(fd, "segment")
            if has_size != size:
                cause = f"that segment has {has_size} bytes; both sides must agree on the size"
                raise refused(call, Result.INVALID_VALUE, detail, cause)
            if size % self._granularity:
                cause = f"its size is not a multiple of this driver's {self._granularity} bytes"
                raise refused(call, Result.NOT_SUPPORTED, detail, cause)
            memory = self._memories.get(key)
            if memory is None:
                memory = Memory(duplicate(call, fd, detail), key, size, home, None)
            return self._segment(memory, device)

    # Multicast

    @property
    def multicast_objects_created(self) -> int:
        """How many multicast objects this driver ever made."""
        return self._multicast.created

    def multicast_create(self, device_count: int, size: int) -> HostMulticast:
        """A multicast object for ``device_count`` devices of ``size`` bytes each.

        Raises:
            MulticastUnavailableError: multicast is off; the message names the switch.
            DriverError: a bad argument, or all 128 slots are in use.
        """
        with self._entered("cuMulticastCreate"):
            return self._multicast_handle(self._multicast.create(device_count, size))

    def multicast_export(self, handle: MulticastHandle) -> int:
        """A descriptor of the object, closed on exec. The caller owns it."""
        call = "cuMemExportToShareableHandle"
        with self._entered(call):
            multicast = self._check_multicast(call, handle)
            return duplicate(call, multicast.fd, f"size={multicast.size}")

    def multicast_import(self, fd: int, device_count: int, size: int) -> HostMulticast:
        """The object behind a peer's descriptor. ``fd`` stays the caller's; takes a slot."""
        with self._entered("cuMemImportFromShareableHandle"):
            return self._multicast_handle(self._multicast.open(fd, device_count, size))

    def multicast_add_device(self, handle: MulticastHandle, device: int) -> None:
        """Add a device to the team; for as long as the object lives, in any process."""
        call = "cuMulticastAddDevice"
        self._check_device(call, device)
        with self._entered(call):
            multicast = self._check_multicast(call, handle)
            self._multicast.add_device(multicast, self._uuids[device], f"dev={device}")

    def multicast_bind(
        self, handle: MulticastHandle, offset: int, segment: SegmentHandle, size: int
    ) -> None:
        """Bind the head of a segment at ``offset`` on the device it was created on."""
        call = "cuMulticastBindMem"
        with self._entered(call):
            multicast = self._check_multicast(call, handle)
            bound = self._check_segment(call, segment)
            detail = f"mcOffset={offset}, size={size}"
            if bound.memory.home not in self._uuids:
                cause = (
                    "the segment was imported; its device can only be bound where it was created"
                )
                raise refused(call, Result.INVALID_DEVICE, detail, cause)
            device = self._uuids.index(bound.memory.home)
            self._multicast.bind(multicast, Binding(device, offset, size, bound), detail)
            bound.memory.references += 1

    def multicast_unbind(
        self, handle: MulticastHandle, device: int, offset: int, size: int
    ) -> None:
        """Take back exactly one binding of a device."""
        call = "cuMulticastUnbind"
        self._check_device(call, device)
        with self._entered(call):
            multicast = self._check_multicast(call, handle)
            detail = f"dev={device}, mcOffset={offset}, size={size}"
            self._drop(self._multicast.unbind(multicast, device, offset, size, detail))

    def multicast_bindings(self, handle: MulticastHandle) -> tuple[Binding, ...]:
        """What this process has bound, by device and offset; CUDA has no such call."""
        call = "multicast_bindings"
        with self._entered(call):
            bindings = self._check_multicast(call, handle).bindings
            return tuple(sorted(bindings, key=lambda each: (each.device, each.offset)))

    # Forks

    def before_fork(self) -> None:
        """Hold the lock across a fork, so that the child does not find it held by a lost thread."""
        hold_for_fork(self._lock)

    def after_fork(self, *, child: bool) -> None:
        """Let go of it; the devices of a child are not those of its parent."""
        if child:
            self._uuids = _new_uuids(len(self._uuids))
        self._lock.release()

    # What the calls above share

    @contextmanager
    def _entered(self, call: str) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise refused(call, Result.DEINITIALIZED, "", "the driver was closed")
            yield

    def _check_device(self, call: str, device: int) -> None:
        if not 0 <= device < len(self._uuids):
            cause = f"there are {len(self._uuids)} devices (CUPY_ZC_HOST_DEVICES, or devices=)"
            raise refused(call, Result.INVALID_DEVICE, f"device={device}", cause)

    def _check_segment(self, call: str, handle: object) -> HostSegment:
        if not isinstance(handle, HostSegment):
            raise InvalidTypeError(call, "handle", handle, "a segment of the host driver")
        self._check_live(call, handle)
        return handle

    def _check_multicast(self, call: str, handle: object) -> MulticastObject:
        if not isinstance(handle, HostMulticast):
            raise InvalidTypeError(call, "handle", handle, "a multicast object of the host driver")
        self._check_live(call, handle)
        return handle.object

    def _check_live(self, call: str, handle: Handle) -> None:
        if handle.owner is not self._owner:
            cause = "another driver gave this handle; export and import what is behind it"
            raise refused(call, Result.INVALID_HANDLE, repr(handle), cause)
        if handle.released:
            cause = "the handle was released; keep it until it is mapped, bound and exported"
            raise refused(call, Result.INVALID_HANDLE, repr(handle), cause)

    def _segment(self, memory: Memory, device: int) -> HostSegment:
        self._memories[memory.key] = memory
        memory.references += 1
        return HostSegment(self._owner, memory, device)

    def _multicast_handle(self, multicast: MulticastObject) -> HostMulticast:
        multicast.references += 1
        return HostMulticast(self._owner, multicast)

    def _drop(self, target: Memory | MulticastObject) -> None:
        """One handle, mapping or binding less; the last one ends what it held."""
        target.references -= 1
        if target.references == 0:
            if isinstance(target, Memory):
                self._end_memory(target)
            else:
                self._end_multicast(target)

    def _end_memory(self, memory: Memory) -> None:
        del self._memories[memory.key]
        os.close(memory.fd)
        if memory.counted_on is not None:
            self._used[memory.counted_on] -= memory.size

    def _end_multicast(self, multicast: MulticastObject) -> None:
        for memory in self._multicast.close(multicast):
            self._drop(memory)
