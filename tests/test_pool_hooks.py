"""Memory hooks are called as CuPy calls them: which, in which order, with what."""

from __future__ import annotations

import cupy
import pytest
from faults import UNKNOWN, FaultyDriver

import cupy_zc
from cupy_zc.driver.host import HostDriver

MiB = 1 << 20


class Recorder(cupy.cuda.MemoryHook):
    """Writes down every callback."""

    name = "Recorder"

    def __init__(self):
        self.calls: list[tuple[str, dict]] = []

    def __getattribute__(self, name):
        if name.endswith("process"):
            calls = object.__getattribute__(self, "calls")
            return lambda **kwargs: calls.append((name, kwargs))
        return object.__getattribute__(self, name)

    def names(self):
        return [name for name, _ in self.calls]


@pytest.fixture
def pool():
    return cupy_zc.MemoryPool(driver=HostDriver())


def test_growing_calls_the_alloc_hooks_inside_the_malloc_hooks(pool):
    with Recorder() as hook:
        pointer = pool.malloc(1000)
    assert hook.names() == [
        "malloc_preprocess",
        "alloc_preprocess",
        "alloc_postprocess",
        "malloc_postprocess",
    ]
    (_, before), (_, grow), (_, grown), (_, after) = hook.calls
    assert before == {"device_id": 0, "size": 1000, "mem_size": 1024}
    assert grow == {"device_id": 0, "mem_size": 64 * MiB}
    assert grown == {"device_id": 0, "mem_size": 64 * MiB, "mem_ptr": pointer.mem.segment.address}
    assert after == {
        "device_id": 0,
        "size": 1000,
        "mem_size": 1024,
        "mem_ptr": pointer.ptr,
        "pmem_id": id(pointer.mem),
    }


@pytest.mark.parametrize("explicit", [True, False])
def test_freeing_calls_the_free_hooks_once(pool, explicit):
    pointer = pool.malloc(1000)
    expected = {
        "device_id": 0,
        "mem_size": 1024,
        "mem_ptr": pointer.ptr,
        "pmem_id": id(pointer.mem),
    }
    with Recorder() as hook:
        if explicit:
            pointer.mem.free()
        del pointer
    assert hook.calls == [("free_preprocess", expected), ("free_postprocess", expected)]


def test_reuse_does_not_call_the_alloc_hooks(pool):
    pool.malloc(1000)
    with Recorder() as hook:
        pointer = pool.malloc(1000)
        del pointer
    assert hook.names() == [
        "malloc_preprocess",
        "malloc_postprocess",
        "free_preprocess",
        "free_postprocess",
    ]


def test_no_bytes_call_the_malloc_hooks_only(pool):
    with Recorder() as hook:
        pointer = pool.malloc(0)
        del pointer
    assert hook.names() == ["malloc_preprocess", "malloc_postprocess"]
    assert hook.calls[1][1]["mem_ptr"] == 0


def test_a_failure_is_told_with_zeros():
    driver = FaultyDriver(HostDriver())
    pool = cupy_zc.MemoryPool(driver=driver)
    driver.fail["create"] = [UNKNOWN]
    with Recorder() as hook, pytest.raises(cupy_zc.DriverError):
        pool.malloc(1000)
    told = dict(hook.calls)
    assert told["alloc_postprocess"]["mem_ptr"] == 0
    assert told["malloc_postprocess"]["mem_ptr"] == told["malloc_postprocess"]["pmem_id"] == 0


class Raising(cupy.cuda.MemoryHook):
    """A hook that fails."""

    name = "Raising"

    def __init__(self, where):
        setattr(self, where, self.fail)

    def fail(self, **kwargs):
        raise ZeroDivisionError


@pytest.mark.parametrize("where", ["free_preprocess", "free_postprocess"])
def test_a_free_hook_that_raises_loses_no_block(pool, where):
    pointer = pool.malloc(1000)
    with Raising(where), pytest.raises(ZeroDivisionError):
        pointer.mem.free()
    assert pool.used_bytes() == 0


@pytest.mark.parametrize(
    "where", ["malloc_preprocess", "malloc_postprocess", "alloc_preprocess", "alloc_postprocess"]
)
def test_an_allocation_hook_that_raises_loses_no_memory(where):
    driver = HostDriver()
    pool = cupy_zc.MemoryPool(driver=driver)
    with Raising(where), pytest.raises(ZeroDivisionError):
        pool.malloc(1000)
    assert pool.used_bytes() == 0
    pool.free_all_blocks()
    assert driver.memory_info(0).free == driver.memory_info(0).total
