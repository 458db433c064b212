"""The contract of a driver, run against each of them.

Multicast is not in here: objects of a real switch are never made by tests
(``test_host_multicast.py`` covers the host driver's).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import pytest

from cupy_zc import DriverError, Error, InvalidTypeError
from cupy_zc.driver.api import Driver


@dataclass
class Scene:
    """A range of four granules, with an opened segment of one granule in its second."""

    driver: Driver
    granule: int
    range: int
    segment: Any
    spare: Any

    @property
    def mapped(self) -> int:
        return self.range + self.granule

    @property
    def size(self) -> int:
        return 4 * self.granule


@pytest.fixture
def scene(driver):
    granule = driver.granularity(0, 1).size
    free = driver.memory_info(0).free
    scene = Scene(
        driver,
        granule,
        driver.reserve(4 * granule, granule),
        driver.create(0, granule),
        driver.create(0, granule),
    )
    driver.map(scene.mapped, scene.segment)
    driver.set_access(scene.mapped, granule, 0)
    driver.write(scene.mapped, b"as it was")
    yield scene
    # Undone in reverse, and each step only works if nothing else was changed.
    assert driver.read(scene.mapped, 9) == b"as it was"
    driver.unmap(scene.mapped, granule)
    driver.free_range(scene.range, scene.size)
    driver.release(scene.segment)
    driver.release(scene.spare)
    assert driver.memory_info(0).free == free


# What a device says


def test_every_device_has_a_name_of_its_own(driver):
    devices = [driver.device_info(each) for each in range(driver.device_count())]
    assert [device.ordinal for device in devices] == list(range(len(devices)))
    assert {len(device.uuid) for device in devices} == {16}
    assert len({device.uuid for device in devices}) == len(devices)
    assert all(device.name for device in devices)


def test_granules_are_powers_of_two_and_sizes_meet_them_all(driver):
    granules = driver.granularity(0, 64 << 20)
    assert granules.allocation_minimum > 0
    assert granules.size % granules.alignment == 0
    for granule in (
        granules.allocation_minimum,
        granules.allocation_recommended,
        granules.multicast_minimum,
        granules.multicast_recommended,
    ):
        assert granule & (granule - 1) == 0


# Growth and its undoing


def test_memory_is_free_again_only_when_handle_and_mapping_are_gone(driver):
    granule = driver.granularity(0, 1).size
    before = driver.memory_info(0)
    assert 0 < before.free <= before.total
    segment = driver.create(0, 2 * granule)
    assert (segment.size, segment.device) == (2 * granule, 0)
    assert driver.memory_info(0).free <= before.free - 2 * granule
    address = driver.reserve(2 * granule, granule)
    assert address % granule == 0
    driver.map(address, segment)
    driver.set_access(address, 2 * granule, 0)
    driver.release(segment)
    assert driver.memory_info(0).free <= before.free - 2 * granule
    driver.write(address, b"alive")
    assert driver.read(address, 5) == b"alive"
    driver.unmap(address, 2 * granule)
    assert driver.memory_info(0).free == before.free
    driver.free_range(address, 2 * granule)


def test_bytes_survive_a_move_to_another_address(driver):
    granule = driver.granularity(0, 1).size
    segment = driver.create(0, granule)
    address = driver.reserve(2 * granule, granule)
    for place in (address, address + granule):
        driver.map(place, segment)
        driver.set_access(place, granule, 0)
        if place == address:
            driver.write(place + 100, bytes(range(200)))
        assert driver.read(place + 100, 200) == bytes(range(200))
        driver.unmap(place, granule)
    driver.release(segment)
    driver.free_range(address, 2 * granule)


def test_neighbouring_mappings_open_and_copy_as_one(driver):
    granule = driver.granularity(0, 1).size
    segments = [driver.create(0, granule) for _ in range(2)]
    address = driver.reserve(2 * granule, granule)
    for place, segment in zip((address, address + granule), segments, strict=True):
        driver.map(place, segment)
    driver.set_access(address, 2 * granule, 0)
    across = address + granule - 50
    driver.write(across, bytes(range(100)))
    assert driver.read(across, 100) == bytes(range(100))
    assert driver.read(across, 0) == b""
    driver.write(across, b"")
    for place, segment in zip((address, address + granule), segments, strict=True):
        driver.unmap(place, granule)
        driver.release(segment)
    driver.free_range(address, 2 * granule)


@pytest.mark.parametrize("factor", [1, 4, 64])
def test_a_range_is_aligned_as_asked(driver, factor):
    granule = driver.granularity(0, 1).size
    address = driver.reserve(granule, factor * granule)
    assert address % (factor * granule) == 0
    driver.free_range(address, granule)


def test_huge_ranges_cost_nothing(driver):
    granule = driver.granularity(0, 1).size
    free = driver.memory_info(0).free
    address = driver.reserve(1 << 42, granule)
    assert driver.memory_info(0).free == free
    driver.free_range(address, 1 << 42)


# Sharing


def test_an_imported_segment_is_the_same_memory(driver, resources):
    granule = driver.granularity(0, 1).size
    free = driver.memory_info(0).free
    segment = driver.create(0, granule)
    fd = driver.export_segment(segment)
    assert not os.get_inheritable(fd)
    peer = driver.import_segment(fd, granule, 0)
    os.close(fd)
    assert "posix_fd" in segment.handle_types
    address = driver.reserve(2 * granule, granule)
    driver.map(address, segment)
    driver.map(address + granule, peer)
    driver.set_access(address, 2 * granule, 0)
    driver.write(address, b"shared")
    assert driver.read(address + granule, 6) == b"shared"
    driver.unmap(address, granule)
    driver.release(segment)
    assert driver.read(address + granule, 6) == b"shared"
    driver.unmap(address + granule, granule)
    driver.release(peer)
    driver.free_range(address, 2 * granule)
    assert driver.memory_info(0).free == free


def test_a_descriptor_that_is_no_segment_is_refused(scene, resources):
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(Error):
        scene.driver.import_segment(reader, scene.granule, 0)
    os.close(reader)
    with pytest.raises(Error):
        scene.driver.import_segment(reader, scene.granule, 0)


def test_a_thousand_rounds_leave_nothing_behind(driver, resources):
    granule = driver.granularity(0, 1).size
    address = driver.reserve(2 * granule, granule)
    free = driver.memory_info(0).free

    def rounds(count: int) -> None:
        for _ in range(count):
            segment = driver.create(0, granule)
            driver.map(address, segment)
            fd = driver.export_segment(segment)
            peer = driver.import_segment(fd, granule, 0)
            os.close(fd)
            driver.map(address + granule, peer)
            driver.set_access(address, 2 * granule, 0)
            driver.unmap(address, granule)
            driver.unmap(address + granule, granule)
            driver.release(peer)
            driver.release(segment)

    rounds(10)
    before = resources.now()
    rounds(1000)
    before.assert_same(slack=20)
    assert driver.memory_info(0).free == free
    driver.free_range(address, 2 * granule)


# What is refused, and changes nothing

REFUSED = {
    "a segment of no bytes": lambda s: s.driver.create(0, 0),
    "a segment of negative size": lambda s: s.driver.create(0, -s.granule),
    "a segment that is not whole granules": lambda s: s.driver.create(0, s.granule + 1),
    "a segment larger than the device": lambda s: s.driver.create(0, 1 << 46),
    "a segment on a device that is not there": lambda s: s.driver.create(99, s.granule),
    "a segment on a negative device": lambda s: s.driver.create(-1, s.granule),
    "a range of no bytes": lambda s: s.driver.reserve(0, s.granule),
    "a range of odd size": lambda s: s.driver.reserve(s.granule + 1, s.granule),
    "a range of negative size": lambda s: s.driver.reserve(-s.granule, s.granule),
    "a range of odd alignment": lambda s: s.driver.reserve(s.granule, 3 * s.granule),
    "a range beyond all addresses": lambda s: s.driver.reserve(1 << 62, s.granule),
    "freeing a part of a range": lambda s: s.driver.free_range(s.range, s.granule),
    "freeing from inside a range": lambda s: s.driver.free_range(s.mapped, s.size),
    "mapping over a mapping": lambda s: s.driver.map(s.mapped, s.spare),
    "mapping at an odd address": lambda s: s.driver.map(s.range + 512, s.spare),
    "mapping outside every range": lambda s: s.driver.map(1 << 20, s.spare),
    "mapping past the end": lambda s: s.driver.map(s.range + s.size, s.spare),
    "opening what is not mapped": lambda s: s.driver.set_access(s.range, s.granule, 0),
    "opening more than is mapped": lambda s: s.driver.set_access(s.mapped, 2 * s.granule, 0),
    "opening for no device": lambda s: s.driver.set_access(s.mapped, s.granule, 99),
    "unmapping what is not mapped": lambda s: s.driver.unmap(s.range, s.granule),
    "unmapping a part": lambda s: s.driver.unmap(s.mapped, s.granule // 2),
    "importing another size": lambda s: _import_with(s, size=s.granule // 2 + 1),
    "importing for no device": lambda s: _import_with(s, device=99),
    "asking about no device": lambda s: s.driver.device_info(99),
    "the memory of no device": lambda s: s.driver.memory_info(99),
    "granules of nothing": lambda s: s.driver.granularity(0, 0),
    "waiting for no device": lambda s: s.driver.synchronize(99),
    "reading what is not mapped": lambda s: s.driver.read(s.range, 1),
    "writing past a mapping": lambda s: s.driver.write(s.mapped + s.granule - 1, b"12"),
}


def _import_with(scene, *, size: int | None = None, device: int = 0) -> None:
    fd = scene.driver.export_segment(scene.segment)
    try:
        scene.driver.import_segment(fd, size or scene.granule, device)
    finally:
        os.close(fd)


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_refused_and_changes_nothing(scene, resources, what):
    if what.startswith(("reading", "writing")) and scene.driver.name == "cuda":
        pytest.skip("CUDA may take such an access for an error of the whole context")
    free = scene.driver.memory_info(0)
    with pytest.raises(DriverError) as error:
        REFUSED[what](scene)
    assert error.value.call.startswith("cu")
    assert error.value.result.startswith("CUDA_ERROR_")
    assert error.value.code > 0
    assert error.value.cause
    assert error.value.call in str(error.value)
    assert scene.driver.memory_info(0) == free


def test_a_released_handle_is_of_no_use(scene):
    driver = scene.driver
    segment = driver.create(0, scene.granule)
    driver.release(segment)
    for use in (
        lambda: driver.release(segment),
        lambda: driver.map(scene.range, segment),
        lambda: driver.export_segment(segment),
    ):
        with pytest.raises(DriverError, match="released"):
            use()


def test_what_is_no_handle_is_a_type_error(scene):
    driver = scene.driver
    for use in (
        lambda: driver.release(17),
        lambda: driver.map(scene.range, "segment"),
        lambda: driver.export_segment(None),
    ):
        with pytest.raises(InvalidTypeError, match="handle"):
            use()


# Streams, captures, leases


def test_keys_of_streams_are_never_used_again(driver):
    keys = [driver.stream_key(driver.make_stream()) for _ in range(50)]
    assert len({*keys, 0}) == 51
    stream = driver.make_stream()
    assert driver.stream_key(stream) == driver.stream_key(stream)


def test_the_default_stream_has_key_0(driver):
    assert driver.current_stream().ptr == 0
    assert driver.stream_key(driver.current_stream()) == 0
    assert driver.capture_info(driver.current_stream()) is None


def test_with_makes_a_stream_current(driver):
    outer, inner = driver.make_stream(), driver.make_stream(non_blocking=True)
    with outer:
        with inner:
            assert driver.current_stream().ptr == inner.ptr
        assert driver.current_stream().ptr == outer.ptr
    assert driver.current_stream().ptr == 0


def test_an_event_is_done_when_its_stream_is(driver):
    stream = driver.make_stream()
    event = driver.record_event(stream)
    stream.synchronize()
    assert event.done
    driver.synchronize(driver.current_device())


def test_a_stream_that_captures_gives_no_event_and_its_capture_goes_on(driver):
    stream = driver.make_stream(non_blocking=True)
    event = driver.try_record_event(stream)
    stream.synchronize()
    assert event.done
    stream.begin_capture()
    assert driver.try_record_event(stream) is None
    assert stream.end_capture() is not None
    assert driver.try_record_event(stream) is not None


def test_a_capture_has_an_id_of_its_own_and_forks_share_it(driver):
    first, second = driver.make_stream(non_blocking=True), driver.make_stream(non_blocking=True)
    assert driver.capture_info(first) is None
    ids = []
    for _ in range(2):
        first.begin_capture()
        second.wait_event(first.record())
        assert driver.is_capturing(second.ptr)
        trunk, fork = driver.capture_info(first), driver.capture_info(second)
        assert trunk.stream != fork.stream
        assert trunk.stream == driver.capture_info(first).stream
        ids += [trunk.id, fork.id]
        first.wait_event(second.record())
        first.end_capture()
        assert not driver.is_capturing(first.ptr)
        assert not driver.is_capturing(second.ptr)
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_a_lease_ends_when_the_graph_is_gone_and_not_before(driver):
    stream = driver.make_stream(non_blocking=True)
    stream.begin_capture()
    lease = driver.lease_graph(driver.capture_info(stream).graph)
    graph = stream.end_capture()
    for _ in range(3):
        graph.launch(stream)
    stream.synchronize()
    assert not lease.released
    del graph
    _wait_for(lease)


def test_a_lease_on_a_finished_graph_works_too(driver):
    stream = driver.make_stream(non_blocking=True)
    stream.begin_capture()
    graph = stream.end_capture()
    leases = [driver.lease_graph(graph) for _ in range(3)]
    assert not any(lease.released for lease in leases)
    del graph
    for lease in leases:
        _wait_for(lease)


def test_what_is_no_graph_cannot_be_leased(driver):
    with pytest.raises(InvalidTypeError, match="graph"):
        driver.lease_graph("graph")


def _wait_for(lease) -> None:
    deadline = time.monotonic() + 10
    while not lease.released:
        assert time.monotonic() < deadline, "the lease was not released"
        time.sleep(0.001)
    assert lease.released
