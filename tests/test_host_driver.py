"""What is only knowable, or only promised, of the host driver's memory."""

from __future__ import annotations

import fcntl
import os

import cuda.bindings.driver as cuda
import pytest
from probes import run

from cupy_zc import DriverError, InvalidValueError
from cupy_zc.config import settings
from cupy_zc.driver import select
from cupy_zc.driver.host import HostDriver
from cupy_zc.driver.host_result import Result

GRANULE = 1 << 16


def test_codes_are_those_of_cuda():
    for result in Result:
        assert getattr(cuda.CUresult, f"CUDA_ERROR_{result.name}") == result


def test_arguments_come_from_the_settings():
    with HostDriver() as driver:
        assert driver.name == "host"
        assert driver.device_count() == settings().host_devices
        assert driver.granularity(0, 1).size == settings().host_granularity
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert driver.memory_info(0).total == physical


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("granularity", 0),
        ("granularity", -4096),
        ("granularity", 512),
        ("granularity", 3 << 20),
        ("devices", 0),
        ("devices", 65),
        ("memory", 0),
        ("memory", -1),
    ],
)
def test_bad_arguments_are_named(name, value):
    with pytest.raises(InvalidValueError, match=rf"HostDriver: {name}={value} is not allowed"):
        HostDriver(**{name: value})


def test_a_granule_of_512_mib_costs_no_memory_until_it_is_touched():
    granule = 512 << 20
    with HostDriver(granularity=granule, memory=4 * granule) as driver:
        segment = driver.create(0, granule)
        address = driver.reserve(granule, 0)
        assert address % granule == 0
        driver.map(address, segment)
        driver.set_access(address, granule, 0)
        driver.write(address + granule - 1, b"x")
        assert driver.read(address, 1) == b"\0"


def test_devices_count_their_memory_apart(host):
    free = host.memory_info(0).free
    segment = host.create(1, 3 * GRANULE)
    assert (host.memory_info(0).free, host.memory_info(1).free) == (free, free - 3 * GRANULE)
    with pytest.raises(DriverError, match=r"cuMemCreate\(.*CUDA_ERROR_OUT_OF_MEMORY") as error:
        host.create(1, free)
    assert error.value.out_of_memory
    host.create(0, free)
    host.release(segment)
    host.create(1, free)


def test_memory_taken_back_from_its_own_descriptor_counts_once(host):
    free = host.memory_info(0).free
    segment = host.create(0, GRANULE)
    fd = host.export_segment(segment)
    peer = host.import_segment(fd, GRANULE, 1)
    assert (peer.device, host.memory_info(0).free) == (1, free - GRANULE)
    host.release(segment)
    assert host.memory_info(0).free == free - GRANULE
    host.release(peer)
    assert (host.memory_info(0).free, host.memory_info(1).free) == (free, free)
    again = host.import_segment(fd, GRANULE, 0)
    os.close(fd)
    assert host.memory_info(0).free == free
    assert repr(again) == f"<HostSegment of {GRANULE} bytes on device 0>"


def test_a_segment_cannot_be_resized_by_a_peer(host):
    segment = host.create(0, GRANULE)
    fd = host.export_segment(segment)
    for size in (0, GRANULE // 2, 2 * GRANULE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


# Refusals that CUDA does not promise, or not with a code


@pytest.fixture
def pair(host):
    """Two neighbouring mappings of a granule each, in the middle of a range of four."""
    address = host.reserve(4 * GRANULE, 0)
    for place in (1, 2):
        segment = host.create(0, GRANULE)
        host.map(address + place * GRANULE, segment)
        host.release(segment)
    yield address
    host.unmap(address + GRANULE, GRANULE)
    host.unmap(address + 2 * GRANULE, GRANULE)
    host.free_range(address, 4 * GRANULE)


@pytest.mark.parametrize(
    ("call", "start", "count", "cause"),
    [
        ("unmap", 1, 2, "not exactly those of a mapping"),
        ("unmap", 0, 2, "not exactly those of a mapping"),
        ("unmap", 3, 1, "nothing is mapped"),
        ("unmap", 4, 1, "not inside one reserved range"),
        ("set_access", 0, 2, "not exactly those of a mapping"),
        ("set_access", 1, 1.5, "not exactly those of a mapping"),
        ("set_access", 2, 2, "not exactly those of a mapping"),
        ("set_access", 1, 0, "nothing is mapped"),
        ("free_range", 0, 4, "2 mappings are left"),
        ("free_range", 0, 2, "not a whole range"),
    ],
)
def test_ranges_must_be_whole(host, pair, call, start, count, cause):
    arguments = (pair + start * GRANULE, int(count * GRANULE))
    with pytest.raises(DriverError, match=cause) as error:
        getattr(host, call)(*arguments, *[0] * (call == "set_access"))
    assert error.value.code == Result.INVALID_VALUE


def test_a_gap_between_mappings_is_seen(host):
    address = host.reserve(8 * GRANULE, 0)
    host.map(address, host.create(0, 2 * GRANULE))
    host.map(address + 4 * GRANULE, host.create(0, 4 * GRANULE))
    with pytest.raises(DriverError, match="cuMemSetAccess"):
        host.set_access(address, 6 * GRANULE, 0)
    with pytest.raises(DriverError, match="not all mapped"):
        host.read(address, 8 * GRANULE)


def test_a_mapping_must_be_opened_before_it_is_read(host, pair):
    with pytest.raises(DriverError, match="call set_access first"):
        host.read(pair + GRANULE, 1)
    with pytest.raises(DriverError, match="not all mapped"):
        host.read(pair + GRANULE, -1)
    host.set_access(pair + GRANULE, GRANULE, 0)
    with pytest.raises(DriverError, match="call set_access first"):
        host.read(pair + GRANULE, GRANULE + 1)
    host.set_access(pair + GRANULE, 2 * GRANULE, 0)
    assert host.read(pair + GRANULE, 2 * GRANULE) == bytes(2 * GRANULE)


def test_handles_of_another_driver_are_refused(host):
    with HostDriver(granularity=GRANULE, memory=1 << 20) as other:
        segment = other.create(0, GRANULE)
        with pytest.raises(DriverError, match="another driver") as error:
            host.export_segment(segment)
    assert error.value.code == Result.INVALID_HANDLE


def test_only_sealed_descriptors_of_our_make_are_imported(host, tmp_path):
    file = (tmp_path / "file").open("w+b")
    file.truncate(GRANULE)
    stranger = os.memfd_create("stranger", os.MFD_ALLOW_SEALING)
    os.ftruncate(stranger, GRANULE)
    fcntl.fcntl(stranger, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    unsealed = os.memfd_create(f"cupy-zc-segment:{'0' * 32}")
    exported = host.export_segment(host.create(0, GRANULE))
    read_only = os.open(f"/proc/self/fd/{exported}", os.O_RDONLY)
    for fd in (file.fileno(), stranger, unsealed, read_only):
        with pytest.raises(DriverError, match="export_segment of a host driver"):
            host.import_segment(fd, GRANULE, 0)
    for fd in (-1, 1 << 40):
        with pytest.raises(DriverError, match="not an open descriptor"):
            host.import_segment(fd, GRANULE, 0)
    with pytest.raises(DriverError, match=f"that segment has {GRANULE} bytes"):
        host.import_segment(exported, 2 * GRANULE, 0)
    with HostDriver(granularity=2 * GRANULE) as coarse, pytest.raises(DriverError) as error:
        coarse.import_segment(exported, GRANULE, 0)
    assert error.value.code == Result.NOT_SUPPORTED
    file.close()
    for fd in (stranger, unsealed, read_only, exported):
        os.close(fd)


# The life of a driver


def test_closing_gives_everything_back_and_ends_the_driver(resources):
    before = resources.now()
    driver = HostDriver(granularity=GRANULE)
    address = driver.reserve(4 * GRANULE, 0)
    driver.map(address, driver.create(0, GRANULE))
    driver.create(0, GRANULE)
    driver.close()
    driver.close()
    before.assert_same(slack=2)
    for call in (
        lambda: driver.create(0, GRANULE),
        lambda: driver.unmap(address, GRANULE),
        lambda: driver.read(address, 1),
    ):
        with pytest.raises(DriverError, match="the driver was closed") as error:
            call()
        assert error.value.code == Result.DEINITIALIZED


def test_no_other_mmap_can_take_the_place_of_an_unmapped_segment(host):
    address = host.reserve(8 * GRANULE, 0)
    segment = host.create(0, 6 * GRANULE)
    for _ in range(20):
        host.map(address + GRANULE, segment)
        host.unmap(address + GRANULE, 6 * GRANULE)
        other = HostDriver(granularity=GRANULE)
        place = other.reserve(GRANULE, 0)
        assert not address <= place < address + 8 * GRANULE
        other.close()


# Other processes


def test_another_process_reads_and_writes_a_segment(host, resources):
    address = host.reserve(GRANULE, 0)
    segment = host.create(0, GRANULE)
    host.map(address, segment)
    host.set_access(address, GRANULE, 0)
    host.write(address, b"from the parent")
    fd = host.export_segment(segment)
    result = run(
        """
        import os, sys
        from cupy_zc.driver.host import HostDriver
        fd, size = map(int, sys.argv[1:])
        with HostDriver(granularity=size) as driver:
            free = driver.memory_info(0).free
            segment = driver.import_segment(fd, size, 0)
            os.close(fd)
            assert driver.memory_info(0).free == free
            address = driver.reserve(size, 0)
            driver.map(address, segment)
            driver.set_access(address, size, 0)
            print(driver.read(address, 15).decode(), driver.device_info(0).uuid.hex())
            driver.write(address, b"from the child!")
        """,
        fd,
        GRANULE,
        pass_fds=(fd,),
    )
    os.close(fd)
    text, _, uuid = result.rpartition(" ")
    assert text == "from the parent"
    assert host.read(address, 15) == b"from the child!"
    assert uuid not in {host.device_info(each).uuid.hex() for each in range(2)}
    host.unmap(address, GRANULE)
    host.release(segment)


def test_a_forked_child_has_devices_of_its_own_and_shares_what_was_mapped():
    result = run(
        """
        import os, threading, time, warnings
        from cupy_zc.driver.host import HostDriver

        def map_new(driver, data):
            address = driver.reserve(1 << 16, 0)
            driver.map(address, driver.create(0, 1 << 16))
            driver.set_access(address, 1 << 16, 0)
            driver.write(address, data)
            return address

        driver = HostDriver(granularity=1 << 16)
        shared = map_new(driver, b"parent")
        uuid, free = driver.device_info(0).uuid, driver.memory_info(0).free
        inside = threading.Event()

        def be_inside_calls():
            with driver._lock, driver._streams.changed:
                inside.set()
                time.sleep(0.1)

        thread = threading.Thread(target=be_inside_calls)
        thread.start()
        inside.wait(10)
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, on purpose
        child = os.fork()
        if child == 0:
            assert driver.device_info(0).uuid != uuid
            own = map_new(driver, b"child!")
            assert driver.read(shared, 6) == b"parent"
            assert driver.memory_info(0).free == free - (1 << 16)
            driver.write(shared, b"child!")
            driver.close()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        thread.join(10)
        assert status == 0
        assert driver.device_info(0).uuid == uuid
        assert driver.memory_info(0).free == free
        print(driver.read(shared, 6).decode())
        driver.close()
        """
    )
    assert result == "child!"


def test_a_process_that_ends_without_closing_is_silent():
    result = run(
        """
        from cupy_zc.driver.host import HostDriver
        driver = HostDriver()
        driver.map(driver.reserve(2 << 20, 0), driver.create(0, 2 << 20))
        stream = driver.make_stream()
        stream.hold()
        stream.enqueue(print)
        """
    )
    assert result == ""


def test_select_gives_one_host_driver_a_process():
    assert select("host") is select("host")
    assert isinstance(select("host"), HostDriver)
