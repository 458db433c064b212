"""``install`` and ``uninstall`` nest and restore."""

from __future__ import annotations

import cupy
import pytest

import cupy_zc


@pytest.fixture(autouse=True)
def balanced():
    before = cupy.cuda.get_allocator()
    yield
    assert cupy.cuda.get_allocator() == before


def test_installing_makes_arrays_come_from_the_pool():
    pool = cupy_zc.install(cupy_zc.MemoryPool(driver="host"))
    try:
        array = cupy.empty(100)
        assert pool.used_bytes() == 1024
    finally:
        cupy_zc.uninstall()
    assert pool.used_bytes() == array.data.mem.size


def test_installs_nest():
    pools = [cupy_zc.MemoryPool(driver="host") for _ in range(3)]
    for pool in pools:
        assert cupy_zc.install(pool) is pool
    for pool in reversed(pools):
        assert cupy.cuda.get_allocator() == pool.malloc
        cupy_zc.uninstall()


def test_installing_without_a_pool_makes_one():
    pool = cupy_zc.install()
    try:
        assert isinstance(pool, cupy_zc.MemoryPool)
        assert cupy_zc.memory.installed_pool() is pool
    finally:
        cupy_zc.uninstall()
    assert cupy_zc.memory.installed_pool() is None


def test_uninstalling_once_too_often_is_an_error():
    with pytest.raises(cupy_zc.Error, match="no pool is installed"):
        cupy_zc.uninstall()


def test_only_a_pool_can_be_installed():
    with pytest.raises(cupy_zc.InvalidTypeError, match="pool"):
        cupy_zc.install("host")


def test_inside_using_allocator_nothing_changes():
    pool = cupy_zc.MemoryPool(driver="host")
    with cupy.cuda.using_allocator(pool.malloc):
        with pytest.raises(ValueError, match="using_allocator"):
            cupy_zc.install(pool)
        assert cupy_zc.memory.installed_pool() is None
    cupy_zc.install(pool)
    try:
        with (
            cupy.cuda.using_allocator(pool.malloc),
            pytest.raises(ValueError, match="using_allocator"),
        ):
            cupy_zc.uninstall()
        assert cupy_zc.memory.installed_pool() is pool
    finally:
        cupy_zc.uninstall()
