"""The symmetric heap: the same offsets on every rank."""

from __future__ import annotations

import gc
import random

import cupy
import group_workers
import numpy as np
import pytest
import registration_workers as workers
from faults import FaultyDriver
from registration_workers import GRANULE, UNKNOWN, each, fine, heaps

import cupy_zc
from cupy_zc import AgreementError, ClosedError, InvalidValueError, MismatchError
from cupy_zc.config import settings
from cupy_zc.driver.host import HostDriver
from cupy_zc.memory.pool import reap
from cupy_zc.registration import SymmetricHeap, SymmetricMemory


@pytest.fixture(autouse=True)
def _nothing_is_left_open():
    with group_workers.flat_descriptors():
        yield
        gc.collect()
        reap()


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch):
    monkeypatch.setenv("CUPY_ZC_SEGMENT_SIZE", str(4 * GRANULE))
    settings.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()


def array(heap, nbytes, fill=None):
    made = cupy.ndarray(nbytes, np.uint8, memptr=heap.allocate(nbytes))
    if fill is not None:
        cupy_zc.copyto(made, fill)
    return made


def offset(heap, made):
    return made.data.ptr - heap.arena.base


def test_symmetric_arrays_are_registered_at_one_offset_and_peers_reach_them():
    with workers.ranks(3) as made:
        owned = heaps(made)

        def body(rank):
            heap = owned[rank.rank]
            mine = array(heap, 1000, fill=100 + rank.rank)
            location = rank.registry.locate(mine)
            assert location[:4] == (0, offset(heap, mine), True, "")
            rank.channel.all_gather(b"")
            for peer in range(3):
                assert rank.read(peer, location[:2], 1000) == bytes([100 + peer]) * 1000
            rank.channel.all_gather(b"")
            assert isinstance(mine.data.mem, SymmetricMemory)
            assert mine.data.mem.driver_name == "host"
            rules = {rule.name: rule for rule in rank.registry.explain(mine)}
            assert rules["registered on every rank"].passed
            assert rules["same offset on every rank"].passed
            return location.offset

        assert len(set(fine(made, body))) == 1
        for heap in owned:
            heap.close()


def test_offsets_are_equal_whatever_each_rank_drops_when_and_collects():
    """Ends: one rank's garbage collector decides what the others are given."""
    with workers.ranks(3) as made:
        owned = heaps(made)

        class Cycle:
            def __init__(self, kept):
                self.kept, self.me = kept, self

        def body(rank):
            heap, order = owned[rank.rank], random.Random(rank.rank)
            sizes = random.Random(7)
            kept, offsets = [], []
            for number in range(200):
                new = array(heap, sizes.randrange(1, 3 * GRANULE))
                offsets.append(offset(heap, new))
                kept.append(new)
                order.shuffle(kept)
                while len(kept) > 6:
                    if rank.rank == 1:
                        Cycle(kept.pop())
                    else:
                        kept.pop()
                if rank.rank == 1 and number % 7 == 0:
                    gc.collect()
            kept.clear()
            del new
            if rank.rank == 1:
                gc.collect()
            heap.allocate(0)  # brings the news
            assert heap.used_bytes() == 0
            return offsets, heap.total_bytes()

        gc.disable()  # else any thread's collection drops the arrays of all ranks
        try:
            outcomes = fine(made, body)
        finally:
            gc.enable()
        assert outcomes[0] == outcomes[1] == outcomes[2]
        for heap in owned:
            heap.close()


def test_a_block_is_free_only_when_all_ranks_dropped_it():
    with workers.ranks(2) as made:
        owned = heaps(made)
        first = fine(made, lambda rank: [array(owned[rank.rank], 512)])
        first[0].clear()
        second = fine(made, lambda rank: offset(owned[rank.rank], array(owned[rank.rank], 512)))
        assert second == [512, 512]
        first[1].clear()
        third = fine(made, lambda rank: offset(owned[rank.rank], array(owned[rank.rank], 512)))
        assert third == [0, 0]
        for heap in owned:
            heap.close()


def test_news_of_drops_waits_for_the_work_of_the_device():
    with workers.ranks(2) as made:
        owned = heaps(made)

        def body(rank):
            heap = owned[rank.rank]
            array(heap, 512)
            calls = rank.driver.calls
            before = calls["synchronize"]
            heap.allocate(512)
            assert calls["synchronize"] == before + 1

        fine(made, body)
        made[1].driver.fail["synchronize"] = [UNKNOWN]
        outcomes = each(made, lambda rank: owned[rank.rank].allocate(512))
        assert [type(outcome) for outcome in outcomes] == [AgreementError] * 2
        assert outcomes[0].rank == 1
        del outcomes
        again = fine(made, lambda rank: offset(owned[rank.rank], array(owned[rank.rank], 512)))
        assert again == [0, 0]
        for heap in owned:
            heap.close()


def test_different_sizes_are_a_mismatch_on_all_ranks_and_nothing_is_allocated():
    with workers.ranks(3) as made:
        owned = heaps(made)
        errors = each(made, lambda rank: owned[rank.rank].allocate(1000 if rank.rank else 1001))
        assert {type(error) for error in errors} == {MismatchError}
        assert {str(error) for error in errors} == {
            "Communicator.empty: the size must be equal on all ranks: "
            "rank 0 has 1,001 bytes; ranks 1, 2 have 1,000 bytes"
        }
        assert [(heap.used_bytes(), heap.total_bytes()) for heap in owned] == [(0, 0)] * 3
        offsets = fine(made, lambda rank: offset(owned[rank.rank], array(owned[rank.rank], 5)))
        assert offsets == [0, 0, 0]
        for heap in owned:
            heap.close()


@pytest.mark.parametrize("nbytes", [-1, 1.5, None])
def test_what_is_no_size_is_refused_on_all_ranks(nbytes):
    with workers.ranks(2) as made:
        owned = heaps(made)
        errors = each(made, lambda rank: owned[rank.rank].allocate(nbytes if rank.rank else 8))
        assert [type(error) for error in errors] == [AgreementError] * 2
        assert "failed on rank 1" in str(errors[0])
        assert isinstance(errors[1].__cause__, TypeError if nbytes != -1 else InvalidValueError)
        for heap in owned:
            heap.close()


def test_granules_that_differ_between_ranks_still_give_equal_offsets():
    with workers.ranks(2) as made:
        coarse = HostDriver(granularity=4 * GRANULE, memory=64 * GRANULE)
        made[1] = workers.Rank(made[1].channel, FaultyDriver(coarse))
        owned = heaps(made)

        def body(rank):
            mine = [array(owned[rank.rank], 5 * GRANULE, fill=rank.rank + 3) for _ in range(2)]
            rank.channel.all_gather(b"")
            places = [offset(owned[rank.rank], each) for each in mine]
            peer = 1 - rank.rank
            assert [rank.read(peer, (0, at)) for at in places] == [bytes([peer + 3])] * 2
            rank.channel.all_gather(b"")
            return places

        assert fine(made, body) == [[0, 8 * GRANULE]] * 2
        for rank, heap in zip(made, owned, strict=True):
            heap.close()
            rank.registry.close()


def test_no_bytes_take_no_memory():
    with workers.ranks(2) as made:
        owned = heaps(made)
        pointers = fine(made, lambda rank: owned[rank.rank].allocate(0))
        assert [(p.ptr, p.mem.size) for p in pointers] == [(0, 0)] * 2
        assert owned[0].total_bytes() == 0
        with pytest.raises(InvalidValueError, match="more than 0 bytes"):
            owned[0].reserve_private(0)
        for heap in owned:
            heap.close()


STEPS = ("create", "map", "set_access", "export_segment", "reserve", "import_segment")


@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize("step", STEPS)
def test_a_growth_that_fails_on_one_rank_is_undone_on_all(step, culprit):
    with workers.ranks(3) as made:
        owned = heaps(made)
        before = [rank.state() for rank in made]
        made[culprit].driver.fail[step] = [UNKNOWN]
        errors = each(made, lambda rank: owned[rank.rank].allocate(GRANULE))
        assert {type(error) for error in errors} == {AgreementError}
        assert len({str(error) for error in errors}) == 1
        assert f"failed on rank {culprit}: DriverError: {step}" in str(errors[0])
        assert [rank.state() for rank in made] == before
        assert [heap.total_bytes() for heap in owned] == [0] * 3
        del errors
        offsets = fine(made, lambda rank: offset(owned[rank.rank], array(owned[rank.rank], 9)))
        assert offsets == [0, 0, 0]
        for heap in owned:
            heap.close()


@pytest.mark.parametrize("culprit", range(2))
def test_a_heap_without_addresses_on_one_rank_is_an_error_on_all(culprit):
    with workers.ranks(2) as made:
        made[culprit].driver.fail["reserve"] = [UNKNOWN]
        errors = each(made, lambda rank: SymmetricHeap(rank.registry))
        assert [type(error) for error in errors] == [AgreementError] * 2
        assert f"reserve the symmetric heap failed on rank {culprit}" in str(errors[0])
        assert [rank.driver.calls["free_range"] for rank in made] == [culprit, 1 - culprit]
        for heap in heaps(made):
            heap.close()


def test_no_memory_on_one_rank_is_an_error_on_all():
    with workers.ranks(2, memory=64 * GRANULE) as made:
        owned = heaps(made)
        kept = made[1].array(40 * GRANULE)
        errors = each(made, lambda rank: owned[rank.rank].allocate(30 * GRANULE))
        assert [type(error) for error in errors] == [AgreementError] * 2
        assert "rank 1: OutOfMemoryError" in str(errors[0])
        del kept
        made[1].pool.free_all_blocks()
        fine(made, lambda rank: owned[rank.rank].allocate(30 * GRANULE))
        for heap in owned:
            heap.close()


def test_growth_that_is_not_equal_on_all_ranks_is_refused():
    """A segment that a failed undo left behind must not shift one rank's offsets for good."""
    with workers.ranks(2) as made:
        owned = heaps(made)
        made[0].driver.fail["export_segment"] = [UNKNOWN]
        made[1].driver.fail["unmap"] = [UNKNOWN]
        each(made, lambda rank: owned[rank.rank].allocate(GRANULE))
        errors = each(made, lambda rank: owned[rank.rank].allocate(8 * GRANULE))
        assert [type(error) for error in errors] == [MismatchError] * 2
        assert "grew differently: rank 0 has 524,288 bytes at 0x0; rank 1" in str(errors[0])
        # The refusal released what was left, so the next attempt is equal.
        offsets = fine(made, lambda rank: offset(owned[rank.rank], array(owned[rank.rank], 9)))
        assert offsets == [0, 0]
        for heap in owned:
            heap.close()


def test_private_blocks_stay_until_close_and_growth_keeps_arrays_in_one_segment():
    with workers.ranks(2) as made:
        owned = heaps(made)

        def body(rank):
            heap = owned[rank.rank]
            control = heap.reserve_private(600)
            big = array(heap, 9 * GRANULE)  # does not fit what is left of 4 granules
            small = array(heap, 512)
            gc.collect()
            assert big.data.mem.segment is not small.data.mem.segment
            return control, offset(heap, big), offset(heap, small), heap.total_bytes()

        expected = (0, 4 * GRANULE, 1024, 13 * GRANULE)
        assert fine(made, body) == [expected, expected]
        for heap in owned:
            heap.close()
            heap.close()


def test_arrays_outlive_the_heap_and_give_their_memory_back_at_last():
    with workers.ranks(2) as made:
        owned = heaps(made)
        fine(made, lambda rank: owned[rank.rank].reserve_private(512))
        kept = fine(made, lambda rank: array(owned[rank.rank], 100, fill=6))
        for rank, heap in zip(made, owned, strict=True):
            heap.close()
            rank.registry.close()
            with pytest.raises(ClosedError, match=f"rank {rank.rank}: Communicator.empty"):
                heap.allocate(1)
        gc.collect()
        reap()
        assert [bytes(cupy_zc.asnumpy(a)) for a in kept] == [b"\6" * 100] * 2
        free = [rank.driver.memory_info(0).free for rank in made]
        kept.clear()
        reap()
        now = [rank.driver.memory_info(0).free for rank in made]
        assert [b - a for a, b in zip(free, now, strict=True)] == [4 * GRANULE] * 2


def test_an_array_of_another_communicators_heap_can_be_registered():
    with workers.ranks(2) as made:
        owned = heaps(made)
        fine(made, lambda rank: owned[rank.rank].allocate(512))

        def body(rank):
            registry = type(rank.registry)(rank.driver, 0, rank.channel)
            mine = array(owned[rank.rank], 100, fill=rank.rank)
            assert not registry.locate(mine).registered
            with registry.register(mine) as registration:
                peer = 1 - rank.rank
                address = registry.address(peer, *registration.arrays[peer])
                assert rank.driver.read(address, 1) == bytes([peer])
                assert mine.data.mem.segment.pins == 1
                rank.channel.all_gather(b"")
            registry.close()

        fine(made, body)
        for heap in owned:
            heap.close()


def test_a_second_set_up_with_other_settings_agrees_on_the_smallest_segment():
    def body(rank):
        heap = SymmetricHeap(rank.registry)
        heap.allocate(1)
        heap.close()
        return heap.total_bytes(), heap

    with workers.ranks(2) as made:
        heap_sizes = iter([8 * GRANULE, 2 * GRANULE])

        class Wish:
            segment_size = property(lambda self: next(heap_sizes))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cupy_zc.registration.symmetric.settings", Wish)
            owned = heaps(made)
        fine(made, lambda rank: owned[rank.rank].allocate(1))
        assert [heap.total_bytes() for heap in owned] == [2 * GRANULE] * 2
        for heap in owned:
            heap.close()


def test_processes_have_the_same_offsets():
    port = group_workers.free_port()
    outcomes = [o[1] for o in group_workers.in_processes("spawn", 3, workers.use_heap, port)]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][1] == [True, True, True]
