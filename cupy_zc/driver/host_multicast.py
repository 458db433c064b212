"""Multicast objects of the host driver: CUDA's rules without a switch.

An object is a small memfd that holds what all processes must agree on, the team: how many devices,
how many bytes, and the UUID of each device added so far. It is changed only under a ``flock`` with
a deadline. Locks of this kind belong to an open file description, and a descriptor that was sent or
inherited shares its sender's; so the memfd is opened anew (through ``/proc``) for each lock.

What is bound is known only to the process that bound it, as on CUDA, where no call tells either.

A multicast mapping has addresses and no bytes: a load from it would have to reduce over all
devices and a store would have to reach all of them, which only a switch does. So the mapping stays
inaccessible even after ``set_access`` (a stray access faults instead of giving wrong values), and
an engine asks :meth:`~cupy_zc.driver.host.HostDriver.multicast_bindings` for what lies behind it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..config import multicast_refusal
from ..errors import MulticastUnavailableError
from .host_result import Result, refused, refused_by_system
from .host_segment import (
    Handle,
    HostSegment,
    Key,
    Memory,
    create_memfd,
    describe_memfd,
    duplicate,
    key_of,
)

__all__ = ["SLOTS", "Binding", "HostMulticast", "MulticastObject", "MulticastObjects"]

#: How many objects one driver can hold at once, as an NVSwitch does.
SLOTS = 128

_HEADER = struct.Struct("<8sIIQ")  # magic, devices wanted, devices added, bytes
_MAGIC = b"zc-mc-01"
_UUID_BYTES = 16
_MOST_DEVICES = 576  # the largest NVLink domain NVIDIA names
#: No user code runs under the lock, so a holder this late is stopped or dead.
LOCK_DEADLINE = 10.0


@dataclass(frozen=True, slots=True)
class Binding:
    """``size`` bytes from the head of ``segment``, bound at ``offset`` for ``device``."""

    device: int
    offset: int
    size: int
    segment: HostSegment


class MulticastObject:
    """The object itself, shared by the handles and mappings of this process."""

    __slots__ = ("bindings", "device_count", "fd", "key", "references", "size")

    def __init__(self, fd: int, key: Key, device_count: int, size: int) -> None:
        self.fd = fd
        self.key = key
        self.device_count = device_count
        self.size = size
        self.references = 0
        self.bindings: list[Binding] = []

    def team(self) -> list[bytes]:
        """UUIDs of the devices added so far, by all processes."""
        added = _HEADER.unpack(os.pread(self.fd, _HEADER.size, 0))[2]
        raw = os.pread(self.fd, added * _UUID_BYTES, _HEADER.size)
        return [raw[at : at + _UUID_BYTES] for at in range(0, len(raw), _UUID_BYTES)]


class HostMulticast(Handle):
    """A handle to a multicast object of the host driver. Compare by identity."""

    __slots__ = ("object",)

    def __init__(self, owner: object, multicast: MulticastObject) -> None:
        super().__init__(owner)
        self.object = multicast

    @property
    def size(self) -> int:
        """Bytes that each device can bind."""
        return self.object.size

    @property
    def device_count(self) -> int:
        """How many devices the team has once it is complete."""
        return self.object.device_count

    def __repr__(self) -> str:
        state = ", released" if self.released else ""
        return f"<HostMulticast of {self.size} bytes for {self.device_count} devices{state}>"


class MulticastObjects:
    """The multicast objects of one driver. Not thread-safe: the driver calls it under its lock.

    Every method raises DriverError, and has then changed nothing.
    """

    def __init__(self, granularity: int) -> None:
        self.created = 0
        self._granularity = granularity
        self._objects: dict[Key, MulticastObject] = {}

    def create(self, device_count: int, size: int) -> MulticastObject:
        """A new object without devices."""
        call, detail = "cuMulticastCreate", f"numDevices={device_count}, size={size}"
        self._refuse_where_off(call, detail)
        if not 1 <= device_count <= _MOST_DEVICES:
            cause = f"the number of devices must be 1 to {_MOST_DEVICES}"
            raise refused(call, Result.INVALID_VALUE, detail, cause)
        self._check_multiple(call, detail, "the size", size)
        if size == 0:
            raise refused(call, Result.INVALID_VALUE, detail, "the size must be positive")
        self._check_slots(call, detail)
        shared_size = _HEADER.size + device_count * _UUID_BYTES
        fd = create_memfd(call, "multicast", b"", shared_size, detail)
        os.pwrite(fd, _HEADER.pack(_MAGIC, device_count, 0, size), 0)
        self.created += 1
        return self._add(fd, key_of(fd), device_count, size)

    def open(self, fd: int, device_count: int, size: int) -> MulticastObject:
        """The object behind a descriptor, which stays the caller's."""
        call = "cuMemImportFromShareableHandle"
        detail = f"osHandle={fd}, numDevices={device_count}, size={size}"
        self._refuse_where_off(call, detail)
        key, _, _ = describe_memfd(fd, "multicast")
        known = self._objects.get(key)
        if known is None:
            magic, has_devices, _, has_size = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
        else:
            magic, has_devices, has_size = _MAGIC, known.device_count, known.size
        if magic != _MAGIC or (has_devices, has_size) != (device_count, size):
            cause = f"that object has {has_devices} devices and {has_size} bytes"
            raise refused(call, Result.INVALID_VALUE, detail, cause)
        if known is not None:
            return known
        self._check_slots(call, detail)
        return self._add(duplicate(call, fd, detail), key, device_count, size)

    def live(self) -> tuple[MulticastObject, ...]:
        """The objects that some handle or mapping still holds."""
        return tuple(self._objects.values())

    def close(self, multicast: MulticastObject) -> list[Memory]:
        """End an object nobody needs any more; returns the memory that was bound to it."""
        del self._objects[multicast.key]
        os.close(multicast.fd)
        bound = [binding.segment.memory for binding in multicast.bindings]
        multicast.bindings.clear()
        return bound

    def add_device(self, multicast: MulticastObject, uuid: bytes, detail: str) -> None:
        """Add a device to the team, across processes."""
        call = "cuMulticastAddDevice"
        with _locked(call, multicast.fd, detail):
            team = multicast.team()
            if uuid in team:
                cause = "the device was added before; a device takes part once"
                raise refused(call, Result.INVALID_VALUE, detail, cause)
            if len(team) == multicast.device_count:
                cause = f"all {len(team)} devices of the object were added already"
                raise refused(call, Result.INVALID_VALUE, detail, cause)
            # The UUID first, the count behind it: who reads without the lock sees a whole team.
            os.pwrite(multicast.fd, uuid, _HEADER.size + len(team) * _UUID_BYTES)
            header = _HEADER.pack(_MAGIC, multicast.device_count, len(team) + 1, multicast.size)
            os.pwrite(multicast.fd, header, 0)

    def bind(self, multicast: MulticastObject, binding: Binding, detail: str) -> None:
        """Bind the head of a segment."""
        call = "cuMulticastBindMem"
        team = self.check_team(call, multicast, detail)
        self._check_multiple(call, detail, "the offset", binding.offset)
        self._check_multiple(call, detail, "the size", binding.size)
        if not 0 < binding.size <= binding.segment.size:
            cause = f"the segment has {binding.segment.size} bytes, and some of it must be bound"
            raise refused(call, Result.INVALID_VALUE, detail, cause)
        end = binding.offset + binding.size
        if end > multicast.size:
            cause = f"the object ends at {multicast.size} bytes"
            raise refused(call, Result.INVALID_VALUE, detail, cause)
        if binding.segment.memory.home not in team:
            cause = "the segment lives on a device that was not added to the object"
            raise refused(call, Result.INVALID_DEVICE, detail, cause)
        for other in multicast.bindings:
            apart = end <= other.offset or other.offset + other.size <= binding.offset
            if other.device == binding.device and not apart:
                cause = f"{other.size} bytes at offset {other.offset} are bound on this device"
                raise refused(call, Result.INVALID_VALUE, detail, cause)
        multicast.bindings.append(binding)

    def unbind(
        self, multicast: MulticastObject, device: int, offset: int, size: int, detail: str
    ) -> Memory:
        """Take back exactly one binding; returns the memory that was bound."""
        for binding in multicast.bindings:
            if (binding.device, binding.offset, binding.size) == (device, offset, size):
                multicast.bindings.remove(binding)
                return binding.segment.memory
        cause = "that is not exactly what was bound on the device; pass the bound offset and size"
        raise refused("cuMulticastUnbind", Result.INVALID_VALUE, detail, cause)

    def check_team(self, call: str, multicast: MulticastObject, detail: str) -> list[bytes]:
        """The complete team.

        CUDA would wait in this call for the missing devices; this package never waits inside a
        driver call, and lets the ranks meet before it instead.
        """
        team = multicast.team()
        if len(team) < multicast.device_count:
            cause = (
                f"only {len(team)} of {multicast.device_count} devices were added; every rank "
                "must add its device before anyone binds or maps"
            )
            raise refused(call, Result.ILLEGAL_STATE, detail, cause)
        return team

    def _add(self, fd: int, key: Key, device_count: int, size: int) -> MulticastObject:
        multicast = self._objects[key] = MulticastObject(fd, key, device_count, size)
        return multicast

    def _refuse_where_off(self, call: str, detail: str) -> None:
        switch = multicast_refusal()
        if switch is not None:
            raise MulticastUnavailableError(
                call,
                f"CUDA_ERROR_{Result.NOT_SUPPORTED.name}",
                Result.NOT_SUPPORTED.value,
                detail=detail,
                cause=f"multicast is off because of {switch}",
            )

    def _check_slots(self, call: str, detail: str) -> None:
        if len(self._objects) >= SLOTS:
            cause = f"all {SLOTS} multicast slots are in use; release an object first"
            raise refused(call, Result.OUT_OF_MEMORY, detail, cause)

    def _check_multiple(self, call: str, detail: str, what: str, value: int) -> None:
        if value < 0 or value % self._granularity:
            cause = f"{what} must be a multiple of the granule, {self._granularity} bytes"
            raise refused(call, Result.INVALID_VALUE, detail, cause)


@contextmanager
def _locked(call: str, fd: int, detail: str) -> Iterator[None]:
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise refused_by_system(call, error, detail) from error
    try:
        _lock(call, own, detail)
        yield
    finally:
        os.close(own)  # and with it the lock


def _lock(call: str, fd: int, detail: str) -> None:
    deadline = time.monotonic() + LOCK_DEADLINE
    while not _try_lock(fd):
        if time.monotonic() >= deadline:
            cause = (
                f"another process has held the object for {LOCK_DEADLINE:g} s; "
                "it is stopped, so look for a suspended rank"
            )
            raise refused(call, Result.TIMEOUT, detail, cause)
        time.sleep(0.001)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
