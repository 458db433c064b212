"""The CUDA kernels, compiled for the host as they are, against NumPy: every collective there is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from emulated import FIBERS, MISMATCH, TIMEOUT, Emulation, build, build_directory
from emulated_cases import (
    DTYPES,
    FLOAT32,
    FLOAT64,
    MOVING,
    OPERATIONS,
    PAIRS,
    REDUCING,
    ROUNDS,
    SIZES,
    THOROUGH,
    WRAPS,
    check,
    launch_of,
    odd_launch,
)
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def emulation(request: pytest.FixtureRequest) -> Iterator[Emulation]:
    with Emulation(build(build_directory(request.config), FIBERS)) as running:
        yield running


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", REDUCING)
def test_every_type_and_operation_is_reduced_as_numpy_does(
    emulation: Emulation, case: str, size: int
) -> None:
    rng = np.random.default_rng(size)
    for _ in range(ROUNDS):
        for element, operation in PAIRS:
            launch = launch_of(rng, case, size, element, operation)
            check(launch, emulation.run(launch))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", MOVING)
def test_bytes_are_moved_as_they_are(emulation: Emulation, case: str, size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(6 * ROUNDS):
        for element in range(len(DTYPES)):
            launch = launch_of(rng, case, size, element)
            check(launch, emulation.run(launch))


@pytest.mark.parametrize("case", MOVING)
def test_negative_zero_nan_payloads_infinities_and_subnormals_survive_a_move(
    emulation: Emulation, case: str
) -> None:
    bits = [0x8000000000000000, 0x7FF8DEADBEEF0001, 0xFFF0000000000001, 0x7FF0000000000000, 1]
    rng = np.random.default_rng(5)
    launch = launch_of(rng, case, 3, FLOAT64, count=5)
    for rank in launch.ranks:
        rank.input[:] = np.array(bits, np.uint64).view(np.float64)
    check(launch, emulation.run(launch))


@pytest.mark.parametrize("case", REDUCING)
def test_no_value_of_the_data_is_taken_for_a_signal(emulation: Emulation, case: str) -> None:
    """All zeros, all ones, -0.0, and what the flags themselves look like."""
    for pattern in (0, -1, 0x80000000, 1 << 24, 0x1_0000_0001, 0x01DEF0 | 1 << 24):
        launch = launch_of(np.random.default_rng(3), case, 3, 7, 3, count=200, repeats=3)
        for rank in launch.ranks:
            rank.input[:] = pattern
        check(launch, emulation.run(launch))


@pytest.mark.parametrize("operation", ["min", "max"])
def test_nan_of_any_rank_is_the_minimum_and_the_maximum(
    emulation: Emulation, operation: str
) -> None:
    launch = launch_of(
        np.random.default_rng(1), "two_shot", 3, FLOAT32, OPERATIONS.index(operation), count=9
    )
    for number, rank in enumerate(launch.ranks):
        rank.in_place = ""
        rank.input[0, 0, number * 3] = np.nan
    for outcome in emulation.run(launch):
        assert np.isnan(outcome.output[0, 0]).tolist() == [True, False, False] * 3


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("case", REDUCING + MOVING)
def test_ranks_that_overtake_each_other_do_not_overwrite_what_is_unread(
    emulation: Emulation, case: str, size: int
) -> None:
    rng = np.random.default_rng(size)
    for count in (0, 1, 40, 300):
        for _ in range(ROUNDS):
            launch = launch_of(rng, case, size, FLOAT32, count=count, repeats=6)
            check(launch, emulation.run(launch))


@pytest.mark.parametrize("epoch", [0, (1 << 24) - 3, (1 << 32) - 3, (1 << 40) - 3, (1 << 46)])
def test_calls_of_every_kind_share_a_lane_across_wraps_of_the_epoch(
    emulation: Emulation, epoch: int
) -> None:
    rng = np.random.default_rng(9)
    fresh = True
    for case in (*REDUCING, *MOVING, *reversed(REDUCING)):
        launch = launch_of(rng, case, 3, FLOAT32, count=int(rng.integers(100)), repeats=3)
        launch.lines, launch.packs, launch.chunk = 64, 64, 768
        launch.fresh, launch.epoch = fresh, epoch
        check(launch, emulation.run(launch))
        fresh = False


@pytest.mark.parametrize("epoch", WRAPS)
def test_fresh_memory_is_not_taken_for_a_packet_where_flags_wrap(
    emulation: Emulation, epoch: int
) -> None:
    """It ends flags of 0: a call of number 2^32 reduced the zeros of a lane without such a call."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        for case in ("two_shot", "ll"):
            launch = launch_of(rng, case, 3, FLOAT32, count=200, repeats=2)
            launch.packs, launch.lines, launch.chunk = 64, 0, 768
            launch.fresh, launch.epoch = case == "two_shot", epoch
            check(launch, emulation.run(launch))


@pytest.mark.parametrize("epoch", [(1 << 39) + 7, (1 << 40) - 3])
def test_a_pad_of_long_ago_is_not_taken_for_a_meeting(emulation: Emulation, epoch: int) -> None:
    """Ends waits that compared growing values as signed numbers: half a wrap later they passed."""
    rng = np.random.default_rng(10)
    for size in (2, 3):
        for _ in range(20):
            launch = launch_of(rng, "two_shot", size, FLOAT32, count=77, repeats=1)
            launch.blocks, launch.chunk, launch.epoch = 1, 128 * size, epoch
            for rank in launch.ranks:
                rank.in_place, rank.row = "", 0
                rank.registered_input = rank.registered_output = False
            check(launch, emulation.run(launch))


@settings(max_examples=1000 if THOROUGH else 150, deadline=None)
@given(st.data())
def test_any_launch_at_all(emulation: Emulation, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    case = data.draw(st.sampled_from(REDUCING + MOVING))
    element, operation = data.draw(st.sampled_from(PAIRS)) if case in REDUCING else (3, 0)
    size, count = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 600))
    launch = launch_of(rng, case, size, element, operation, count=count, repeats=2)
    check(launch, emulation.run(launch))


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("case", [*REDUCING, *MOVING, "barrier"])
def test_a_rank_that_calls_something_else_is_told_to_all_and_nothing_is_written(
    emulation: Emulation, case: str, size: int
) -> None:
    for odd in range(size):
        launch = odd_launch(case, size, odd)
        for number, outcome in enumerate(emulation.run(launch)):
            assert outcome.code == MISMATCH  # long before the budget, or it were a time-out
            assert (outcome.rank == odd) == (number != odd)
            assert outcome.detail == launch.ranks[0 if number != 0 else 1].fingerprint or size > 2
            assert outcome.mine == launch.ranks[number].fingerprint
            assert (outcome.lane, outcome.epoch) == (7, 1)
            assert outcome.untouched


@pytest.mark.parametrize("odd", ["ll", "two_shot", "all_gather", "barrier"])
def test_ranks_that_chose_different_algorithms_are_told(emulation: Emulation, odd: str) -> None:
    launch = odd_launch("ll128", 3, 1)
    launch.ranks[1].kernel = odd
    outcomes = emulation.run(launch)
    assert [outcome.code for outcome in outcomes] == [MISMATCH] * 3
    assert all(outcome.untouched for outcome in outcomes)


def test_ranks_that_pass_different_counts_are_told(emulation: Emulation) -> None:
    for case in REDUCING + MOVING:
        launch = odd_launch(case, 3, 2)
        launch.ranks[2].input = launch.ranks[2].input[:, :, :60].copy()
        outcomes = emulation.run(launch)
        assert [outcome.code for outcome in outcomes] == [MISMATCH] * 3, case
        assert all(outcome.untouched for outcome in outcomes), case


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("case", [*REDUCING, *MOVING, "barrier"])
def test_a_rank_that_never_comes_is_named_when_the_budget_is_spent(
    emulation: Emulation, case: str, size: int
) -> None:
    launch = launch_of(np.random.default_rng(4), case, size, FLOAT32, count=100)
    launch.budget, missing = 5_000_000, size - 1
    for rank in launch.ranks:
        rank.in_place, rank.row = "", 0
    launch.ranks[missing].absent = True
    outcomes = emulation.run(launch)
    assert outcomes.pop(missing).code == 0
    for outcome in outcomes:
        assert (outcome.code, outcome.rank) == (TIMEOUT, missing)
        assert 5_000_000 <= outcome.detail < 6_000_000
        assert outcome.untouched


def test_a_lane_that_failed_returns_at_once_ever_after(emulation: Emulation) -> None:
    launch = launch_of(np.random.default_rng(4), "ll128", 3, FLOAT32, count=100, repeats=4)
    launch.budget = 2_000_000
    for rank in launch.ranks:
        rank.in_place = ""
    launch.ranks[1].absent = True
    first = emulation.run(launch)
    assert [outcome.code for outcome in first] == [TIMEOUT, 0, TIMEOUT]
    assert {outcome.epoch for outcome in first if outcome.code} == {
        1
    }  # the first call, not the last
    launch.fresh, launch.budget = False, 10**18  # a wait would last for ever
    again = emulation.run(launch)
    assert [outcome.code for outcome in again] == [0] * 3  # the record was written once
    assert all(outcome.untouched for outcome in again)
