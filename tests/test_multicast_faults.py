"""Multicast windows when a step fails, on any rank: all go on together, and nothing is left over.

Each step of the set-up, of a later bind, of a release and of the tear-down, on each rank.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import time
from typing import Any

import multicast_workers as work
import pytest
from multicast_workers import (
    GRANULE,
    ON,
    Rank,
    arrays,
    bindings,
    casting,
    each,
    fine,
    live,
    multicast,
    off,
    one_status,
    record,
    register,
    statuses,
)

from cupy_zc import (
    AgreementError,
    Communicator,
    DriverError,
    MulticastUnavailableError,
    PeerTimeoutError,
    config,
)
from cupy_zc.config import multicast_refusal
from cupy_zc.driver.host import HostDriver
from cupy_zc.driver.host_multicast import SLOTS
from cupy_zc.memory.pool import reap
from cupy_zc.registration import HostProbe, Target
from cupy_zc.registration import multicast as module
from cupy_zc.registration import multicast_team as team

UNKNOWN = ("CUDA_ERROR_UNKNOWN", 999)
NOT_READY = ("CUDA_ERROR_SYSTEM_NOT_READY", 802)

#: Each driver call of the set-up and who makes it. ``write`` and ``read`` are those of the probe.
FIRST_RANK = ("multicast_create", "multicast_export")
OTHER_RANKS = ("multicast_import",)
EVERY_RANK = ("reserve", "multicast_add_device", "multicast_bind", "map", "set_access")
PROBE = ("write", "read")


def matrix(*steps: str) -> list[tuple[str, int]]:
    """Each step with each rank of three that takes it."""
    of = dict.fromkeys(FIRST_RANK, (0,)) | dict.fromkeys(OTHER_RANKS, (1, 2))
    return [(step, rank) for step in steps for rank in of.get(step, (0, 1, 2))]


@pytest.mark.skipif(multicast_refusal() is None, reason="multicast is not switched off here")
def test_the_rest_of_this_file() -> None:
    work.run_elsewhere(__file__)


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Any:
    with work.group_workers.flat_descriptors():
        yield
        gc.collect()
        reap()


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fabric is given 0.3 seconds."""
    short = dataclasses.replace(config.settings(), setup_timeout=0.3)
    monkeypatch.setattr(team, "settings", lambda: short)


def p2p_works(made: list[Rank]) -> None:
    """Arrays are registered, and every rank reads the bytes of every rank."""
    registrations = register(made, [rank.array(GRANULE, 7 + rank.rank) for rank in made])
    for rank, peer in itertools.product(made, range(len(made))):
        assert rank.read(peer, registrations[0].arrays[peer]) == bytes([7 + peer])


# Set-up


@off
@pytest.mark.parametrize(
    ("step", "culprit"), matrix(*FIRST_RANK, *OTHER_RANKS, *EVERY_RANK, *PROBE)
)
def test_a_step_of_the_set_up_that_fails_takes_all_ranks_to_p2p(step: str, culprit: int) -> None:
    descriptors: list[int] = []

    def before_start(rank: Rank) -> None:
        real = multicast(rank)._try  # after the heap has all it needs

        def attempt(probe: Any, spot: int) -> None:
            rank.channel.all_gather(b"")
            if rank.rank == culprit:
                descriptors.append(work.group_workers.open_descriptors())
                rank.driver.fail[step] = [UNKNOWN]
            rank.channel.all_gather(b"")
            real(probe, spot)

        multicast(rank)._try = attempt  # type: ignore[method-assign]

    with casting(before=before_start) as made:
        status = one_status(made)
        assert status.state == "unavailable"
        assert f"failed on rank {culprit}: DriverError: {step}(injected) returned" in status.reason
        assert "CUDA_ERROR_UNKNOWN (999)" in status.reason
        assert not made[culprit].driver.fail[step]
        assert work.group_workers.open_descriptors() == descriptors[0]
        for rank in made:
            assert live(rank) == 0
            assert multicast(rank)._windows == {}
            assert all(row < 3 for row, _ in rank.registry.windows.bases())
            assert multicast(rank).refusal(0, 0).startswith("multicast is unavailable: ")
        p2p_works(made)
        tries = [rank.driver.calls["multicast_create"] for rank in made]
        assert tries == [step != "reserve", 0, 0]


@off
@pytest.mark.parametrize(("step", "culprit"), matrix("multicast_create", "multicast_bind"))
def test_where_it_is_required_the_driver_s_words_are_the_error(step: str, culprit: int) -> None:
    with work.workers.ranks(3) as made:
        made[culprit].driver.fail[step] = [UNKNOWN]
        errors = each(made, lambda rank: work.begin(rank, require=True))
        assert [type(error) for error in errors] == [MulticastUnavailableError] * 3
        assert len({str(error) for error in errors}) == 1
        text = str(errors[0])
        assert f"failed on rank {culprit}" in text
        assert "CUDA_ERROR_UNKNOWN (999)" in text
        assert "multicast='auto' goes without" in text
        assert [live(rank) for rank in made] == [0] * 3


@off
@pytest.mark.parametrize("culprit", range(3))
def test_what_cannot_be_undone_is_told_and_kept_with_the_words(culprit: int, caplog: Any) -> None:
    with work.workers.ranks(3) as made:
        made[1].driver.fail["multicast_bind"] = [UNKNOWN]
        made[culprit].driver.fail["free_range"] = [UNKNOWN]
        fine(made, lambda rank: work.begin(rank, require=False))
        assert {status.state for status in statuses(made)} == {"unavailable"}
        for rank in made:
            told = "free_range(injected)" in multicast(rank).status.reason
            assert told == (rank.rank == culprit)
        assert "undoing 'reserve a multicast window' failed" in caplog.text
        caplog.clear()  # records keep frames
        p2p_works(made)
    work.shut(made[culprit])


@off
@pytest.mark.parametrize("culprit", range(3))
def test_a_probe_that_sees_wrong_data_is_a_failure(culprit: int) -> None:
    """Machines exist on which objects can be made and data is lost."""

    class Deaf(HostProbe):
        def reduce(self, target: Target) -> int:
            return super().reduce(target) - 1009  # as if the store of a rank had not come

    with work.workers.ranks(3) as made:
        fine(
            made,
            lambda rank: work.begin(
                rank,
                require=False,
                probe=(Deaf if rank.rank == culprit else HostProbe)(rank.registry),
            ),
        )
        status = one_status(made)
        assert status.state == "unavailable"
        assert f"reduce by multicast failed on rank {culprit}" in status.reason
        assert "rank 0 stored 1009 to all 3 ranks by multicast" in status.reason
        assert "reduces 2018 over all, not 3027" in status.reason
        assert [live(rank) for rank in made] == [0] * 3


@off
@pytest.mark.parametrize("culprit", range(3))
def test_the_probe_notices_a_binding_that_is_not_there(culprit: int) -> None:
    def before(rank: Rank) -> None:
        if rank.rank == culprit:
            rank.driver.multicast_bindings = lambda handle: ()

    with casting(before=before) as made:
        status = one_status(made)
        assert status.state == "unavailable"
        assert f"store by multicast failed on rank {culprit}" in status.reason
        assert "is [], not the segment of the arena" in status.reason


# A fabric that is not ready


@off
@pytest.mark.parametrize(
    ("step", "culprit"), matrix("multicast_create", "multicast_add_device", "multicast_bind", "map")
)
def test_a_fabric_that_gets_ready_is_waited_for_by_all_ranks(step: str, culprit: int) -> None:
    with work.workers.ranks(3) as made:

        def begin(rank: Rank) -> None:
            real = multicast(rank)._try

            def attempt(probe: Any, spot: int) -> None:
                if rank.rank == culprit:
                    rank.driver.fail[step] = [NOT_READY] * 2
                real(probe, spot)

            multicast(rank)._try = attempt  # type: ignore[method-assign]
            work.begin(rank, require=True)

        fine(made, begin)
        assert one_status(made) == ON
        assert made[0].driver.calls["multicast_create"] == 3
        assert [rank.driver.calls["multicast_import"] for rank in made[1:]] in ([3, 3], [1, 1])
        assert [live(rank) for rank in made] == [1] * 3


@off
@pytest.mark.usefixtures("_impatient")
def test_a_fabric_that_never_gets_ready_is_given_up_by_all_ranks(caplog: Any) -> None:
    with work.workers.ranks(3) as made:
        made[2].driver.fail["multicast_bind"] = [NOT_READY] * 100
        start = time.monotonic()
        fine(made, lambda rank: work.begin(rank, require=False))
        assert 0.15 <= time.monotonic() - start < 5
        assert "CUDA_ERROR_SYSTEM_NOT_READY (802)" in one_status(made).reason
        assert made[0].driver.calls["multicast_create"] == 3  # after 0, 0.05 and 0.15 s
        assert "it is tried again for 0.3 s" in caplog.text
        p2p_works(made)


@off
def test_another_failure_after_a_fabric_that_was_not_ready_is_final() -> None:
    with work.workers.ranks(3) as made:
        made[1].driver.fail["multicast_bind"] = [NOT_READY, UNKNOWN, UNKNOWN]
        fine(made, lambda rank: work.begin(rank, require=False))
        assert "CUDA_ERROR_UNKNOWN (999)" in one_status(made).reason
        assert made[0].driver.calls["multicast_create"] == 2


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


# Releases


@off
@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize("step", ["synchronize", "multicast_unbind"])
def test_an_unbinding_that_fails_is_told_and_carried_out_later(step: str, culprit: int) -> None:
    with casting() as made:
        kept = arrays(made, GRANULE, 9)
        for registration in register(made, kept):
            registration.deregister()
        made[culprit].driver.fail[step] = [UNKNOWN]
        log = record(made, "unmap")
        errors = each(made, lambda rank: rank.registry.collect())
        assert [type(error) for error in errors] == [AgreementError] * 3
        assert len({str(error) for error in errors}) == 1
        assert f"unbind released segments failed on rank {culprit}" in str(errors[0])
        assert log == []  # nobody has unmapped what is bound somewhere
        assert sum((1, 0) in bindings(rank) for rank in made) == 1
        fine(made, lambda rank: rank.registry.collect())
        assert [list(bindings(rank)) for rank in made] == [[(0, 0)]] * 3
        registrations = register(made, kept)
        assert [list(bindings(rank)) for rank in made] == [[(0, 0), (1, 0)]] * 3
        assert made[0].read(1, registrations[0].arrays[1]) == b"\t"


@off
@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize("step", ["unmap", "release", "free_range"])  # nothing is bound by then
def test_the_window_of_an_arena_that_is_gone_is_closed_later_if_it_must(
    step: str, culprit: int
) -> None:
    with casting() as made:
        for registration in register(made, arrays(made)):
            registration.deregister()
        fine(made, lambda rank: rank.registry.collect())
        for rank in made:
            rank.pool = type(rank.pool)(driver=rank.driver, segment_size=GRANULE)
        kept = arrays(made)  # of another arena
        gc.collect()
        reap()
        window = multicast(made[culprit])._windows[1]
        made[culprit].driver.fail[step] = [UNKNOWN]
        errors = each(made, lambda rank: rank.registry.register(kept[rank.rank]))
        assert [type(error) for error in errors] == [AgreementError] * 3
        assert f"unbind released segments failed on rank {culprit}" in str(errors[0])
        register(made, kept)
        assert [list(bindings(rank)) for rank in made] == [[(0, 0), (2, 0)]] * 3
        assert [live(rank) for rank in made] == [2] * 3
        assert (window._objects, window._mapped, window._range) == ({}, set(), 0)


# The end


@off
@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize(
    "step", ["synchronize", "unmap", "multicast_unbind", "release", "free_range"]
)
def test_what_fails_at_the_end_is_raised_and_the_rest_is_done(step: str, culprit: int) -> None:
    with casting() as made:
        register(made, arrays(made))
        rank = made[culprit]
        rank.driver.fail[step] = [UNKNOWN]
        names = ("unmap", "multicast_unbind", "release", "free_range")
        before = {name: rank.driver.calls[name] for name in names}
        with pytest.raises(DriverError, match=rf"{step}\(injected\)") as info:
            rank.registry.close()
        trail: BaseException | None = info.value
        while trail is not None:  # whatever followed from it came after it
            last, trail = trail, trail.__context__
        assert f"{step}(injected)" in str(last)
        made_calls = {name: rank.driver.calls[name] - before[name] for name in names}
        windows = 2  # of multicast; those of peers are two for each of two peers
        assert made_calls["multicast_unbind"] == made_calls["release"] == windows
        assert made_calls["unmap"] == windows + 4
        assert multicast(rank)._windows == {}
        assert multicast(rank).status.state == "off"
        rank.registry.close()
    work.shut(made[culprit])


def test_the_log_says_once_on_each_rank_what_goes_without(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "cupy_zc"), work.workers.ranks(3) as made:
        for rank in made:
            module.Multicast._fall(multicast(rank), 4, "words of the driver")
        text = "arena 4 goes on without multicast: words of the driver"
        assert caplog.text.count(text) == 3
