"""What the host driver makes of an operating system that refuses."""

from __future__ import annotations

import ctypes
import errno
import os
from types import SimpleNamespace

import pytest

from cupy_zc import DriverError
from cupy_zc.driver import host_address
from cupy_zc.driver.host_result import Result

GRANULE = 1 << 16


def failing(patch, name, outcomes):
    """Let the next calls of ``name`` in the C library fail where ``outcomes`` says so."""
    real, left = host_address._libc, list(outcomes)

    def call(*arguments):
        if left and left.pop(0):
            ctypes.set_errno(errno.ENOMEM)
            return ctypes.c_void_p(-1).value if name == "mmap" else -1
        return getattr(real, name)(*arguments)

    calls = {each: getattr(real, each) for each in ("mmap", "munmap", "mprotect")}
    patch.setattr(host_address, "_libc", SimpleNamespace(**{**calls, name: call}))


def test_a_full_system_is_an_error_of_each_call_and_changes_nothing(host, monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, "mmap", [True])
        with pytest.raises(DriverError, match=r"cuMemAddressReserve.*OUT_OF_MEMORY.*ENOMEM"):
            host.reserve(GRANULE, 0)
    address = host.reserve(2 * GRANULE, 0)
    segments = [host.create(0, GRANULE) for _ in range(2)]
    with monkeypatch.context() as patch:
        failing(patch, "mmap", [True])
        with pytest.raises(DriverError, match=r"cuMemMap.*max_map_count"):
            host.map(address, segments[0])
    host.map(address, segments[0])
    host.map(address + GRANULE, segments[1])
    with monkeypatch.context() as patch:
        failing(patch, "mprotect", [False, True])
        with pytest.raises(DriverError, match="cuMemSetAccess"):
            host.set_access(address, 2 * GRANULE, 0)
    with pytest.raises(DriverError, match="call set_access first"):
        host.read(address, 1)
    host.set_access(address, 2 * GRANULE, 0)
    with monkeypatch.context() as patch:
        failing(patch, "mmap", [True])
        with pytest.raises(DriverError, match="cuMemUnmap"):
            host.unmap(address, GRANULE)
    assert host.read(address, 1) == b"\0"
    host.unmap(address, GRANULE)
    host.unmap(address + GRANULE, GRANULE)
    with monkeypatch.context() as patch:
        failing(patch, "munmap", [True])
        with pytest.raises(DriverError, match="cuMemAddressFree"):
            host.free_range(address, 2 * GRANULE)
    host.free_range(address, 2 * GRANULE)


@pytest.mark.parametrize(
    ("number", "code", "cause"),
    [
        (errno.ENOMEM, Result.OUT_OF_MEMORY, "the host is out of memory"),
        (errno.EMFILE, Result.OPERATING_SYSTEM, "too many open descriptors"),
        (errno.EPERM, Result.OPERATING_SYSTEM, "the operating system said EPERM"),
    ],
)
@pytest.mark.parametrize("step", ["memfd_create", "ftruncate", "dup"])
def test_a_descriptor_that_cannot_be_made_is_named(
    host, resources, monkeypatch, step, number, code, cause
):
    segment = host.create(0, GRANULE)
    free = host.memory_info(0).free

    def fail(*arguments):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(DriverError, match=cause) as error:
            host.export_segment(segment) if step == "dup" else host.create(0, GRANULE)
    assert error.value.code == code
    assert host.memory_info(0).free == free
    host.release(segment)
