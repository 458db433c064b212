"""Multicast objects of the host driver: CUDA's rules, without a switch.

No GPU is ever asked for a multicast object by these tests. Where the environment switches
multicast off, which nothing in a process can undo, the tests that need it run in a child process
whose environment does not, and in which no GPU is visible.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from probes import clean_environment, refused, run

from cupy_zc import DriverError, InvalidTypeError
from cupy_zc.config import multicast_refusal
from cupy_zc.driver import host_multicast
from cupy_zc.driver.host import HostDriver
from cupy_zc.driver.host_multicast import SLOTS, Binding
from cupy_zc.driver.host_result import Result

GRANULE = 1 << 16
_IMPORT = "cuMemImportFromShareableHandle"

off = pytest.mark.skipif(
    multicast_refusal() is not None,
    reason=f"{multicast_refusal()}; runs in the child of test_the_rest_of_this_file",
)


@pytest.mark.skipif(multicast_refusal() is None, reason="multicast is not switched off here")
def test_the_rest_of_this_file():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stdout


@pytest.fixture
def team(host):
    """An object of four granules with both devices of the driver."""
    handle = host.multicast_create(2, 4 * GRANULE)
    host.multicast_add_device(handle, 0)
    host.multicast_add_device(handle, 1)
    return handle


def access_at(address: int) -> str:
    """What the system says may be done at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, behind, access = line.replace("-", " ", 1).split()[:3]
        if int(first, 16) <= address < int(behind, 16):
            return access
    return "unmapped"


# Creation and slots


@off
def test_created_objects_are_counted(host):
    assert host.multicast_objects_created == 0
    handle = host.multicast_create(3, 2 * GRANULE)
    assert (handle.device_count, handle.size) == (3, 2 * GRANULE)
    assert host.multicast_objects_created == 1
    assert repr(handle) == f"<HostMulticast of {2 * GRANULE} bytes for 3 devices>"
    host.release(handle)
    assert repr(handle).endswith("devices, released>")
    assert host.multicast_objects_created == 1


@off
@pytest.mark.parametrize(
    ("devices", "size", "cause"),
    [
        (0, GRANULE, "number of devices"),
        (-1, GRANULE, "number of devices"),
        (577, GRANULE, "number of devices"),
        (2, 0, "must be positive"),
        (2, -GRANULE, "multiple of the granule"),
        (2, GRANULE + 1, "multiple of the granule"),
    ],
)
def test_an_object_that_cannot_be_is_refused(host, resources, devices, size, cause):
    with refused("cuMulticastCreate", Result.INVALID_VALUE, cause):
        host.multicast_create(devices, size)
    assert host.multicast_objects_created == 0


@off
def test_there_are_128_slots_and_a_slot_returns_with_the_last_holder(host, resources):
    handles = [host.multicast_create(1, GRANULE) for _ in range(SLOTS)]
    with HostDriver(granularity=GRANULE) as other:
        foreign = other.multicast_create(1, GRANULE)
        fd = other.multicast_export(foreign)
    full = (Result.OUT_OF_MEMORY, "all 128 multicast slots")
    with refused("cuMulticastCreate", *full):
        host.multicast_create(1, GRANULE)
    with refused(_IMPORT, *full):
        host.multicast_import(fd, 1, GRANULE)
    address = host.reserve(GRANULE, 0)
    host.multicast_add_device(handles[0], 0)
    host.map(address, handles[0])
    host.release(handles[0])
    with refused("cuMulticastCreate", *full):
        host.multicast_create(1, GRANULE)
    host.unmap(address, GRANULE)
    handles[0] = host.multicast_import(fd, 1, GRANULE)
    os.close(fd)
    for handle in handles:
        host.release(handle)
    assert host.multicast_objects_created == SLOTS


# The team


@off
def test_devices_join_once_and_not_beyond_the_number(host, team):
    with refused("cuMulticastAddDevice", Result.INVALID_VALUE, "added before"):
        host.multicast_add_device(team, 1)
    with refused("cuMulticastAddDevice", Result.INVALID_DEVICE, "there are 2 devices"):
        host.multicast_add_device(team, 2)
    one = host.multicast_create(1, GRANULE)
    host.multicast_add_device(one, 0)
    with refused("cuMulticastAddDevice", Result.INVALID_VALUE, "all 1 devices"):
        host.multicast_add_device(one, 1)


@off
def test_nothing_is_bound_or_mapped_before_the_team_is_whole(host):
    handle = host.multicast_create(2, GRANULE)
    segment = host.create(0, GRANULE)
    address = host.reserve(GRANULE, 0)
    for added in range(2):
        early = f"only {added} of 2 devices"
        with refused("cuMulticastBindMem", Result.ILLEGAL_STATE, early):
            host.multicast_bind(handle, 0, segment, GRANULE)
        with refused("cuMemMap", Result.ILLEGAL_STATE, early):
            host.map(address, handle)
        host.multicast_add_device(handle, added)
    host.multicast_bind(handle, 0, segment, GRANULE)
    host.map(address, handle)


# Binding


@off
def test_bindings_tell_what_each_device_has_where(host, team):
    assert host.multicast_bindings(team) == ()
    segments = [host.create(device, 2 * GRANULE) for device in range(2)]
    host.multicast_bind(team, 2 * GRANULE, segments[1], 2 * GRANULE)
    host.multicast_bind(team, 0, segments[1], GRANULE)
    host.multicast_bind(team, 2 * GRANULE, segments[0], GRANULE)
    assert host.multicast_bindings(team) == (
        Binding(0, 2 * GRANULE, GRANULE, segments[0]),
        Binding(1, 0, GRANULE, segments[1]),
        Binding(1, 2 * GRANULE, 2 * GRANULE, segments[1]),
    )


@off
@pytest.mark.parametrize(
    ("offset", "size", "cause"),
    [
        (GRANULE // 2, GRANULE, "the offset must be a multiple"),
        (-GRANULE, GRANULE, "the offset must be a multiple"),
        (0, GRANULE // 2, "the size must be a multiple"),
        (0, 0, "some of it must be bound"),
        (0, 3 * GRANULE, "the segment has 131072 bytes"),
        (3 * GRANULE, 2 * GRANULE, "the object ends at 262144"),
        (4 * GRANULE, GRANULE, "the object ends at 262144"),
        (GRANULE, GRANULE, "65536 bytes at offset 65536 are bound"),
        (0, 2 * GRANULE, "65536 bytes at offset 65536 are bound"),
    ],
)
def test_a_binding_must_be_whole_granules_inside_and_alone(host, team, offset, size, cause):
    segment = host.create(0, 2 * GRANULE)
    host.multicast_bind(team, GRANULE, segment, GRANULE)
    before = host.multicast_bindings(team)
    with refused("cuMulticastBindMem", Result.INVALID_VALUE, cause):
        host.multicast_bind(team, offset, segment, size)
    assert host.multicast_bindings(team) == before
    host.multicast_bind(team, GRANULE, host.create(1, GRANULE), GRANULE)


@off
def test_a_segment_of_another_device_is_not_bound(host):
    handle = host.multicast_create(1, GRANULE)
    host.multicast_add_device(handle, 0)
    with refused("cuMulticastBindMem", Result.INVALID_DEVICE, "not added to the object"):
        host.multicast_bind(handle, 0, host.create(1, GRANULE), GRANULE)
    with HostDriver(granularity=GRANULE) as other:
        fd = other.export_segment(other.create(0, GRANULE))
    peer = host.import_segment(fd, GRANULE, 0)
    os.close(fd)
    with refused("cuMulticastBindMem", Result.INVALID_DEVICE, "where it was created"):
        host.multicast_bind(handle, 0, peer, GRANULE)


@off
def test_bound_memory_stays_until_it_is_unbound(host, team):
    free = host.memory_info(0).free
    segment = host.create(0, GRANULE)
    host.multicast_bind(team, 0, segment, GRANULE)
    host.release(segment)
    assert host.memory_info(0).free == free - GRANULE
    for wrong in ((1, 0, GRANULE), (0, GRANULE, GRANULE), (0, 0, 2 * GRANULE)):
        with refused("cuMulticastUnbind", Result.INVALID_VALUE, "not exactly what was bound"):
            host.multicast_unbind(team, *wrong)
    host.multicast_unbind(team, 0, 0, GRANULE)
    assert host.memory_info(0).free == free
    with refused("cuMulticastUnbind", Result.INVALID_VALUE, "not exactly what was bound"):
        host.multicast_unbind(team, 0, 0, GRANULE)


@off
def test_bindings_end_with_the_object(host, team):
    free = host.memory_info(0).free
    segment = host.create(0, GRANULE)
    host.multicast_bind(team, 0, segment, GRANULE)
    host.release(segment)
    host.release(team)
    assert host.memory_info(0).free == free
    for use in (
        lambda: host.multicast_unbind(team, 0, 0, GRANULE),
        lambda: host.multicast_bindings(team),
        lambda: host.multicast_export(team),
        lambda: host.release(team),
    ):
        with pytest.raises(DriverError, match="the handle was released"):
            use()


@off
def test_closing_the_driver_ends_mapped_and_bound_objects(resources):
    with HostDriver(granularity=GRANULE) as driver:
        handle = driver.multicast_create(1, GRANULE)
        driver.multicast_add_device(handle, 0)
        driver.multicast_bind(handle, 0, driver.create(0, GRANULE), GRANULE)
        driver.map(driver.reserve(GRANULE, 0), handle)


# Mapping


@off
def test_a_multicast_mapping_has_addresses_and_no_bytes(host, team):
    address = host.reserve(8 * GRANULE, 0)
    with refused("cuMemMap", Result.INVALID_VALUE, "multiple of the granule"):
        host.map(address + 512, team)
    host.map(address, team)
    with refused("cuMemMap", Result.INVALID_VALUE, "mapped at"):
        host.map(address + GRANULE, host.create(0, GRANULE))
    segment = host.create(0, GRANULE)
    host.map(address + 4 * GRANULE, segment)
    host.set_access(address, 5 * GRANULE, 0)
    with refused("cuMemcpyDtoH", Result.NOT_SUPPORTED, "multicast mapping holds no bytes"):
        host.read(address, 1)
    host.write(address + 4 * GRANULE, b"beside it")
    assert access_at(address) == "---p"
    assert access_at(address + 4 * GRANULE) == "rw-s"
    host.unmap(address, 4 * GRANULE)
    host.unmap(address + 4 * GRANULE, GRANULE)


# Sharing


@off
def test_a_team_is_put_together_by_several_processes(host, resources):
    handle = host.multicast_create(2, 4 * GRANULE)
    fd = host.multicast_export(handle)
    assert not os.get_inheritable(fd)
    host.multicast_add_device(handle, 0)
    uuids = run(
        """
        import os, sys
        from cupy_zc import DriverError
        from cupy_zc.driver.host import HostDriver
        fd, granule = map(int, sys.argv[1:])
        with HostDriver(granularity=granule) as driver:
            handle = driver.multicast_import(fd, 2, 4 * granule)
            again = driver.multicast_import(fd, 2, 4 * granule)
            os.close(fd)
            driver.multicast_add_device(again, 0)
            driver.release(again)
            segment = driver.create(0, granule)
            driver.multicast_bind(handle, granule, segment, granule)
            driver.map(driver.reserve(4 * granule, 0), handle)
            print(driver.multicast_objects_created, len(driver.multicast_bindings(handle)))
        """,
        fd,
        GRANULE,
        pass_fds=(fd,),
        environment=clean_environment(),
    )
    os.close(fd)
    assert uuids == "0 1"
    segment = host.create(0, GRANULE)
    host.multicast_bind(handle, GRANULE, segment, GRANULE)
    (binding,) = host.multicast_bindings(handle)
    assert binding.device == 0
    host.release(handle)
    host.release(segment)


@off
def test_only_the_object_itself_can_be_imported(host, team):
    fd = host.multicast_export(team)
    size = 4 * GRANULE
    for wrong in ((3, size), (2, 2 * size)):
        with refused(_IMPORT, Result.INVALID_VALUE, f"has 2 devices and {size} bytes"):
            host.multicast_import(fd, *wrong)
        with HostDriver() as other, refused(_IMPORT, Result.INVALID_VALUE, "2 devices"):
            other.multicast_import(fd, *wrong)
    with refused(_IMPORT, Result.INVALID_VALUE, "export_segment of a host driver"):
        host.import_segment(fd, size, 0)
    os.close(fd)
    segment_fd = host.export_segment(host.create(0, GRANULE))
    with refused(_IMPORT, Result.INVALID_VALUE, "multicast_export of a host driver"):
        host.multicast_import(segment_fd, 2, size)
    os.close(segment_fd)


@off
def test_a_stopped_process_cannot_hold_up_the_team_for_ever(host, monkeypatch):
    monkeypatch.setattr(host_multicast, "LOCK_DEADLINE", 0.05)
    handle = host.multicast_create(2, GRANULE)
    fd = host.multicast_export(handle)
    peer = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    os.close(fd)
    fcntl.flock(peer, fcntl.LOCK_EX)
    with refused("cuMulticastAddDevice", Result.TIMEOUT, "suspended rank"):
        host.multicast_add_device(handle, 0)
    timer = threading.Timer(0.01, os.close, args=(peer,))  # as when the peer dies
    timer.start()
    monkeypatch.setattr(host_multicast, "LOCK_DEADLINE", 10)
    host.multicast_add_device(handle, 0)
    timer.join(timeout=10)


@off
@pytest.mark.parametrize("step", ["open", "dup"])
def test_a_descriptor_that_cannot_be_had_is_named(host, resources, monkeypatch, step):
    handle = host.multicast_create(1, GRANULE)

    def fail(*arguments):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    uses = {
        "open": ("cuMulticastAddDevice", lambda: host.multicast_add_device(handle, 0)),
        "dup": ("cuMemExportToShareableHandle", lambda: host.multicast_export(handle)),
    }
    call, use = uses[step]
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with refused(call, Result.OPERATING_SYSTEM, "too many open descriptors"):
            use()
    host.multicast_add_device(handle, 0)
    host.release(handle)


@off
def test_handles_are_checked(host, team):
    segment = host.create(0, GRANULE)
    with pytest.raises(InvalidTypeError, match="a multicast object of the host driver"):
        host.multicast_add_device(segment, 0)
    with pytest.raises(InvalidTypeError, match="a segment of the host driver"):
        host.multicast_bind(team, 0, team, GRANULE)
    with HostDriver() as other, pytest.raises(DriverError, match="another driver"):
        other.multicast_bindings(team)
