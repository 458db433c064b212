"""Set-up of multicast when a step fails, on any rank: all go on together, nothing is left over.

Each step with each rank that takes it. Later steps: ``test_multicast_fallback.py``, and
``test_multicast_endings.py``.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import multicast_workers as work
import pytest
from multicast_workers import (
    EVERY_RANK,
    FIRST_RANK,
    NOT_READY,
    ON,
    OTHER_RANKS,
    PROBE,
    UNKNOWN,
    Rank,
    casting,
    each,
    fine,
    live,
    matrix,
    multicast,
    off,
    one_status,
    p2p_works,
    statuses,
)

from cupy_zc import (
    MulticastUnavailableError,
    config,
)
from cupy_zc.config import multicast_refusal
from cupy_zc.registration import HostProbe, Target
from cupy_zc.registration import multicast as module
from cupy_zc.registration import multicast_team as team

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left_open")]


@pytest.mark.skipif(multicast_refusal() is None, reason="multicast is not switched off here")
def test_the_rest_of_this_file() -> None:
    work.run_elsewhere(__file__)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fabric is given 0.3 seconds."""
    short = dataclasses.replace(config.settings(), setup_timeout=0.3)
    monkeypatch.setattr(team, "settings", lambda: short)


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


def test_the_log_says_once_on_each_rank_what_goes_without(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "cupy_zc"), work.workers.ranks(3) as made:
        for rank in made:
            module.Multicast._fall(multicast(rank), 4, "words of the driver")
        text = "arena 4 goes on without multicast: words of the driver"
        assert caplog.text.count(text) == 3
