"""How the pool grows and shrinks, what happens when the driver fails, and streams."""

from __future__ import annotations

import gc
import threading

import pytest
from faults import OUT_OF_MEMORY, UNKNOWN, FaultyDriver

import cupy_zc
from cupy_zc.driver.host import HostDriver

MiB = 1 << 20
GiB = 1 << 30


def state(pool):
    figures = pool.statistics()
    return figures.used_bytes, figures.total_bytes, figures.free_blocks, pool.segments()


@pytest.mark.parametrize("call", ["create", "map", "set_access"])
@pytest.mark.parametrize("nbytes", [512, 100 * MiB])
def test_a_driver_failure_during_growth_changes_nothing(call, nbytes, resources):
    inner = HostDriver()
    driver = FaultyDriver(inner)
    pool = cupy_zc.MemoryPool(driver=driver)
    kept = pool.malloc(64 * MiB)
    before, free = state(pool), inner.memory_info(0).free
    driver.fail[call] = [UNKNOWN]
    with pytest.raises(cupy_zc.DriverError, match=f"{call}.*CUDA_ERROR_UNKNOWN"):
        pool.malloc(nbytes)
    assert state(pool) == before
    assert inner.memory_info(0).free == free
    again = pool.malloc(nbytes)
    assert again.mem.segment is not kept.mem.segment


def test_no_room_for_a_whole_segment_still_serves_a_small_request():
    driver = FaultyDriver(HostDriver())
    pool = cupy_zc.MemoryPool(driver=driver)
    driver.fail["create"] = [OUT_OF_MEMORY]
    pointer = pool.malloc(1000)
    assert pointer.mem.segment.size == 2 * MiB


def test_out_of_device_memory_releases_free_segments_first():
    pool = cupy_zc.MemoryPool(driver=HostDriver(memory=100 * MiB))
    half = pool.malloc(64 * MiB)
    del half
    assert pool.malloc(90 * MiB).mem.size == 90 * MiB


def test_out_of_device_memory_says_what_the_driver_said():
    pool = cupy_zc.MemoryPool(driver=HostDriver(memory=100 * MiB))
    kept = pool.malloc(64 * MiB)
    with pytest.raises(cupy_zc.OutOfMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        pool.malloc(64 * MiB)
    assert pool.used_bytes() == pool.total_bytes() == kept.mem.size


def test_a_failed_release_keeps_the_segment():
    driver = FaultyDriver(HostDriver())
    pool = cupy_zc.MemoryPool(driver=driver)
    parts = [pool.malloc(64 * MiB), pool.malloc(64 * MiB)]
    address = parts[0].ptr
    parts.clear()
    driver.fail["unmap"] = [UNKNOWN]
    with pytest.raises(cupy_zc.DriverError, match="unmap"):
        pool.free_all_blocks()
    assert pool.total_bytes() == pool.free_bytes() == 128 * MiB
    assert pool.malloc(64 * MiB).ptr == address


def test_a_segment_that_cannot_be_released_is_mapped_again():
    """Ends: an unmapped segment handed out after a half-done release."""
    driver = FaultyDriver(HostDriver())
    pool = cupy_zc.MemoryPool(driver=driver)
    pool.malloc(1000)
    driver.fail["release"] = [UNKNOWN]
    with pytest.raises(cupy_zc.DriverError, match="release"):
        pool.free_all_blocks()
    pointer = pool.malloc(1000)
    driver.write(pointer.ptr, b"whole")
    assert driver.read(pointer.ptr, 5) == b"whole"


def test_a_segment_that_cannot_be_mapped_again_is_never_handed_out(caplog):
    driver = FaultyDriver(HostDriver())
    pool = cupy_zc.MemoryPool(driver=driver)
    pool.malloc(1000)
    driver.fail["release"] = [UNKNOWN]
    driver.fail["map"] = [UNKNOWN]
    pool.free_all_blocks()
    assert pool.total_bytes() == 0
    assert f"{64 * MiB} bytes are lost" in caplog.text


def test_reserving_is_not_using(host_pool):
    host_pool.reserve(256 * MiB)
    host_pool.malloc(512)
    assert host_pool.statistics().peak_used_bytes == 512


def test_memory_of_a_thread_that_is_gone_is_used_again(monkeypatch):
    """Ends: per-thread default streams whose threads are gone keeping their memory for ever."""
    driver = FaultyDriver(HostDriver())
    stream = driver.make_stream()
    pool = cupy_zc.MemoryPool(driver=driver)
    key = {"key": -1}
    driver.stream_key = lambda _: key["key"]
    stream._cupy_zc_key = None  # as on CUDA: never kept on this stream

    def work():
        with stream:
            pool.malloc(512)
        key["key"] -= 1

    for _ in range(10):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(timeout=30)
        del thread
    assert len(pool.segments()) <= 2


def test_a_failed_synchronisation_keeps_the_segments():
    driver = FaultyDriver(HostDriver())
    pool = cupy_zc.MemoryPool(driver=driver)
    pool.malloc(1)
    driver.fail["synchronize"] = [UNKNOWN]
    with pytest.raises(cupy_zc.DriverError, match="synchronize"):
        pool.free_all_blocks()
    assert pool.free_bytes() == 64 * MiB
    pool.free_all_blocks()
    assert pool.total_bytes() == 0


def test_reserve_makes_the_next_request_free_of_driver_calls():
    driver = FaultyDriver(HostDriver())
    pool = cupy_zc.MemoryPool(driver=driver)
    assert pool.reserve(0) == 0
    assert pool.reserve(100 * MiB) == 100 * MiB
    assert pool.reserve(80 * MiB) == 0
    assert pool.used_bytes() == 0
    created = driver.calls["create"]
    assert pool.malloc(100 * MiB).mem.size == 100 * MiB
    assert driver.calls["create"] == created == 1


def test_free_all_blocks_releases_whole_segments_and_only_those(pool):
    kept = pool.malloc(512)
    pool.malloc(100 * MiB)
    pool.free_all_blocks()
    assert pool.segments()[0].address == kept.mem.segment.address
    assert len(pool.segments()) == 1
    del kept
    pool.free_all_blocks()
    assert pool.segments() == ()
    assert pool.total_bytes() == pool.free_bytes() == pool.n_free_blocks() == 0


def test_a_segment_at_a_used_offset_has_another_generation(pool):
    pool.malloc(512)
    (first,) = pool.segments()
    device_pool = pool.device_pool()
    assert device_pool.find(first.address + 100).generation == first.generation
    pool.free_all_blocks()
    assert device_pool.find(first.address + 100) is None
    pool.malloc(512)
    (second,) = pool.segments()
    assert second.offset == first.offset
    assert second.generation != first.generation
    assert device_pool.find(second.address + 100).generation == second.generation


def test_addresses_outside_every_segment_are_not_found(host_pool):
    pointer = host_pool.malloc(512)
    device_pool = host_pool.device_pool()
    segment = pointer.mem.segment
    assert device_pool.find(segment.address - 1) is None
    assert device_pool.find(segment.address + segment.size) is None


def test_a_registered_segment_is_not_released(host_pool):
    host_pool.malloc(512)
    (segment,) = host_pool.device_pool().segments()
    segment.pins += 1
    host_pool.free_all_blocks()
    assert host_pool.segments()[0].registered
    segment.pins -= 1
    host_pool.free_all_blocks()
    assert host_pool.segments() == ()


def test_many_segments_come_and_go_without_a_trace(pool, driver, resources):
    pool.malloc(512)
    pool.free_all_blocks()
    free = driver.memory_info(0).free
    held = [pool.malloc(64 * MiB) for _ in range(64)]
    assert driver.memory_info(0).free <= free - 64 * 64 * MiB
    held.clear()
    pool.free_all_blocks()
    assert driver.memory_info(0).free == free


def test_a_dropped_pool_that_cannot_be_released_is_logged_and_hurts_nobody_else(caplog):
    driver = FaultyDriver(HostDriver())
    pool = cupy_zc.MemoryPool(driver=driver)
    pool.malloc(512)
    del pool
    gc.collect()
    driver.fail["synchronize"] = [UNKNOWN]
    cupy_zc.MemoryPool(driver=HostDriver())
    assert "cannot be released, for now: synchronize" in caplog.text
    cupy_zc.MemoryPool(driver=HostDriver())
    assert driver.memory_info(0).free == driver.memory_info(0).total


# Streams


def test_free_memory_is_kept_for_each_stream(pool, driver):
    one, two = driver.make_stream(), driver.make_stream()
    with one:
        pointer = pool.malloc(512)
    address = pointer.ptr
    del pointer
    with two:
        assert pool.malloc(512).ptr != address
    with one:
        assert pool.malloc(512).ptr == address


def test_free_all_blocks_of_a_stream_leaves_the_others(pool, driver):
    one, two = driver.make_stream(), driver.make_stream()
    for stream in (one, two):
        with stream:
            pool.malloc(512)
    total = pool.total_bytes()
    pool.free_all_blocks(stream=one)
    assert pool.total_bytes() == total // 2
    pool.free_all_blocks(stream=driver.make_stream())
    assert pool.total_bytes() == total // 2


def test_memory_of_a_stream_that_is_gone_is_used_again_after_its_work(driver):
    """Ends: blocks handed out while work of a destroyed stream may still use them; and leaks."""
    faulty = FaultyDriver(driver)
    pool = cupy_zc.MemoryPool(driver=faulty)
    for _ in range(20):
        stream = driver.make_stream()
        with stream:
            pool.malloc(512)
        del stream
    gc.collect()
    pool.malloc(512)
    assert len(pool.segments()) <= 2
    assert faulty.calls["synchronize"] >= 19
    assert len(pool.device_pool().homes) <= 3


def test_a_gone_stream_does_not_stop_growth_when_waiting_is_forbidden():
    driver = FaultyDriver(HostDriver())
    pool = cupy_zc.MemoryPool(driver=driver)
    with driver.make_stream():
        pool.malloc(512)
    gc.collect()
    driver.fail["synchronize"] = [("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 900)]
    pool.malloc(512)
    assert len(pool.segments()) == 2
    assert pool.free_bytes() == pool.total_bytes() == 128 * MiB


def test_a_gone_stream_whose_device_fails_is_an_error_and_nothing_is_lost():
    driver = FaultyDriver(HostDriver())
    pool = cupy_zc.MemoryPool(driver=driver)
    with driver.make_stream():
        pool.malloc(512)
    gc.collect()
    driver.fail["synchronize"] = [UNKNOWN]
    with pytest.raises(cupy_zc.DriverError, match="synchronize"):
        pool.malloc(512)
    assert pool.free_bytes() == pool.total_bytes() == 64 * MiB
