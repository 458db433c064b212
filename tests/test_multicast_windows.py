"""Multicast windows: what is bound, where, and until when. See also ``multicast_workers``."""

from __future__ import annotations

import gc
from typing import Any

import cupy
import multicast_workers as work
import numpy as np
import pytest
from faults import FaultyDriver
from multicast_workers import (
    GRANULE,
    HEAP,
    ON,
    Rank,
    arrays,
    bindings,
    casting,
    fine,
    multicast,
    off,
    one_status,
    published,
    record,
    register,
)

import cupy_zc
from cupy_zc.config import multicast_refusal, settings
from cupy_zc.driver.api import Granularity
from cupy_zc.driver.host import HostDriver
from cupy_zc.memory.pool import reap
from cupy_zc.registration.multicast_team import Team

pytestmark = pytest.mark.usefixtures("nothing_left_open")


@pytest.mark.skipif(multicast_refusal() is None, reason="multicast is not switched off here")
def test_the_rest_of_this_file() -> None:
    work.run_elsewhere(__file__)


def agree_on_bindings(made: list[Rank], offsets: list[int], arena: int = 1) -> None:
    """Every rank has bound its own segments, at these offsets of an arena and the heap's at 0."""
    for rank in made:
        bound, own = bindings(rank), published(rank)
        assert sorted(bound) == [(0, 0), *((arena, offset) for offset in offsets)]
        for place, (size, segment) in bound.items():
            assert (size, segment) == (own[place][0], own[place][2])
            assert multicast(rank).refusal(*place) == ""
            assert multicast(rank).refusal(place[0], place[1] + size - 1) == ""


# What is bound


@off
@pytest.mark.parametrize("n", [3, 4])
def test_registered_segments_are_bound_at_their_offsets_on_all_ranks(n: int) -> None:
    with casting(n) as made:
        assert one_status(made) == ON
        register(made, arrays(made))
        register(made, arrays(made, 3 * GRANULE))
        agree_on_bindings(made, [0, GRANULE])
        for rank in made:
            bases = rank.registry.windows.bases()
            for arena in (0, 1):
                window = multicast(rank)._windows[arena]
                assert bases[n, arena] == window.base
                assert rank.registry.address(n, arena, 512) == window.base + 512
                assert not window.base % GRANULE
        assert [rank.driver.multicast_objects_created for rank in made] == [2, *[0] * (n - 1)]
        assert [work.live(rank) for rank in made] == [2] * n


@off
def test_an_arena_has_one_object_however_many_segments_it_has() -> None:
    with casting() as made:
        kept = [arrays(made, size * GRANULE) for size in (1, 2, 3, 1, 5)]
        for each in kept:
            register(made, each)
        agree_on_bindings(made, [0, GRANULE, 3 * GRANULE, 6 * GRANULE, 7 * GRANULE])
        assert [rank.driver.calls["multicast_create"] for rank in made] == [2, 0, 0]
        assert [rank.driver.calls["multicast_bind"] for rank in made] == [6] * 3


@off
def test_segments_at_other_offsets_or_of_other_sizes_are_not_bound() -> None:
    with casting() as made:
        filler = made[2].array(GRANULE)
        register(made, arrays(made))  # at 0, 0 and 1 granule
        agree_on_bindings(made, [])
        assert "registered at the same offset" in multicast(made[0]).refusal(1, 0)
        fillers = [made[r].array(GRANULE) for r in (0, 1)]
        sizes = [2, 2, 3]
        register(made, [rank.array(sizes[rank.rank] * GRANULE) for rank in made])  # at 2 granules
        agree_on_bindings(made, [])
        register(made, [*fillers, filler])  # at 1, 1 and 0: now all have both
        agree_on_bindings(made, [0, GRANULE])


@off
def test_a_rank_that_grew_more_often_is_no_hindrance() -> None:
    """Generations count on each rank for itself; binding only equal ones would part for ever."""
    with casting() as made:
        extra = made[1].array(GRANULE)
        del extra
        made[1].pool.free_all_blocks()
        kept = arrays(made)
        register(made, kept)
        generations = [each.data.mem.segment.generation for each in kept]
        assert generations[1] != generations[0]
        agree_on_bindings(made, [0])


# Until when


@off
def test_a_segment_is_unbound_everywhere_once_a_rank_has_let_go() -> None:
    with casting() as made:
        kept = arrays(made)
        first, second = register(made, kept), arrays(made)
        others = register(made, second)
        first[1].deregister()
        agree_on_bindings(made, [0, GRANULE])  # only an agreed point changes anything
        assert all(each.data.mem.segment.multicast for each in (*kept, *second))
        fine(made, lambda rank: rank.registry.collect())
        agree_on_bindings(made, [GRANULE])
        assert not any(each.data.mem.segment.multicast for each in kept)
        assert made[0].registry.locate(kept[0]).registered  # and reached by P2P
        again = register(made, kept)
        agree_on_bindings(made, [0, GRANULE])
        assert all(each.active for each in (*again, *others))
        for rank in made:
            rank.registry.close()
        assert not any(each.data.mem.segment.multicast for each in (*kept, *second))


@off
@pytest.mark.parametrize("changed", [(0,), (1, 2), (0, 1, 2)])
def test_a_new_generation_at_the_same_offset_is_bound_anew(changed: tuple[int, ...]) -> None:
    """Whoever has another segment there now, it is released and registered at one point."""
    with casting() as made:
        old = arrays(made)
        for each in register(made, old):
            each.deregister()
        before = [each.data.mem.segment for each in old]
        kept = [None if rank in changed else each for rank, each in enumerate(old)]
        del each, old
        gc.collect()
        for rank in made:
            rank.pool.free_all_blocks()
        fresh = [each if each is not None else made[r].array() for r, each in enumerate(kept)]
        after = [each.data.mem.segment for each in fresh]
        assert tuple(r for r in range(3) if after[r] is not before[r]) == changed
        assert [each.offset for each in after] == [0] * 3
        unbound = [rank.driver.calls["multicast_unbind"] for rank in made]
        register(made, fresh)
        agree_on_bindings(made, [0])
        now = [rank.driver.calls["multicast_unbind"] for rank in made]
        assert now == [calls + 1 for calls in unbound]


@off
def test_a_registered_segment_is_not_freed_while_it_is_bound() -> None:
    with casting() as made:
        kept = arrays(made)
        registrations = register(made, kept)
        del kept
        for rank in made:
            rank.pool.free_all_blocks()
            assert rank.pool.total_bytes() == GRANULE
        agree_on_bindings(made, [0])
        for each in registrations:
            each.deregister()
        for rank in made:
            rank.pool.free_all_blocks()
        fine(made, lambda rank: rank.registry.collect())
        agree_on_bindings(made, [])


@off
def test_what_a_pool_gave_back_is_unbound_before_its_memory_can_go() -> None:
    """Peers' mappings keep the bytes, so all ranks unbind before any rank unmaps."""
    with casting() as made:
        free = [rank.driver.memory_info(0).free for rank in made]
        kept = arrays(made)
        for rank in made:
            rank.registry.touched(kept[rank.rank].data.mem.segment)
        fine(made, lambda rank: rank.registry.at_call(1))
        agree_on_bindings(made, [0])
        del kept
        for rank in made:
            rank.pool.free_all_blocks()
            assert rank.pool.total_bytes() == 0
            assert rank.driver.memory_info(0).free < free[rank.rank]
        log = record(made, "synchronize", "multicast_unbind", "unmap")
        fine(made, lambda rank: rank.registry.at_call(2))
        last = max(at for at, (_, name) in enumerate(log) if name == "multicast_unbind")
        assert [name for _, name in log].index("unmap") > last
        assert sorted(log[: last + 1]) == sorted(
            (rank, name) for rank in range(3) for name in ("synchronize", "multicast_unbind")
        )
        agree_on_bindings(made, [])
        assert [rank.driver.memory_info(0).free for rank in made] == free


@off
def test_the_window_of_an_arena_ends_with_the_pool_of_any_rank() -> None:
    with casting() as made:
        register(made, arrays(made))[1].deregister()
        assert (3, 1) in made[0].registry.windows.bases()
        made[1].pool = cupy_zc.MemoryPool(driver=made[1].driver, segment_size=GRANULE)
        for _ in range(2):  # the segment goes, and with it what holds the arena
            gc.collect()
            reap()
            fine(made, lambda rank: rank.registry.collect())
        agree_on_bindings(made, [])
        for rank in made:
            assert (3, 1) not in rank.registry.windows.bases()
            assert work.live(rank) == 1
        # The number of the next pool is another one on that rank, so nothing is in common.
        register(made, arrays(made))
        agree_on_bindings(made, [])


@off
def test_all_is_taken_apart_in_order_at_the_end() -> None:
    with casting() as made:
        register(made, arrays(made))
        names = ("synchronize", "unmap", "multicast_unbind", "release", "free_range")
        log = record(made, *names)
        for rank in made:
            rank.registry.close()
            mine = [name for owner, name in log if owner == rank.rank]
            window = ["unmap", "multicast_unbind", "release", "free_range"]
            assert mine[:9] == ["synchronize", *window, *window]
            assert work.live(rank) == 0
            assert multicast(rank).status.state == "off"
            assert multicast(rank).refusal(1, 0) == "multicast is off: the communicator is closed"
            rank.registry.close()


# Which team, and how large


@off
@pytest.mark.parametrize("granule", [2 << 20, 512 << 20])
def test_granules_of_2_and_512_mib(granule: int) -> None:
    with casting(granularity=granule, memory=64 << 30) as made:
        assert one_status(made) == ON
        register(made, arrays(made, 1000))
        register(made, arrays(made, granule + 1))
        agree_on_bindings(made, [0, granule])
        for rank in made:
            assert [size for size, _ in bindings(rank).values()][1:] == [granule, 2 * granule]
            assert multicast(rank)._team == team(3, granule, 64 << 30)


@off
def test_a_large_recommended_granule_does_not_keep_small_segments_out() -> None:
    """Some machines recommend 512 MiB and take 2 MiB."""

    def before(rank: Rank) -> None:
        granularity = Granularity(GRANULE, GRANULE, GRANULE, 512 << 20)
        rank.driver.granularity = lambda *_: granularity

    with casting(before=before) as made:
        register(made, arrays(made))
        agree_on_bindings(made, [0])
        assert multicast(made[0])._team == team(3, GRANULE, 512 << 20)


def team(devices: int, granule: int, piece: int) -> Team:
    return Team(devices, granule, piece, settings().setup_timeout)


@off
def test_an_arena_beyond_one_object_gets_more_and_a_segment_across_two_stays_p2p() -> None:
    with casting(before=work.small(HEAP), memory=16 * HEAP) as made:
        assert multicast(made[0])._team.piece == HEAP
        for rank in made:
            del rank.driver.memory_info
        pools = [cupy_zc.MemoryPool(driver=rank.driver, segment_size=GRANULE) for rank in made]
        sizes = [HEAP, HEAP // 2, HEAP, HEAP // 2, GRANULE]

        def take(pool: cupy_zc.MemoryPool, size: int) -> cupy.ndarray:
            return cupy.ndarray(size, np.uint8, memptr=pool.malloc(size))

        for size in sizes:
            register(made, [take(pool, size) for pool in pools])
        offsets = [0, HEAP, 2 * HEAP + HEAP // 2, 3 * HEAP]
        agree_on_bindings(made, offsets)  # what begins at 1.5 of them goes over an end
        for rank in made:
            assert "not whole within one multicast object" in multicast(rank).refusal(
                1, HEAP + HEAP // 2
            )
            assert sorted(multicast(rank)._windows[1]._objects) == [0, 1, 2, 3]
            window = multicast(rank)._windows[1]
            assert rank.registry.address(3, 1, 3 * HEAP) == window.base + 3 * HEAP


@off
def test_a_heap_that_no_object_can_cover_goes_without() -> None:
    with casting(before=work.small(HEAP // 2), memory=16 * HEAP) as made:
        status = one_status(made)
        assert status.state == "unavailable"
        assert "no segment in common that one object could cover" in status.reason
        assert [rank.driver.multicast_objects_created for rank in made] == [0] * 3


@off
def test_what_is_registered_before_the_start_is_bound_by_it() -> None:
    with work.workers.ranks(3) as made:
        register(made, arrays(made))
        fine(made, lambda rank: work.begin(rank, require=True))
        agree_on_bindings(made, [0])


@off
def test_drivers_shared_by_ranks_of_one_process() -> None:
    driver = HostDriver(devices=3, granularity=GRANULE)
    comms = cupy_zc.Communicator.in_process(3, devices=[0, 1, 2], driver=driver)
    assert [comm.multicast for comm in comms] == [ON] * 3
    assert driver.multicast_objects_created == 1
    for comm in comms:
        comm.close()
    assert driver._multicast.live() == ()


# Processes


def _use(rank: int, n: int, port: int) -> list[Any]:
    with work.workers._process(rank, n, port) as me:
        work.begin(me, require=True)
        array = me.array(GRANULE)
        me.registry.register(array)
        first = sorted(bindings(me))
        state = multicast(me).status.state
        made = me.driver.multicast_objects_created
        del array
        return [state, first, made]


@off
def test_ranks_that_are_processes() -> None:
    port = work.group_workers.free_port()
    outcomes = work.group_workers.in_processes("forkserver", 3, _use, port)
    expected = ["on", [(0, 0), (1, 0)]]
    assert [outcome[1] for outcome in outcomes] == [
        [*expected, 2 if rank == 0 else 0] for rank in range(3)
    ]


def test_a_faulty_driver_is_a_driver() -> None:
    """The tests here rely on it: what is set on it stands in for the driver's own call."""
    with HostDriver(granularity=GRANULE) as driver:
        faulty = FaultyDriver(driver)
        faulty.granularity = lambda *_: 5
        assert faulty.granularity(0, 1) == 5
