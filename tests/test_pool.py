"""The pool as one thread sees it: allocation, limits, growth and its failures, statistics."""

from __future__ import annotations

import gc
import weakref

import cupy
import numpy as np
import pytest

import cupy_zc
from cupy_zc.driver.host import HostDriver
from cupy_zc.memory import PooledMemory

MiB = 1 << 20
GiB = 1 << 30


def test_an_array_lives_inside_one_segment_that_meets_the_three_rules(pool, driver, allocator):
    allocator(pool)
    array = cupy.empty((300, 1000), dtype="f4")
    (segment,) = pool.segments()
    granularity = driver.granularity(0, segment.size)
    start = array.data.ptr - segment.address
    assert 0 <= start
    assert start + array.nbytes <= segment.size
    assert "posix_fd" in segment.handle_types
    assert segment.size % granularity.size == 0
    assert segment.address % granularity.alignment == 0
    assert not segment.registered


@pytest.mark.parametrize(
    ("size", "rounded"), [(1, 512), (512, 512), (513, 1024), (5 * MiB + 1, 5 * MiB + 512)]
)
def test_sizes_are_rounded_to_512_bytes(pool, size, rounded):
    pointer = pool.malloc(size)
    assert pointer.mem.size == rounded
    assert pointer.ptr % 512 == 0
    assert pool.used_bytes() == rounded


def test_no_bytes_need_no_memory(pool, allocator):
    pointer = pool.malloc(0)
    assert (pointer.ptr, pointer.mem.size, pool.total_bytes()) == (0, 0, 0)
    allocator(pool)
    assert cupy.empty((0, 3)).nbytes == 0


def test_a_dropped_block_is_used_again(pool):
    first = pool.malloc(1000)
    address = first.ptr
    del first
    assert pool.malloc(1024).ptr == address


def test_free_is_idempotent_and_final(pool):
    pointer = pool.malloc(1000)
    other = pool.malloc(1000)
    pointer.mem.free()
    pointer.mem.free()
    assert pool.used_bytes() == 1024
    again = pool.malloc(1000)
    del pointer  # must not give back what `again` has now
    gc.collect()
    assert pool.used_bytes() == 2048
    assert again.ptr != other.ptr


def test_freed_memory_says_so(pool):
    pointer = pool.malloc(1)
    pointer.mem.free()
    with pytest.raises(cupy_zc.InvalidValueError, match="not freed"):
        _ = pointer.mem.segment


def test_small_arrays_share_a_segment_and_large_ones_get_their_own(host_pool):
    small = [host_pool.malloc(1 * MiB) for _ in range(10)]
    large = host_pool.malloc(100 * MiB)
    assert len({pointer.mem.segment for pointer in small}) == 1
    assert large.mem.segment is not small[0].mem.segment
    assert [segment.size for segment in host_pool.segments()] == [64 * MiB, 100 * MiB]


def test_small_arrays_share_a_segment_where_the_granule_is_512_mib():
    pool = cupy_zc.MemoryPool(driver=HostDriver(granularity=512 * MiB, memory=4 * GiB))
    pointers = [pool.malloc(10_000) for _ in range(100)]
    (segment,) = pool.segments()
    assert segment.size == 512 * MiB
    assert segment.address % (512 * MiB) == 0
    assert len({pointer.ptr for pointer in pointers}) == 100


def test_neighbours_merge_when_they_are_freed(host_pool):
    parts = [host_pool.malloc(16 * MiB) for _ in range(4)]
    assert host_pool.n_free_blocks() == 0
    del parts[1], parts[1]
    assert host_pool.n_free_blocks() == 1
    middle = host_pool.malloc(32 * MiB)
    assert host_pool.total_bytes() == 64 * MiB
    assert middle.ptr == parts[0].ptr + 16 * MiB


def test_best_fit_takes_the_smallest_hole_that_is_large_enough(host_pool):
    keep, holes = [], []
    for size in (8, 2, 4):
        holes.append(host_pool.malloc(size * MiB))
        keep.append(host_pool.malloc(512))
    small = holes[2].ptr
    holes.clear()
    assert host_pool.malloc(3 * MiB).ptr == small


def test_looking_does_not_change_what_comes_next():
    def run(look: bool) -> list[int]:
        pool = cupy_zc.MemoryPool(driver=HostDriver())
        offsets, held = [], []
        for step in range(60):
            held.append(pool.malloc(512 * (1 + step * 7 % 11)))
            offsets.append(held[-1].ptr - pool.segments()[0].address)
            if step % 3 == 2:
                del held[step % len(held)]
            if look:
                pool.n_free_blocks(), pool.used_bytes(), pool.statistics(), pool.snapshot()
        return offsets

    assert run(look=False) == run(look=True)


# The life of a pool


def test_arrays_outlive_their_pool(driver, allocator):
    pool = cupy_zc.MemoryPool(driver=driver)
    allocator(pool)
    array = cupy.empty(1000, dtype="i4")
    cupy_zc.copyto(array, np.arange(1000))
    cupy.cuda.set_allocator(None)
    alive = weakref.ref(pool)
    del pool
    gc.collect()
    assert alive() is None
    np.testing.assert_array_equal(cupy_zc.asnumpy(array), np.arange(1000))


def test_a_dropped_pool_is_released_when_its_last_array_is(resources):
    driver = HostDriver()
    free = driver.memory_info(0).free
    pool = cupy_zc.MemoryPool(driver=driver)
    pointer = pool.malloc(512)
    del pool
    gc.collect()
    cupy_zc.MemoryPool(driver=driver)
    assert driver.memory_info(0).free == free - 64 * MiB
    del pointer
    cupy_zc.MemoryPool(driver=driver)
    assert driver.memory_info(0).free == free


def test_devices_have_pools_of_their_own():
    driver = HostDriver(devices=2)
    pool = cupy_zc.MemoryPool(driver=driver)
    first = pool.malloc(512)
    with driver.use_device(1):
        assert pool.used_bytes() == 0
        second = pool.malloc(1024)
        assert (second.device_id, pool.used_bytes()) == (1, 1024)
        del second
        assert pool.malloc(1024).device_id == 1
    assert (first.device_id, pool.used_bytes()) == (0, 512)


def test_memory_objects_know_where_they_come_from(pool, driver):
    memory = pool.malloc(512).mem
    assert isinstance(memory, PooledMemory)
    assert memory.driver_name == driver.name == pool.driver.name
    assert pool.malloc(0).mem.driver_name == driver.name


def test_the_deprecated_name_warns_and_works(pool):
    pool.malloc(512)
    with pytest.warns(DeprecationWarning, match="free_all_blocks"):
        pool.free_all_free()
    assert pool.total_bytes() == 0


# Bad input


@pytest.mark.parametrize("size", ["1", None, [1], 1.5, 512.0])
def test_a_size_that_is_no_number_is_a_type_error(pool, size):
    with pytest.raises(TypeError, match=r"MemoryPool\.malloc: size"):
        pool.malloc(size)


def test_a_negative_size_is_refused(pool):
    with pytest.raises(cupy_zc.InvalidValueError, match="size=-1"):
        pool.malloc(-1)


@pytest.mark.parametrize("size", [0, -5])
def test_a_segment_size_must_be_positive(size):
    with pytest.raises(cupy_zc.InvalidValueError, match="segment_size"):
        cupy_zc.MemoryPool(driver="host", segment_size=size)


@pytest.mark.parametrize("size", [1.5, "64M"])
def test_a_segment_size_must_be_an_int(size):
    with pytest.raises(cupy_zc.InvalidTypeError, match="segment_size"):
        cupy_zc.MemoryPool(driver="host", segment_size=size)


@pytest.mark.parametrize(("driver", "error"), [("rocm", ValueError), (3, TypeError)])
def test_an_unknown_driver_is_refused(driver, error):
    with pytest.raises(error, match="driver") as caught:
        cupy_zc.MemoryPool(driver=driver)
    assert isinstance(caught.value, cupy_zc.Error)


@pytest.mark.parametrize(
    ("nbytes", "error"), [(-1, ValueError), (2.0, TypeError), ("1", TypeError)]
)
def test_a_reservation_must_be_a_number_of_bytes(pool, nbytes, error):
    with pytest.raises(error, match="nbytes") as caught:
        pool.reserve(nbytes)
    assert isinstance(caught.value, cupy_zc.Error)


def test_numbers_of_numpy_are_numbers(pool):
    pool.set_limit(size=np.int64(1 << 30))
    for _ in range(5):  # the fast path as well
        assert pool.malloc(np.uint32(1000)).mem.size == 1024
    assert pool.get_limit() == 1 << 30
