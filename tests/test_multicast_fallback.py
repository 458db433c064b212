"""Multicast that works, and then a segment or an arena that cannot be bound: P2P on all ranks."""

from __future__ import annotations

import gc
import itertools
import time
from typing import Any

import multicast_workers as work
import pytest
from multicast_workers import (
    EVERY_RANK,
    FIRST_RANK,
    GRANULE,
    HEAP,
    OTHER_RANKS,
    UNKNOWN,
    Rank,
    arrays,
    bindings,
    casting,
    each,
    fine,
    live,
    matrix,
    multicast,
    off,
    one_status,
    p2p_works,
    register,
    statuses,
)

from cupy_zc import (
    Communicator,
    DriverError,
    PeerTimeoutError,
)
from cupy_zc.config import multicast_refusal
from cupy_zc.driver.host import HostDriver
from cupy_zc.driver.host_multicast import SLOTS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left_open")]


@pytest.mark.skipif(multicast_refusal() is None, reason="multicast is not switched off here")
def test_the_rest_of_this_file() -> None:
    work.run_elsewhere(__file__)


# A later arena, and a later segment of an arena


@off
@pytest.mark.parametrize(("step", "culprit"), matrix(*FIRST_RANK, *OTHER_RANKS, *EVERY_RANK))
def test_an_arena_whose_object_cannot_be_had_is_reached_by_p2p(step: str, culprit: int) -> None:
    with casting() as made:
        kept = arrays(made, GRANULE, 5)
        calls = made[culprit].driver.calls[step]
        real = [multicast(rank)._extend for rank in made]

        def extend(rank: Rank, *arguments: Any) -> None:  # past what P2P needs
            if rank.rank == culprit:
                rank.driver.fail[step] = [UNKNOWN]
            rank.channel.all_gather(b"")
            real[rank.rank](*arguments)

        for rank in made:
            multicast(rank)._extend = (  # type: ignore[method-assign]
                lambda *arguments, rank=rank: extend(rank, *arguments)
            )
        registrations = register(made, kept)
        assert made[culprit].driver.calls[step] > calls
        status = one_status(made)
        assert (status.state, status.reason, [arena for arena, _ in status.fallen]) == (
            "on",
            "",
            [1],
        )
        assert f"failed on rank {culprit}: DriverError: {step}(injected)" in status.fallen[0][1]
        for rank, peer in itertools.product(made, range(3)):
            assert rank.read(peer, registrations[0].arrays[peer]) == b"\5"
        for rank in made:
            assert (list(bindings(rank)), live(rank)) == ([(0, 0)], 1)
            assert (3, 1) not in rank.registry.windows.bases()
            assert "failed on rank" in multicast(rank).refusal(1, 0)
            assert multicast(rank).refusal(0, 0) == ""
        created = made[0].driver.calls["multicast_create"]
        register(made, arrays(made))  # nothing more of that arena
        assert made[0].driver.calls["multicast_create"] == created
        assert list(bindings(made[0])) == [(0, 0)]


@off
@pytest.mark.parametrize("culprit", range(3))
def test_what_was_bound_stays_when_a_later_segment_cannot_be(culprit: int) -> None:
    """A graph may have captured its addresses."""
    with casting() as made:
        register(made, arrays(made))
        base = multicast(made[0])._windows[1].base
        made[culprit].driver.fail["multicast_bind"] = [UNKNOWN]
        register(made, arrays(made))
        assert [arena for arena, _ in one_status(made).fallen] == [1]
        p2p_works(made)
        for rank in made:
            assert sorted(bindings(rank)) == [(0, 0), (1, 0)]
            assert multicast(rank).refusal(1, 0) == ""
        assert made[0].registry.address(3, 1, 0) == base
        # The next communicator, or arena, is not concerned.
        assert made[0].driver.calls["multicast_create"] == 2


@off
@pytest.mark.parametrize("culprit", range(3))
def test_of_several_segments_all_are_bound_or_none(culprit: int) -> None:
    with casting() as made:
        kept = [rank.array(GRANULE) for rank in made for _ in range(3)]
        made[culprit].driver.fail["multicast_bind"] = work.second(UNKNOWN)
        fine(made, lambda rank: rank.registry.register(rank.pool))
        assert [arena for arena, _ in one_status(made).fallen] == [1]
        for rank in made:
            assert list(bindings(rank)) == [(0, 0)]
            assert rank.driver.calls["multicast_bind"] == (3 if rank.rank == culprit else 4)
        del kept


@off
@pytest.mark.parametrize(("step", "culprit"), matrix(*FIRST_RANK, *OTHER_RANKS, *EVERY_RANK[1:]))
def test_an_arena_that_cannot_get_one_more_object_keeps_the_first(step: str, culprit: int) -> None:
    with casting(before=work.small(HEAP), memory=16 * HEAP) as made:
        for rank in made:
            del rank.driver.memory_info
        register(made, arrays(made, HEAP))
        free = [rank.driver.memory_info(0).free - HEAP for rank in made]
        kept = arrays(made, HEAP)
        real = [multicast(rank)._extend for rank in made]

        def extend(rank: Rank, *arguments: Any) -> None:
            if rank.rank == culprit:
                rank.driver.fail[step] = [UNKNOWN]
            rank.channel.all_gather(b"")
            real[rank.rank](*arguments)

        for rank in made:
            multicast(rank)._extend = (  # type: ignore[method-assign]
                lambda *arguments, rank=rank: extend(rank, *arguments)
            )
        registrations = register(made, kept)
        assert f"{step}(injected)" in dict(one_status(made).fallen)[1]
        for rank in made:
            window = multicast(rank)._windows[1]
            assert (list(window._objects), window._mapped, window.pieces) == ([0], {0}, {0})
            assert list(bindings(rank)) == [(0, 0), (1, 0)]
            assert live(rank) == 2
            assert rank.registry.address(3, 1, 0) == window.base
        for registration in registrations:
            registration.deregister()
        del kept, registrations, registration
        gc.collect()
        fine(made, lambda rank: rank.registry.collect())
        for rank in made:
            rank.pool.free_all_blocks()
            assert rank.driver.memory_info(0).free == free[rank.rank] + HEAP


@off
@pytest.mark.parametrize("culprit", range(3))
def test_an_object_that_was_not_let_go_of_is_before_the_next_attempt(
    culprit: int, caplog: Any
) -> None:
    """Else its slot would be lost until the process ends."""
    with casting(before=work.small(HEAP), memory=16 * HEAP) as made:
        for rank in made:
            del rank.driver.memory_info
        register(made, arrays(made, HEAP))
        kept = arrays(made, HEAP)
        real = multicast(made[culprit])._extend

        first = iter([True])

        def extend(*arguments: Any) -> None:
            if next(first, False):
                made[culprit].driver.fail["release"] = [UNKNOWN]
                made[culprit].driver.fail["multicast_bind"] = [work.NOT_READY]
            real(*arguments)

        multicast(made[culprit])._extend = extend  # type: ignore[method-assign,assignment]
        register(made, kept)
        assert one_status(made) == work.ON
        for rank in made:
            assert list(bindings(rank)) == [(0, 0), (1, 0), (1, HEAP)]
            assert live(rank) == 3
        caplog.clear()  # records keep frames


@off
@pytest.mark.parametrize("culprit", range(3))
def test_a_segment_that_its_pool_just_gave_back_is_left_out_on_all_ranks(culprit: int) -> None:
    with casting() as made:
        kept = arrays(made)
        gone = multicast(made[culprit])
        gone.segment_at = lambda arena, offset: None  # type: ignore[method-assign]
        register(made, kept)
        assert one_status(made) == work.ON
        assert [list(bindings(rank)) for rank in made] == [[(0, 0)]] * 3
        assert [array.data.mem.segment.pins for array in kept] == [1] * 3
        del gone.segment_at
        fine(made, lambda rank: rank.registry.collect())
        assert [list(bindings(rank)) for rank in made] == [[(0, 0), (1, 0)]] * 3


@off
def test_an_interrupt_goes_on_as_itself_and_the_ranks_stay_in_step() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with casting() as made:
        made[1].driver.multicast_bind = interrupt
        kept = arrays(made)
        outcomes = each(made, lambda rank: rank.registry.register(kept[rank.rank]))
        assert isinstance(outcomes[1], KeyboardInterrupt)
        assert all(outcomes[rank].active for rank in (0, 2))
        del made[1].driver.multicast_bind, outcomes
        assert {arena for status in statuses(made) for arena, _ in status.fallen} == {1}
        p2p_works(made)
        assert {tuple(bindings(rank)) for rank in made} == {((0, 0),)}


@off
def test_a_rank_that_leaves_in_the_middle_is_missed_at_once() -> None:
    with casting() as made:
        kept = arrays(made)

        def leave(*_: Any) -> None:
            made[2].channel.close()
            raise DriverError("test", "CUDA_ERROR_UNKNOWN", 999)

        made[2].driver.multicast_add_device = leave
        start = time.monotonic()
        outcomes = each(made, lambda rank: rank.registry.register(kept[rank.rank]))
        assert time.monotonic() - start < 5
        assert [type(error) for error in outcomes[:2]] == [PeerTimeoutError] * 2
        assert [error.ranks for error in outcomes[:2]] == [(2,)] * 2
        assert isinstance(outcomes[2], Exception)
        del made[2].driver.multicast_add_device, outcomes


# Slots


@off
@pytest.mark.parametrize("culprit", range(3))
def test_without_a_slot_on_any_rank_all_go_without(culprit: int) -> None:
    with work.workers.ranks(3) as made:
        taken = [work.host(made[culprit]).multicast_create(1, GRANULE) for _ in range(SLOTS)]
        fine(made, lambda rank: work.begin(rank, require=False))
        reason = one_status(made).reason
        assert f"failed on rank {culprit}" in reason
        assert "all 128 multicast slots are in use" in reason
        p2p_works(made)
        for handle in taken:
            work.host(made[culprit]).release(handle)


@off
def test_a_communicator_that_closes_leaves_its_slot_to_the_next_one() -> None:
    driver = HostDriver(devices=3, granularity=GRANULE)
    taken = [driver.multicast_create(1, GRANULE) for _ in range(SLOTS - 1)]

    def states() -> tuple[set[str], list[Communicator]]:
        comms = Communicator.in_process(3, devices=[0, 1, 2], driver=driver)
        return {comm.multicast.state for comm in comms}, comms

    first, comms = states()
    second, others = states()
    for comm in comms:
        comm.close()
    third, more = states()
    assert (first, second, third) == ({"on"}, {"unavailable"}, {"on"})
    for comm in (*others, *more):
        comm.close()
    assert len(driver._multicast.live()) == len(taken)
    driver.close()


@off
def test_arenas_beyond_the_slots_fall_alone_and_a_freed_slot_is_used() -> None:
    with casting() as made:
        taken = [work.host(made[0]).multicast_create(1, GRANULE) for _ in range(SLOTS - 1)]
        register(made, arrays(made))
        status = one_status(made)
        assert status.state == "on"
        assert "all 128 multicast slots are in use" in dict(status.fallen)[1]
        for handle in taken:
            work.host(made[0]).release(handle)
        for rank in made:
            rank.pool = type(rank.pool)(driver=rank.driver, segment_size=GRANULE)
        register(made, arrays(made))
        assert [arena for arena, _ in one_status(made).fallen] == [1]
        assert list(bindings(made[2])) == [(0, 0), (2, 0)]
