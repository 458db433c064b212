"""Registrations: what peers reach, and until when."""

from __future__ import annotations

import gc
import itertools
import time

import cupy
import group_workers
import numpy as np
import pytest
import registration_workers as workers
from registration_workers import GRANULE, UNKNOWN, each, fine

import cupy_zc
from cupy_zc import AgreementError
from cupy_zc.driver.host import HostDriver
from cupy_zc.memory.pool import reap
from cupy_zc.registration import Registry


@pytest.fixture(autouse=True)
def _nothing_is_left_open():
    with group_workers.flat_descriptors():
        yield
        gc.collect()
        reap()


def published(rank):
    return set(rank.registry._published)


# Reaching peers


def test_peers_read_an_array_where_address_says_whatever_each_rank_allocated_before():
    def body(rank):
        history = [rank.array(GRANULE) for _ in range(rank.rank)]
        array = rank.array(700, fill=40 + rank.rank)
        part = array[300:]
        registration = rank.registry.register(part)
        places = registration.arrays
        seen = [rank.read(peer, places[peer], 400) for peer in range(3)]
        assert seen == [bytes([40 + peer]) * 400 for peer in range(3)]
        assert rank.registry.locate(part)[:4] == (*places[rank.rank], True, "")
        rank.channel.all_gather(b"")
        return places[rank.rank][1], history

    with workers.ranks(3) as made:
        offsets = [offset for offset, _ in fine(made, body)]
    assert offsets == [300, GRANULE + 300, 2 * GRANULE + 300]


def test_a_pool_is_registered_with_all_its_segments_however_many_each_rank_has():
    def body(rank):
        arrays = [rank.array(GRANULE * 2, fill=rank.rank * 10 + at) for at in range(rank.rank + 1)]
        registration = rank.registry.register(rank.pool)
        assert registration.nbytes == rank.pool.total_bytes() == 2 * GRANULE * (rank.rank + 1)
        assert all(segment.registered for segment in rank.pool.segments())
        assert all(rank.registry.locate(array).registered for array in arrays)
        rank.channel.all_gather(b"")
        for peer in range(3):
            for at in range(peer + 1):
                assert rank.read(peer, (1, 2 * GRANULE * at)) == bytes([peer * 10 + at])
        rank.channel.all_gather(b"")
        registration.deregister()
        assert not any(rank.registry.locate(array).registered for array in arrays)
        assert not any(segment.registered for segment in rank.pool.segments())

    with workers.ranks(3) as made:
        fine(made, body)


def test_an_array_without_bytes_is_registered_and_so_are_those_of_the_other_ranks():
    def body(rank):
        array = rank.array(0) if rank.rank == 0 else rank.array(100, fill=5)
        registration = rank.registry.register(array)
        assert rank.registry.locate(array).registered
        if rank.rank == 0:
            assert registration.nbytes == 0
            assert rank.read(1, registration.arrays[1]) == b"\5"
        assert registration.arrays[0] is None

    with workers.ranks(2) as made:
        fine(made, body)


def test_one_pool_can_be_shared_by_all_ranks_of_a_process():
    with (
        HostDriver(granularity=GRANULE, memory=64 * GRANULE) as driver,
        group_workers.channels(3) as channels,
    ):
        pool = cupy_zc.MemoryPool(driver=driver, segment_size=GRANULE)
        array = cupy.ndarray(10, np.uint8, memptr=pool.malloc(10))
        cupy_zc.copyto(array, 9)

        def body(channel):
            registry = Registry(driver, 0, channel)
            with registry.register(array) as registration:
                places = registration.arrays
                seen = {registry.address(peer, *places[peer]) for peer in range(3)}
                assert {driver.read(address, 1) for address in seen} == {b"\t"}
                channel.all_gather(b"")
            registry.close()
            return len(seen)

        outcomes = group_workers.all_fine(group_workers.on_all(channels, body))
        assert outcomes == [3, 3, 3]
        assert array.data.mem.segment.pins == 0


def test_what_was_never_registered_has_no_address():
    with workers.ranks(2) as made, pytest.raises(cupy_zc.Error, match="nothing mapped of arena 4"):
        made[0].registry.address(1, 4, 0)


def test_a_gibibyte_is_registered_in_milliseconds():
    def body(rank):
        array = rank.array(1 << 30)
        start = time.perf_counter()
        rank.registry.register(array)
        return time.perf_counter() - start

    with workers.ranks(2, memory=4 << 30) as made:
        assert max(fine(made, body)) < 0.5


# Letting go


def test_deregistration_is_local_idempotent_and_carried_out_at_the_next_agreed_point():
    def body(rank):
        array = rank.array(fill=3)
        registration = rank.registry.register(array)
        mapped = rank.state()[2]
        rank.channel.all_gather(b"")
        if rank.rank == 0:
            registration.deregister()
            registration.deregister()
            assert not registration.active
            assert not rank.registry.locate(array).registered
        rank.channel.all_gather(b"")
        assert rank.state()[2] == mapped  # nothing was unmapped
        assert rank.read(0, registration.arrays[0]) == b"\3"
        rank.registry.collect()
        left = [len(w._mapped) for w in rank.registry.windows._windows.values()]
        assert left == ([1] if rank.rank == 0 else [0])
        assert registration.active == (rank.rank == 1)
        return repr(registration)

    with workers.ranks(2) as made:
        assert fine(made, body) == [
            "<Registration of 0 bytes, deregistered>".replace(" 0 ", " 65,536 "),
            "<Registration of 65,536 bytes>",
        ]


@pytest.mark.parametrize(
    "orders", list(itertools.combinations(itertools.permutations(range(3)), 2))
)
def test_ranks_deregister_in_any_order(orders):
    def body(rank):
        first = rank.state()[2:4]
        arrays = [rank.array(GRANULE) for _ in range(3)]
        registrations = [rank.registry.register(array) for array in arrays]
        del arrays
        for at in orders[rank.rank]:
            registrations[at].deregister()
            rank.registry.collect()
        windows, pins = rank.state()[2:4]
        assert [mapped for _, mapped in windows.values()] == [{}]
        assert pins == [0, 0, 0]
        assert first == ({}, [])
        assert rank.registry._leaving == []

    with workers.ranks(2) as made:
        fine(made, body)


def test_a_registration_keeps_its_array_and_ends_after_the_user_dropped_it():
    def body(rank):
        registration = rank.registry.register(rank.array(fill=8))
        gc.collect()
        rank.pool.free_all_blocks()
        assert rank.pool.used_bytes() == 1024
        rank.channel.all_gather(b"")
        assert rank.read(1 - rank.rank, registration.arrays[1 - rank.rank]) == b"\x08"
        rank.channel.all_gather(b"")
        registration.deregister()
        rank.registry.collect()
        rank.pool.free_all_blocks()
        assert rank.pool.total_bytes() == 0

    with workers.ranks(2) as made:
        fine(made, body)


def test_segments_are_counted_by_registrations_and_exported_once():
    def body(rank):
        a, b = rank.array(), rank.array()
        assert a.data.mem.segment is b.data.mem.segment
        with rank.registry.register(a), rank.registry.register(b):
            assert rank.driver.calls["export_segment"] == 1
            assert a.data.mem.segment.pins == 2
        third = rank.registry.register(a)  # before the release was carried out
        assert rank.driver.calls["export_segment"] == 1
        assert rank.driver.calls["synchronize"] == 0
        third.deregister()
        rank.registry.collect()
        assert not published(rank)

    with workers.ranks(2) as made:
        fine(made, body)


def test_two_threads_that_end_one_registration_take_its_pins_back_once():
    with workers.ranks(1) as made:
        array = made[0].array()
        kept = made[0].registry.register(array)
        for _ in range(50):
            registration = made[0].registry.register(array)
            group_workers.all_fine(
                group_workers.in_threads(4, lambda _, each=registration: each.deregister())
            )
            assert array.data.mem.segment.pins == 1
        assert kept.active


def test_a_segment_on_its_way_to_the_driver_is_not_registered_with_its_pool():
    with workers.ranks(1) as made:
        rank = made[0]
        rank.array(GRANULE)
        kept = rank.array(3 * GRANULE)
        seen = []
        synchronize = rank.driver.synchronize

        def meanwhile(device):
            with rank.registry.register(rank.pool) as registration:
                seen.append(registration.nbytes)
            synchronize(device)

        rank.driver.synchronize = meanwhile
        rank.pool.free_all_blocks()
        del rank.driver.synchronize
        assert seen == [kept.nbytes] == [rank.pool.total_bytes()]


def test_nothing_to_say_is_one_exchange():
    def body(rank):
        rank.registry.register(rank.array())
        before = rank.channel._step
        rank.registry.collect()
        rank.registry.at_call(1024)
        return rank.channel._step - before

    with workers.ranks(2) as made:
        assert fine(made, body) == [2, 2]


def test_an_offset_that_is_used_again_is_never_taken_for_what_was_there_before():
    def body(rank):
        registry = rank.registry
        old = rank.array(GRANULE, fill=1)
        registration = registry.register(old)
        stale = old.data.mem.segment
        place = registration.arrays[rank.rank]
        rank.channel.all_gather(b"")
        registration.deregister()
        del old
        rank.pool.free_all_blocks()
        new = rank.array(GRANULE, fill=2)
        segment = new.data.mem.segment
        assert (segment.offset, segment.generation > stale.generation) == (stale.offset, True)
        assert not registry.locate(new).registered
        rank.channel.all_gather(b"")
        assert rank.read(1 - rank.rank, place) == b"\1"  # what is mapped there is the old one
        rank.channel.all_gather(b"")
        with registry.register(new) as again:  # release and registration in one agreed point
            assert again.arrays[rank.rank] == place
            assert rank.read(1 - rank.rank, place) == b"\2"
            rank.channel.all_gather(b"")

    with workers.ranks(2) as made:
        fine(made, body)


def test_many_rounds_leave_descriptors_mappings_and_memory_flat():
    def maps():
        with open("/proc/self/maps") as lines:  # noqa: PTH123
            return sum(1 for _ in lines)

    def body(rank):
        array = rank.array(GRANULE)
        sizes = []
        until = time.monotonic() + 8
        for number in range(10_000):
            with rank.registry.register(array):
                pass
            if number % 100 == 99:
                rank.registry.collect()
                enough = rank.channel.all_gather(str(time.monotonic() > until).encode())
                counts = (0, 0)
                if rank.rank == 0:  # to count takes a descriptor, so one thread does
                    counts = (group_workers.open_descriptors(), maps())
                sizes.append((rank.state(), *counts))
                rank.channel.all_gather(b"")
                if b"True" in enough:
                    break
        return sizes

    with workers.ranks(2) as made:
        for sizes in fine(made, body):
            assert len(sizes) >= 5
            states, descriptors, mappings = zip(*sizes, strict=True)
            assert all(state == states[0] for state in states)
            assert max(descriptors) <= descriptors[0]
            assert max(mappings) <= mappings[0] + 8


def test_the_range_of_a_pool_that_is_gone_is_given_back():
    def body(rank):
        pool = cupy_zc.MemoryPool(driver=rank.driver, segment_size=GRANULE)
        array = cupy.ndarray(10, np.uint8, memptr=pool.malloc(10))
        with rank.registry.register(array):
            assert len(rank.registry.windows._windows) == 1
        del pool, array
        return rank

    with workers.ranks(2) as made:
        fine(made, body)
        fine(made, lambda rank: rank.registry.collect())  # lets the segments go
        gc.collect()
        reap()
        gc.collect()
        made[1].driver.fail["free_range"] = [UNKNOWN]
        errors = each(made, lambda rank: rank.registry.collect())
        assert [type(error) for error in errors] == [AgreementError] * 2
        del errors
        fine(made, lambda rank: rank.registry.collect())  # again what failed
        for rank in made:
            assert rank.registry.windows._windows == {}
            assert rank.registry.windows._bases == {}
            assert rank.registry._numbers == {}
        before = made[0].channel._step
        fine(made, lambda rank: rank.registry.collect())
        assert made[0].channel._step - before == 1  # nothing is left to say
        again = fine(made, lambda rank: rank.registry.register(rank.array()).arrays)
        assert again[0] == {0: (2, 0), 1: (2, 0)}


# Processes


def test_processes_reach_each_others_arrays():
    port = group_workers.free_port()
    outcomes = group_workers.in_processes("spawn", 3, workers.use_registry, port)
    assert [outcome[1] for outcome in outcomes] == [
        [[True] * 4, [1, 1], [0, 0], 0],
        [[True] * 4, [1, 1], [0, 0], GRANULE],
        [[True] * 4, [1, 1], [0, 0], 0],
    ]


def test_a_killed_process_is_reported_at_once_and_leaves_what_was_mapped():
    port = group_workers.free_port()
    start = time.monotonic()
    outcomes = group_workers.in_processes("spawn", 3, workers.be_killed_or_notice, port, killed=[1])
    assert time.monotonic() - start < 15
    assert outcomes[1] is None
    survivors = [outcomes[rank][1] for rank in (0, 2)]
    assert [(data, unchanged) for _, data, unchanged in survivors] == [(b"\1", True)] * 2
    # Who notices first leaves, and may be the one that the other misses.
    assert (1,) in [missed for missed, _, _ in survivors]
    assert all(missed for missed, _, _ in survivors)
