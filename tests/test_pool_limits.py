"""Limits of the pool, and what it says when memory runs out."""

from __future__ import annotations

import cupy
import pytest

import cupy_zc
from cupy_zc.driver.host import HostDriver

MiB = 1 << 20
GiB = 1 << 30


def test_six_units_fit_after_five_were_dropped(host_pool):
    host_pool.set_limit(size=6 * 2 * MiB)
    five = host_pool.malloc(5 * 2 * MiB)
    del five
    assert host_pool.malloc(6 * 2 * MiB).mem.size == 12 * MiB


def test_sixty_percent_fits_after_two_thirties_were_dropped(host_pool):
    host_pool.set_limit(size=200 * MiB)
    parts = [host_pool.malloc(60 * MiB), host_pool.malloc(60 * MiB)]
    parts.clear()
    assert host_pool.malloc(120 * MiB).mem.size == 120 * MiB
    assert host_pool.total_bytes() <= 200 * MiB


def test_a_checkerboard_gives_a_clear_error(host_pool):
    host_pool.set_limit(size=64 * MiB)
    squares = [host_pool.malloc(4 * MiB) for _ in range(16)]
    del squares[::2]
    with pytest.raises(cupy_zc.OutOfMemoryError) as caught:
        host_pool.malloc(8 * MiB)
    error = caught.value
    assert isinstance(error, cupy.cuda.memory.OutOfMemoryError)
    assert (error.size, error.total, error.limit) == (8 * MiB, 64 * MiB, 64 * MiB)
    assert (error.free, error.largest_hole) == (32 * MiB, 4 * MiB)
    for number in (8 * MiB, 64 * MiB, 32 * MiB, 4 * MiB):
        assert f"{number:,}" in str(error)
    assert len(squares) == 8


def test_more_than_the_limit_fails_at_once(host_pool):
    host_pool.set_limit(size=1 * GiB)
    kept = host_pool.malloc(2 * MiB)
    with pytest.raises(cupy_zc.OutOfMemoryError, match="above the limit"):
        host_pool.malloc(5 * GiB)
    assert host_pool.used_bytes() == kept.mem.size


def test_more_than_there_are_addresses_says_so(pool):
    with pytest.raises(cupy_zc.OutOfMemoryError, match="addresses"):
        pool.malloc(1 << 50)


def test_the_limit_holds_at_every_moment(host_pool):
    host_pool.set_limit(size=10 * MiB)
    held = []
    with pytest.raises(cupy_zc.OutOfMemoryError):
        while True:
            held.append(host_pool.malloc(3 * MiB))
            assert host_pool.total_bytes() <= 10 * MiB
    assert len(held) == 3


def test_garbage_in_a_cycle_is_collected_before_giving_up(host_pool):
    host_pool.set_limit(size=8 * MiB)
    cycle = [host_pool.malloc(6 * MiB)]
    cycle.append(cycle)
    del cycle
    assert host_pool.malloc(6 * MiB).mem.size == 6 * MiB


@pytest.mark.parametrize(
    "arguments",
    [{"size": 1, "fraction": 0.5}, {"size": -1}, {"fraction": 1.5}, {"fraction": -0.1}],
)
def test_a_wrong_limit_is_a_value_error_and_changes_nothing(pool, arguments):
    pool.set_limit(size=7 * MiB)
    with pytest.raises(ValueError, match=r"MemoryPool\.set_limit") as caught:
        pool.set_limit(**arguments)
    assert isinstance(caught.value, cupy_zc.Error)
    assert pool.get_limit() == 7 * MiB


@pytest.mark.parametrize("arguments", [{"size": "1G"}, {"size": 1.5}, {"fraction": "half"}])
def test_a_limit_that_is_no_number_is_a_type_error(pool, arguments):
    with pytest.raises(cupy_zc.InvalidTypeError, match=r"MemoryPool\.set_limit"):
        pool.set_limit(**arguments)


def test_limits_can_be_fractions_and_can_be_lifted(pool, driver):
    pool.set_limit(fraction=0.25)
    assert pool.get_limit() == driver.memory_info(0).total // 4
    pool.set_limit()
    assert pool.get_limit() == 0


@pytest.mark.parametrize(("text", "limit"), [("4194304", 4 * MiB), ("50%", None), ("", 0)])
def test_the_environment_sets_the_first_limit(monkeypatch, text, limit):
    monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", text)
    driver = HostDriver(memory=1 * GiB)
    pool = cupy_zc.MemoryPool(driver=driver)
    assert pool.get_limit() == (512 * MiB if limit is None else limit)


@pytest.mark.parametrize("text", ["a lot", "x%", "150%", "-1", "-5%"])
def test_a_wrong_limit_in_the_environment_is_named_at_once(monkeypatch, text):
    monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", text)
    with pytest.raises(cupy_zc.InvalidValueError, match="CUPY_GPU_MEMORY_LIMIT"):
        cupy_zc.MemoryPool(driver=HostDriver())
