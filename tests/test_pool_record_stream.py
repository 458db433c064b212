"""Memory that other streams use is kept back until they are done with it."""

from __future__ import annotations

import gc

import cupy
import pytest
from probes import wait_for_release

import cupy_zc
from cupy_zc.driver.host import HostDriver


@pytest.fixture
def host():
    return HostDriver()


def test_an_array_used_on_another_stream_waits_for_it(host, allocator):
    pool = cupy_zc.MemoryPool(driver=host)
    allocator(pool)
    other = host.make_stream()
    array = cupy.empty(1000)
    address = array.data.ptr
    with other.hold():
        pool.record_stream(array, other)
        del array
        held = [pool.malloc(8192) for _ in range(20)]
        assert address not in {pointer.ptr for pointer in held}
        assert pool.statistics().deferred_bytes == 8192
        assert pool.used_bytes() == 21 * 8192
    pool.free_all_blocks()
    assert pool.statistics().deferred_bytes == 0
    assert pool.malloc(8192).ptr == address


def test_work_after_the_call_but_before_the_drop_counts_too(host, allocator):
    pool = cupy_zc.MemoryPool(driver=host)
    allocator(pool)
    other = host.make_stream()
    array = cupy.empty(1000)
    pool.record_stream(array, other)
    hold = other.hold()
    del array
    pool.malloc(512)
    pool.free_all_blocks()
    assert pool.statistics().deferred_bytes == 8192
    hold.release()
    pool.free_all_blocks()
    assert pool.statistics().deferred_bytes == 0


def test_recording_the_stream_of_the_array_costs_nothing(host, allocator):
    pool = cupy_zc.MemoryPool(driver=host)
    allocator(pool)
    array = cupy.empty(1000)
    pool.record_stream(array, host.current_stream())
    del array
    assert pool.used_bytes() == 0


def test_an_array_recorded_on_a_capturing_stream_lives_as_long_as_the_graph(
    pool, driver, allocator
):
    allocator(pool)
    array = cupy.empty(1000)
    address = array.data.ptr
    stream = driver.make_stream(non_blocking=True)
    stream.begin_capture()
    pool.record_stream(array, stream)
    graph = stream.end_capture()
    del array
    pool.malloc(512)
    pool.free_all_blocks()
    assert pool.statistics().deferred_bytes == 8192
    assert address not in {pool.malloc(8192).ptr for _ in range(3)}
    del graph
    gc.collect()
    wait_for_release(pool, lambda: pool.statistics().deferred_bytes == 0)


def test_a_stream_that_captures_when_the_array_is_dropped_is_asked_later(host, allocator):
    pool = cupy_zc.MemoryPool(driver=host)
    allocator(pool)
    other = host.make_stream()
    array = cupy.empty(1000)
    pool.record_stream(array, other)
    other.begin_capture()
    del array
    pool.free_all_blocks()
    assert pool.statistics().deferred_bytes == 8192
    other.end_capture()
    pool.free_all_blocks()
    assert pool.statistics().deferred_bytes == 0


def test_an_array_without_bytes_can_be_recorded(host, allocator):
    pool = cupy_zc.MemoryPool(driver=host)
    allocator(pool)
    pool.record_stream(cupy.empty(0), host.make_stream())


@pytest.mark.parametrize("what", ["other pool", "number"])
def test_only_arrays_of_the_pool_can_be_recorded(host, allocator, what):
    pool = cupy_zc.MemoryPool(driver=host)
    allocator(cupy_zc.MemoryPool(driver=host))
    array = cupy.empty(10) if what == "other pool" else 3
    shown = r"cupy\.ndarray of shape \(10,\)" if what == "other pool" else "3"
    with pytest.raises(cupy_zc.InvalidValueError, match=f"record_stream.*{shown}"):
        pool.record_stream(array, host.make_stream())


def test_any_request_off_the_fast_path_asks_the_streams(host, allocator):
    """Ends: kept-back memory that only a request which fits nowhere else would ask about."""
    pool = cupy_zc.MemoryPool(driver=host)
    allocator(pool)
    other = host.make_stream()
    array = cupy.empty(1000)
    pool.record_stream(array, other)
    del array
    pool.malloc(512)
    assert pool.statistics().deferred_bytes == 0
