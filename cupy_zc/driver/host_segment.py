"""The host driver's physical memory: sealed memfds and the handles to them.

A memfd is a real descriptor of real shared memory: it can be sent to another process and mapped
there. It is sealed against resizing, so a peer cannot make a mapping fault by truncating it. Its
name says what it is and on which device it lives, so that an import can refuse anything else.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from .host_result import Result, refused, refused_by_system

__all__ = [
    "Handle",
    "HostSegment",
    "Memory",
    "create_memfd",
    "describe_memfd",
    "duplicate",
    "key_of",
]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NAME = re.compile(r"/memfd:cupy-zc-(segment|multicast):([0-9a-f]*) \(deleted\)")

#: What identifies a memfd in this process as long as it is open: file system and inode number.
Key = tuple[int, int]


class Memory:
    """One memfd, kept open while a handle, a mapping or a binding needs it.

    Args:
        fd: The descriptor; owned from here on.
        key: What :func:`describe_memfd` gave for it.
        size: In bytes.
        home: UUID of the device it was created on.
        counted_on: Ordinal of the device whose free memory it takes, or None if it was imported.
    """

    __slots__ = ("counted_on", "fd", "home", "key", "references", "size")

    def __init__(self, fd: int, key: Key, size: int, home: bytes, counted_on: int | None) -> None:
        self.fd = fd
        self.key = key
        self.size = size
        self.home = home
        self.counted_on = counted_on
        self.references = 0


class Handle:
    """What segment and multicast handles share: an owner, and whether they were released.

    ``owner`` is the token of the driver that gave the handle; another driver refuses it.
    """

    __slots__ = ("owner", "released")

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self.released = False


class HostSegment(Handle):
    """A handle to a segment of the host driver, made here or imported. Compare by identity."""

    __slots__ = ("device", "memory")

    def __init__(self, owner: object, memory: Memory, device: int) -> None:
        super().__init__(owner)
        self.memory = memory
        self.device = device

    @property
    def size(self) -> int:
        """In bytes."""
        return self.memory.size

    @property
    def handle_types(self) -> tuple[str, ...]:
        """What it can be exported as."""
        return ("posix_fd",)

    def __repr__(self) -> str:
        state = ", released" if self.released else ""
        return f"<HostSegment of {self.size} bytes on device {self.device}{state}>"


def create_memfd(call: str, kind: str, home: bytes, size: int, detail: str) -> int:
    """A new memfd of ``size`` bytes, sealed and named; the caller owns it.

    Raises:
        DriverError: the operating system refused; nothing is left behind.
    """
    try:
        fd = os.memfd_create(f"cupy-zc-{kind}:{home.hex()}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise refused_by_system(call, error, detail) from error
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise refused_by_system(call, error, detail) from error
    return fd


def key_of(fd: int) -> Key:
    """What identifies the memfd behind an open descriptor."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def describe_memfd(fd: int, kind: str) -> tuple[Key, int, bytes]:
    """Key, size in bytes and home UUID of a descriptor that must be one of ours.

    Raises:
        DriverError: ``fd`` is not open, or is not what ``create_memfd`` made for this ``kind``.
    """
    call, detail = "cuMemImportFromShareableHandle", f"osHandle={fd}"
    try:
        size = os.fstat(fd).st_size
        name = str(Path(f"/proc/self/fd/{fd}").readlink())
        access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, OverflowError) as error:
        cause = f"it is not an open descriptor of this process ({error})"
        raise refused(call, Result.INVALID_VALUE, detail, cause) from error
    match = _NAME.fullmatch(name)
    if not _sealed(fd) or match is None or match[1] != kind or access != os.O_RDWR:
        maker = {"segment": "export_segment", "multicast": "multicast_export"}[kind]
        cause = f"the descriptor is of {name!r}; expected one that {maker} of a host driver gave"
        raise refused(call, Result.INVALID_VALUE, detail, cause)
    return key_of(fd), size, bytes.fromhex(match[2])


def _sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # EINVAL: only memfds have seals at all
        return False


def duplicate(call: str, fd: int, detail: str) -> int:
    """Another descriptor of the same memory, closed on exec; the caller owns it."""
    try:
        return os.dup(fd)
    except OSError as error:
        raise refused_by_system(call, error, detail) from error
