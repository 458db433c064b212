"""Address ranges of the host driver and what is mapped into them.

A range is one ``mmap`` without access, so nothing else in the process can be placed there. Mapping
replaces a piece of it by a shared mapping of a descriptor, and unmapping puts the inaccessible
reservation back; both are a single ``mmap`` with ``MAP_FIXED``, so there is never a hole that
another thread's ``mmap`` could take. The C library is called directly, because Python's ``mmap``
module cannot place a mapping at a given address.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .host_result import Result, refused, refused_by_system

__all__ = ["AddressSpace", "Mapping"]

_PROT_NONE = 0
_MAP_FIXED = 0x10  # these two of <asm-generic/mman.h> are not in the mmap module of Python 3.10
_MAP_NORESERVE = 0x4000
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

T = TypeVar("T")


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    result: int | None = _libc.mmap(address, size, protection, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        raise _os_error()
    return result


@dataclass(slots=True)
class Mapping(Generic[T]):
    """A handle's memory at an address. ``size`` in bytes."""

    address: int
    size: int
    target: T
    #: Whether there are bytes behind the addresses; a multicast object has none that a CPU reaches.
    has_bytes: bool
    accessible: bool = False

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.size


@dataclass(slots=True)
class _Range(Generic[T]):
    address: int
    size: int
    raw_address: int
    raw_size: int
    mappings: dict[int, Mapping[T]] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)  # the keys of mappings, sorted

    def overlapping(self, address: int, size: int) -> list[Mapping[T]]:
        """The mappings that share a byte with the given addresses, in order."""
        first = bisect_right(self.starts, address) - 1
        if first < 0 or self.mappings[self.starts[first]].end <= address:
            first += 1
        behind = bisect_left(self.starts, address + size)
        return [self.mappings[start] for start in self.starts[first:behind]]


class AddressSpace(Generic[T]):
    """All ranges of one driver. Not thread-safe: the driver calls it under its lock.

    Every method raises DriverError, and has then changed nothing.
    """

    def __init__(self, granularity: int) -> None:
        self._granularity = granularity
        self._ranges: dict[int, _Range[T]] = {}
        self._starts: list[int] = []

    def reserve(self, size: int, alignment: int) -> int:
        """Reserve ``size`` bytes of addresses, aligned to ``alignment`` and to the granule."""
        call, detail = "cuMemAddressReserve", f"size={size}, alignment={alignment}"
        if size <= 0 or size % self._granularity:
            raise refused(call, Result.INVALID_VALUE, detail, self._rule("the size"))
        if alignment < 0 or alignment & (alignment - 1):
            cause = "the alignment must be a power of two, or 0 for the granule"
            raise refused(call, Result.INVALID_VALUE, detail, cause)
        alignment = max(alignment, self._granularity)
        raw_size = size + alignment
        if raw_size > sys.maxsize:
            cause = "there are not that many addresses; reserve less"
            raise refused(call, Result.OUT_OF_MEMORY, detail, cause)
        try:
            raw = _mmap(None, raw_size, _PROT_NONE, _RESERVED, -1)
        except OSError as error:
            raise refused_by_system(call, error, detail) from error
        # What is left over on either side stays reserved: it costs nothing but addresses, keeps
        # two ranges from touching, and saves a trim that could fail half-way.
        address = -(-raw // alignment) * alignment
        self._ranges[address] = _Range(address, size, raw, raw_size)
        insort(self._starts, address)
        return address

    def free(self, address: int, size: int) -> None:
        """Give back exactly one range, with nothing mapped in it."""
        call, detail = "cuMemAddressFree", f"ptr={address:#x}, size={size}"
        found = self._ranges.get(address)
        if found is None or found.size != size:
            cause = "this is not a whole range as it was reserved; pass its own address and size"
            raise refused(call, Result.INVALID_VALUE, detail, cause)
        if found.mappings:
            cause = f"{len(found.mappings)} mappings are left in the range; unmap them first"
            raise refused(call, Result.INVALID_VALUE, detail, cause)
        if _libc.munmap(found.raw_address, found.raw_size) != 0:
            raise refused_by_system(call, _os_error(), detail)
        del self._ranges[address]
        self._starts.remove(address)

    def map(self, address: int, size: int, fd: int | None, target: T) -> None:
        """Map the whole of ``fd`` at ``address``, without access; None: no bytes."""
        call, detail = "cuMemMap", f"ptr={address:#x}, size={size}"
        if address % self._granularity:
            raise refused(call, Result.INVALID_VALUE, detail, self._rule("the address"))
        found = self._containing(address, size)
        if found is None:
            cause = "the addresses are not inside one reserved range; reserve them first"
            raise refused(call, Result.INVALID_VALUE, detail, cause)
        taken = found.overlapping(address, size)
        if taken:
            cause = f"something is mapped at {taken[0].address:#x} already; unmap it first"
            raise refused(call, Result.INVALID_VALUE, detail, cause)
        if fd is not None:
            try:
                _mmap(address, size, _PROT_NONE, _MAP_FIXED | mmap.MAP_SHARED, fd)
            except OSError as error:
                raise refused_by_system(call, error, detail) from error
        found.mappings[address] = Mapping(address, size, target, fd is not None)
        insort(found.starts, address)

    def unmap(self, address: int, size: int) -> T:
        """Take back exactly one mapping; returns what was mapped there."""
        call, detail = "cuMemUnmap", f"ptr={address:#x}, size={size}"
        found = self._containing(address, size)
        mapping = None if found is None else found.mappings.get(address)
        if found is None or mapping is None or mapping.size != size:
            cause = self._whole_mappings(found, address, size)
            raise refused(call, Result.INVALID_VALUE, detail, cause)
        if mapping.has_bytes:
            try:
                _mmap(address, size, _PROT_NONE, _MAP_FIXED | _RESERVED, -1)
            except OSError as error:
                raise refused_by_system(call, error, detail) from error
        del found.mappings[address]
        found.starts.remove(address)
        return mapping.target

    def set_access(self, address: int, size: int, detail: str) -> None:
        """Open one mapping, or several that follow each other, for reads and writes."""
        call = "cuMemSetAccess"
        found = self._containing(address, size)
        mappings = [] if found is None else found.overlapping(address, size)
        edges = [address, *(mapping.end for mapping in mappings)]
        if not mappings or [*(m.address for m in mappings), address + size] != edges:
            cause = self._whole_mappings(found, address, size)
            raise refused(call, Result.INVALID_VALUE, detail, cause)
        opened: list[Mapping[T]] = []
        for mapping in mappings:
            if mapping.has_bytes and not mapping.accessible:
                try:
                    self._protect(mapping, mmap.PROT_READ | mmap.PROT_WRITE)
                except OSError as error:
                    for done in opened:
                        self._protect(done, _PROT_NONE)
                    raise refused_by_system(call, error, detail) from error
                opened.append(mapping)
        for mapping in mappings:
            mapping.accessible = True

    def check_bytes(self, call: str, address: int, size: int) -> None:
        """Refuse addresses whose bytes the process cannot touch.

        Raises:
            DriverError: not all mapped, not all opened, or a part is a multicast mapping.
        """
        detail = f"ptr={address:#x}, size={size}"
        found = self._containing(address, size)
        mappings = [] if found is None else found.overlapping(address, size)
        reached = address
        for mapping in mappings:
            if mapping.address > reached:
                break
            reached = mapping.end
        if size < 0 or reached < address + size:
            cause = "the addresses are not all mapped by this driver"
            raise refused(call, Result.INVALID_VALUE, detail, cause)
        if not all(mapping.has_bytes for mapping in mappings):
            cause = "a multicast mapping holds no bytes a CPU could copy; use the segment's mapping"
            raise refused(call, Result.NOT_SUPPORTED, detail, cause)
        if not all(mapping.accessible for mapping in mappings):
            cause = "the mapping was not opened; call set_access first"
            raise refused(call, Result.INVALID_VALUE, detail, cause)

    def close(self) -> list[T]:
        """Unmap and free everything; returns what was mapped, each as often as it was."""
        targets: list[T] = []
        for found in tuple(self._ranges.values()):
            targets += [self.unmap(each.address, each.size) for each in [*found.mappings.values()]]
            self.free(found.address, found.size)
        return targets

    def _protect(self, mapping: Mapping[T], protection: int) -> None:
        if _libc.mprotect(mapping.address, mapping.size, protection) != 0:
            raise _os_error()

    def _containing(self, address: int, size: int) -> _Range[T] | None:
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        found = self._ranges[self._starts[index]]
        return found if address + size <= found.address + found.size else None

    def _rule(self, what: str) -> str:
        return f"{what} must be a positive multiple of the granule, {self._granularity} bytes"

    def _whole_mappings(self, found: _Range[T] | None, address: int, size: int) -> str:
        if found is None:
            return "the addresses are not inside one reserved range"
        mappings = found.overlapping(address, size)
        if not mappings:
            return "nothing is mapped there"
        where = ", ".join(f"{each.address:#x} of {each.size} bytes" for each in mappings[:3])
        return f"the addresses are not exactly those of a mapping; mapped there: {where}"
