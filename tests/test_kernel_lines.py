"""The collectives in lines of 128 bytes (LL128), compiled for the host, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from emulated import FIBERS, MISMATCH, TIMEOUT, Emulation, build, build_directory
from emulated_cases import DTYPES, FLOAT32, PAIRS, ROUNDS, check
from emulated_lines import (
    LINES,
    LINES_OF_SIZES,
    LINES_REDUCING,
    OTHERS,
    PAIRED,
    check_mixed,
    in_a_line,
    line_launch,
    mixed_launch,
    odd_line_launch,
    plain,
    size_of,
)

pytestmark = pytest.mark.slow

#: int8, float16, float32, float64, complex128: one of each size.
ELEMENTS = (1, 9, 11, 12, 14)
FEW_SIZES = [(kernel, size) for kernel, size in LINES_OF_SIZES if size in (2, 3, 8)]


@pytest.fixture(scope="module")
def emulation(request: pytest.FixtureRequest) -> Iterator[Emulation]:
    with Emulation(build(build_directory(request.config), FIBERS)) as running:
        yield running


@pytest.mark.parametrize(("kernel", "size"), LINES_OF_SIZES)
def test_counts_around_the_ends_of_lines_arrive_at_any_alignment(
    emulation: Emulation, kernel: str, size: int
) -> None:
    rng = np.random.default_rng(size)
    for _ in range(ROUNDS):
        for element in ELEMENTS:
            line = in_a_line(kernel, DTYPES[element].itemsize)
            many = int(rng.integers(2, 30)) * line
            for count in (0, 1, line - 1, line, line + 1, many - 1, many, many + 1):
                launch = line_launch(rng, kernel, size, element, count=count)
                check(launch, emulation.run(launch))


@pytest.mark.parametrize("kernel", LINES_REDUCING)
def test_every_type_and_operation_is_reduced_as_numpy_does(
    emulation: Emulation, kernel: str
) -> None:
    rng = np.random.default_rng(3)
    for element, operation in PAIRS:
        size, count = size_of(kernel), int(rng.integers(1, 90))
        launch = line_launch(rng, kernel, size, element, operation, count=count)
        check(launch, emulation.run(launch))


@pytest.mark.parametrize("kernel", LINES)
def test_no_value_of_the_data_is_taken_for_a_flag(emulation: Emulation, kernel: str) -> None:
    """All zeros, all ones, and what the flags of the first calls themselves look like."""
    for pattern in (0, -1, *(0xBCDEF0 | epoch << 24 for epoch in (1, 2, 3))):
        launch = line_launch(
            np.random.default_rng(3), kernel, size_of(kernel), 7, 3 * (kernel in LINES_REDUCING),
            count=70, repeats=3,
        )  # fmt: skip
        for rank in launch.ranks:
            rank.input[:] = pattern
        check(launch, emulation.run(launch))


@pytest.mark.parametrize(("kernel", "size"), FEW_SIZES)
def test_ranks_that_overtake_each_other_do_not_overwrite_what_is_unread(
    emulation: Emulation, kernel: str, size: int
) -> None:
    rng = np.random.default_rng(size)
    for count in (0, 1, 40, 300):
        for _ in range(ROUNDS):
            launch = line_launch(rng, kernel, size, FLOAT32, count=count, repeats=6)
            check(launch, emulation.run(launch))


@pytest.mark.parametrize("kernel", PAIRED)
def test_any_number_of_lines_goes_through_a_ring(emulation: Emulation, kernel: str) -> None:
    """Some of them go far ahead of the others, as their ranks and blocks do."""
    rng = np.random.default_rng(8)
    for turn in range(ROUNDS):
        for element in ELEMENTS:
            many = int(rng.integers(100, 400)) * in_a_line(kernel, DTYPES[element].itemsize)
            for count in (many, many + 1):
                launch = line_launch(rng, kernel, 2, element, count=count, repeats=3)
                launch.blocks, launch.threads = 1 + turn % 2, 32
                launch.lines = 4 * launch.blocks * 4
                check(launch, emulation.run(launch))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_calls_of_every_kind_and_root_follow_each_other_on_a_lane(
    emulation: Emulation, size: int
) -> None:
    rng = np.random.default_rng(size)
    for count in (0, 1, 31, 200):
        for _ in range(2 * ROUNDS):
            launch = mixed_launch(rng, size, LINES, count=count, repeats=20)
            check_mixed(launch, emulation.run(launch))
            launch = mixed_launch(rng, size, LINES + OTHERS, count=count, repeats=20)
            check_mixed(launch, emulation.run(launch))


@pytest.mark.parametrize("epoch", [(1 << 24) - 3, (1 << 32) - 3, (1 << 40) - 3, (1 << 46)])
def test_calls_of_every_kind_cross_the_wraps_of_the_epoch(emulation: Emulation, epoch: int) -> None:
    launch = mixed_launch(np.random.default_rng(1), 3, LINES + OTHERS, count=50, repeats=12)
    launch.epoch = epoch
    check_mixed(launch, emulation.run(launch))


@pytest.mark.parametrize(("kernel", "size"), FEW_SIZES)
def test_a_rank_that_calls_something_else_is_told_to_all_and_nothing_is_written(
    emulation: Emulation, kernel: str, size: int
) -> None:
    for odd in {0, 1, size - 1}:
        outcomes = emulation.run(odd_line_launch(kernel, size, odd))
        for number, outcome in enumerate(outcomes):
            assert outcome.code == MISMATCH  # long before the budget, or it were a time-out
            assert (outcome.rank == odd) == (number != odd)
            assert outcome.epoch == 1
            assert outcome.untouched


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kernel", ["broadcast", "scatter", "gather", "reduce"])
def test_ranks_that_name_different_roots_are_told_and_nothing_is_written(
    emulation: Emulation, kernel: str, size: int
) -> None:
    launch = odd_line_launch(f"ll128_{kernel}", size, 1)
    for number, rank in enumerate(launch.ranks):
        rank.calls = [(launch.kernel, int(number == 1))]
    outcomes = emulation.run(launch)
    assert [outcome.code for outcome in outcomes] == [MISMATCH] * size
    assert all(outcome.untouched for outcome in outcomes)


@pytest.mark.parametrize("kernel", LINES)
def test_ranks_that_pass_different_counts_are_told_and_nothing_is_written(
    emulation: Emulation, kernel: str
) -> None:
    for few in (0, 60):
        size = size_of(kernel)
        launch = odd_line_launch(kernel, size, size - 1)
        launch.ranks[-1].input = launch.ranks[-1].input[:, :, :few].copy()
        outcomes = emulation.run(launch)
        assert [outcome.code for outcome in outcomes] == [MISMATCH] * size
        assert all(outcome.untouched for outcome in outcomes)


@pytest.mark.parametrize("other", ["ll128_all_gather", "ll128_gather", "all_gather", "ll128"])
def test_ranks_that_chose_different_kernels_are_told(emulation: Emulation, other: str) -> None:
    launch = odd_line_launch("ll128_broadcast", 3, 1)
    launch.output_rows = 3
    launch.root = 0
    launch.ranks[1].kernel = other
    outcomes = emulation.run(launch)
    assert [outcome.code for outcome in outcomes] == [MISMATCH] * 3
    assert all(outcome.untouched for outcome in outcomes)


@pytest.mark.parametrize(("kernel", "size"), FEW_SIZES)
def test_a_rank_that_never_comes_is_named_by_all_when_the_budget_is_spent(
    emulation: Emulation, kernel: str, size: int
) -> None:
    for missing in {size - 1, 0 if size < 8 else 7}:
        launch = plain(line_launch(np.random.default_rng(4), kernel, size, FLOAT32, count=100))
        launch.budget = 5_000_000
        launch.ranks[missing].absent = True
        outcomes = emulation.run(launch)
        assert outcomes.pop(missing).code == 0
        for outcome in outcomes:
            assert (outcome.code, outcome.rank) == (TIMEOUT, missing)
            assert 5_000_000 <= outcome.detail < 6_000_000
            assert outcome.untouched
