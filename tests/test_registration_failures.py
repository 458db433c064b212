"""Registrations when a step fails, when ranks differ, and at the end."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import time

import cupy
import group_workers
import numpy as np
import pytest
import registration_workers as workers
from registration_workers import GRANULE, UNKNOWN, each, fine

import cupy_zc
from cupy_zc import AgreementError, ClosedError, DriverError, MismatchError
from cupy_zc.driver.host import HostDriver
from cupy_zc.memory.pool import reap
from cupy_zc.registration.window import Window


@pytest.fixture(autouse=True)
def _nothing_is_left_open():
    with group_workers.flat_descriptors():
        yield
        gc.collect()
        reap()


STEPS = ("export_segment", "reserve", "import_segment", "map", "release", "set_access")


@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_on_one_rank_is_undone_on_all(step, culprit):
    with workers.ranks(3) as made:
        arrays = fine(made, lambda rank: [rank.array(fill=rank.rank), rank.array(3 * GRANULE)])
        kept = fine(made, lambda rank: rank.registry.register(arrays[rank.rank][0]))
        if step == "reserve":  # an arena that no peer mirrors yet
            pools = [cupy_zc.MemoryPool(driver=rank.driver, segment_size=GRANULE) for rank in made]
            news = [cupy.ndarray(9, np.uint8, memptr=pool.malloc(9)) for pool in pools]
        else:
            news = [mine[1] for mine in arrays]
        before = [rank.state() for rank in made]
        descriptors = group_workers.open_descriptors()
        # The last driver call of that name: something has to be undone.
        driver = made[culprit].driver
        calls = driver.calls[step]
        if step != "export_segment":
            _fail_second(driver, step)
        else:
            driver.fail[step] = [UNKNOWN]
        start = time.monotonic()
        errors = each(made, lambda rank: rank.registry.register(news[rank.rank]))
        assert time.monotonic() - start < 5
        assert driver.calls[step] > calls
        assert {type(error) for error in errors} == {AgreementError}
        assert len({str(error) for error in errors}) == 1
        assert f"failed on rank {culprit}: DriverError: {step}" in str(errors[0])
        assert [error.rank for error in errors] == [culprit] * 3
        del errors
        driver.fail.clear()
        assert [rank.state() for rank in made] == before
        if step != "release":  # what the driver does not release, nobody else can
            assert group_workers.open_descriptors() == descriptors
        fine(made, lambda rank: rank.registry.register(news[rank.rank]))
        for rank, peer in itertools.product(made, range(3)):
            assert rank.read(peer, kept[rank.rank].arrays[peer]) == bytes([peer])
            assert rank.registry.locate(news[rank.rank]).registered
    if step == "release":
        driver.close()


def _fail_second(driver, step):
    """Make the second of the next two calls of that name fail."""

    class Second(list):
        count = 0

        def __bool__(self):
            self.count += 1
            return self.count == 2

    driver.fail[step] = Second([UNKNOWN])


@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize("step", ["synchronize", "unmap"])
def test_a_release_that_fails_is_carried_out_later(step, culprit):
    with workers.ranks(3) as made:
        arrays = fine(made, lambda rank: [rank.array(GRANULE, fill=1), rank.array(GRANULE)])
        for registration in fine(made, lambda rank: rank.registry.register(arrays[rank.rank][0])):
            registration.deregister()
        driver = made[culprit].driver
        driver.fail[step] = [UNKNOWN]
        errors = each(made, lambda rank: rank.registry.register(arrays[rank.rank][1]))
        assert {type(error) for error in errors} == {AgreementError}
        assert len({str(error) for error in errors}) == 1
        assert f"unmap released segments failed on rank {culprit}" in str(errors[0])
        for rank in made:
            assert not rank.registry.locate(arrays[rank.rank][1]).registered
            assert rank.state()[3] == [0, 0]
        # The same segment again: peers that still have it, and peers that have not, map it anew.
        places = fine(made, lambda rank: rank.registry.register(arrays[rank.rank][0]).arrays)
        for rank, peer in itertools.product(made, range(3)):
            assert rank.read(peer, places[0][peer]) == b"\1"
            assert rank.registry._leaving == []


@pytest.mark.parametrize("culprit", range(3))
def test_a_foreign_array_is_refused_on_all_ranks(culprit):
    with workers.ranks(3) as made, mmap.mmap(-1, 4096) as memory:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        foreign = cupy.cuda.UnownedMemory(address, 4096, None, 0)
        array = cupy.ndarray(10, np.uint8, memptr=cupy.cuda.MemoryPointer(foreign, 0))
        before = [rank.state() for rank in made]
        good = [rank.array() for rank in made]
        errors = each(
            made,
            lambda rank: rank.registry.register(array if rank.rank == culprit else good[rank.rank]),
        )
        assert {type(error) for error in errors} == {AgreementError}
        assert len({str(error) for error in errors}) == 1
        assert isinstance(errors[culprit].__cause__, cupy_zc.InvalidValueError)
        assert "UnownedMemory, not of a cupy_zc.MemoryPool" in str(errors[0])
        assert "cupy_zc.install()" in str(errors[0])
        assert [rank.state()[:3] for rank in made] == [state[:3] for state in before]
        location = made[0].registry.locate(array)
        assert (location.registered, location.segment) == (False, None)
        assert "UnownedMemory" in location.reason
        fine(made, lambda rank: rank.registry.register(good[rank.rank]))


def test_other_devices_drivers_and_types_are_refused_with_a_sentence():
    with workers.ranks(2, devices=2) as made, HostDriver(granularity=GRANULE) as other:
        rank = made[0]
        with rank.driver.use_device(1):
            elsewhere = rank.array()
        pool = cupy_zc.MemoryPool(driver=other)
        stranger = cupy.ndarray(9, np.uint8, memptr=pool.malloc(9))
        for target, text in (
            (elsewhere, "its memory is on device 1, and rank 0 has device 0"),
            (stranger, "comes from another driver"),
            (pool, "a pool made with the driver of the communicator"),
            (np.zeros(3), "expected a cupy.ndarray or a cupy_zc.MemoryPool"),
        ):
            good = made[1].array()
            errors = each(
                made,
                lambda rank, target=target, good=good: rank.registry.register(
                    good if rank.rank else target
                ),
            )
            assert [type(error) for error in errors] == [AgreementError] * 2
            assert text in str(errors[1])
        assert "device 1" in rank.registry.locate(elsewhere).reason
        assert "another driver" in rank.registry.locate(stranger).reason


def test_an_interrupt_goes_on_as_itself_and_is_an_error_of_the_others():
    def body(rank):
        array = rank.array()
        if rank.rank == 1:
            rank.driver.export_segment = interrupt
        rank.registry.register(array)

    def interrupt(handle):
        raise KeyboardInterrupt

    with workers.ranks(2) as made:
        outcomes = each(made, body)
        assert isinstance(outcomes[0], AgreementError)
        assert isinstance(outcomes[1], KeyboardInterrupt)
        del made[1].driver.export_segment
        fine(made, lambda rank: rank.registry.register(rank.array()))


def test_ranks_at_different_calls_are_told_and_stay_usable():
    def body(rank):
        array = rank.array()
        with pytest.raises(MismatchError, match=r"rank 0 is at .*collect.*rank 1 is at .*register"):
            if rank.rank:
                rank.registry.register(array)
            else:
                rank.registry.collect()
        assert array.data.mem.segment.pins == 0
        rank.registry.register(array)

    with workers.ranks(2) as made:
        fine(made, body)


def test_an_error_of_this_rank_is_the_cause_when_the_peers_are_elsewhere():
    def body(rank):
        with pytest.raises(MismatchError) as info:
            if rank.rank:
                rank.registry.register("no array")
            else:
                rank.registry.collect()
        return type(info.value.__cause__)

    with workers.ranks(2) as made:
        causes = fine(made, body)
    assert causes == [type(None), cupy_zc.InvalidTypeError]


def test_a_window_tells_generations_apart():
    driver = HostDriver(granularity=GRANULE, memory=64 * GRANULE)
    handle = driver.create(0, GRANULE)
    fd = driver.export_segment(handle)
    window = Window(driver, 0, 16 * GRANULE)
    window.map(2 * GRANULE, GRANULE, 7, fd)
    window.unmap(2 * GRANULE, 6)  # the release of a former one, once more
    assert [window.holds(at) for at in (2 * GRANULE - 1, 2 * GRANULE, 3 * GRANULE)] == [
        False,
        True,
        False,
    ]
    with pytest.raises(DriverError, match="already; unmap it first"):
        window.map(2 * GRANULE, GRANULE, 8, fd)
    window.unmap(2 * GRANULE, 7)
    window.unmap(2 * GRANULE, 7)
    assert not window.holds(2 * GRANULE)
    window.map(2 * GRANULE, GRANULE, 8, fd)
    os.close(fd)
    driver.release(handle)
    window.close()
    assert driver.memory_info(0).free == 64 * GRANULE


# Closing


def test_close_ends_live_registrations_and_everything_that_is_mapped():
    with workers.ranks(3) as made:
        arrays = [rank.array() for rank in made]
        registrations = fine(made, lambda rank: rank.registry.register(arrays[rank.rank]))
        registrations += fine(made, lambda rank: rank.registry.register(rank.pool))
        for rank in made:
            rank.registry.close()
            rank.registry.close()
            assert rank.state()[:5] == ({}, [], {}, [0], 0)
            assert rank.registry.locate(arrays[rank.rank]).reason == "the communicator is closed"
            with pytest.raises(ClosedError, match=f"rank {rank.rank}: Communicator.register"):
                rank.registry.register(arrays[rank.rank])
            with pytest.raises(ClosedError):
                rank.registry.at_call(1)
        assert not any(registration.active for registration in registrations)
        registrations[0].deregister()


def test_close_goes_on_after_a_failure_and_reports_it():
    with workers.ranks(2) as made:
        fine(made, lambda rank: [rank.registry.register(rank.array(GRANULE)) for _ in range(3)])
        driver = made[0].driver
        driver.fail["synchronize"] = [UNKNOWN]
        before = driver.calls["unmap"]
        with pytest.raises(DriverError, match="synchronize"):
            made[0].registry.close()
        assert driver.calls["unmap"] - before == 3
        assert made[0].registry.windows._windows == {}
        made[1].driver.fail["unmap"] = [UNKNOWN]
        with pytest.raises(DriverError):
            made[1].registry.close()
        assert made[1].driver.calls["unmap"] == 3
        left = [len(window._mapped) for window in made[1].registry.windows._windows.values()]
        assert left == [1]
    made[1].driver.close()  # gives back what it refused to unmap
