"""The reductions by stores alone, on the emulation: rings that wrap, fallbacks, mixed calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from emulated import FIBERS, MISMATCH, SMALL, TIMEOUT, Emulation, build, build_directory, mutant
from emulated_cases import DTYPES, ROUNDS, same
from emulated_push import CASES, DEPTH, PAIRS, SIZES, TWIN, possible, push_launch, verify

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest) -> Path:
    return build_directory(request.config)


@pytest.fixture(scope="module")
def emulation(cache: Path) -> Iterator[Emulation]:
    with Emulation(build(cache, FIBERS)) as running:
        yield running


def counts(case: str, size: int, itemsize: int, lines: int, pairs: int) -> list[int]:
    """Around the ends of lines, slots and rings."""
    slot = lines * 128 // itemsize * pairs * (size if case in CASES[:2] else 1)
    return [
        0,
        1,
        size,
        *(
            max(0, slots * slot + more)
            for slots in (1, DEPTH, DEPTH + 1, 3 * DEPTH)
            for more in (-1, 0, 1)
        ),
    ]


@pytest.mark.parametrize(
    ("case", "size"), [(c, size) for c in CASES for size in SIZES if possible(c, size)]
)
def test_rings_wrap_at_every_boundary_in_place_and_not(
    emulation: Emulation, case: str, size: int
) -> None:
    rng = np.random.default_rng(size)
    for _ in range(ROUNDS):
        for number, pair in enumerate(PAIRS):
            lines, blocks = 1 + number % 2, 2 + 2 * (number % 3 == 2)
            for in_place in (False, True):
                for count in counts(case, size, DTYPES[pair[0]].itemsize, lines, blocks // 2):
                    launch = push_launch(
                        rng, case, size, pair, count=count, in_place=in_place, lines=lines,
                        blocks=blocks, threads=32 * int(rng.integers(1, 4)),
                    )  # fmt: skip
                    verify(launch, emulation.run(launch))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pair", PAIRS)
def test_arrays_may_start_anywhere(emulation: Emulation, case: str, pair: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    for size in (2, 3):
        for in_place in (False, True):
            launch = push_launch(
                rng, case, size, pair, count=333, in_place=in_place, skewed=True, repeats=2
            )
            verify(launch, emulation.run(launch))


@pytest.mark.parametrize("case", CASES)
def test_pieces_of_large_arrays_are_larger_than_what_is_hidden_behind_one(
    emulation: Emulation, case: str
) -> None:
    """Slots with room to spare: the pieces follow from the array, not from the scratch."""
    rng = np.random.default_rng(1)
    for count in (50_001, 400_000):
        launch = push_launch(rng, case, 2, count=count, lines=512, threads=64)
        verify(launch, emulation.run(launch))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES[:2])
def test_one_staged_output_sends_all_ranks_through_scratch(
    emulation: Emulation, case: str, size: int
) -> None:
    rng = np.random.default_rng(size)
    for in_place in (False, True):
        for count in (0, 1, 100, 1000):
            launch = push_launch(
                rng, case, size, count=count, in_place=in_place, repeats=4, lines=2
            )
            for rank in launch.ranks:
                rank.registered_output = bool(rng.integers(2))
                rank.registered_input = rank.registered_output if in_place else False
            launch.ranks[launch.root % size].registered_output = False
            launch.ranks[launch.root % size].registered_input = False
            verify(launch, emulation.run(launch))


@pytest.mark.parametrize("case", CASES)
def test_one_rank_one_block_an_odd_grid_and_little_scratch_are_no_obstacle(
    emulation: Emulation, case: str
) -> None:
    rng = np.random.default_rng(7)
    for size, blocks, chunk in ((1, 2, 0), (2, 1, 0), (3, 3, 0), (3, 5, 0), (8, 4, 128)):
        launch = push_launch(rng, case, size, count=777, blocks=blocks, repeats=2)
        launch.chunk = chunk * launch.input_rows or launch.chunk
        verify(launch, emulation.run(launch))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_the_shots(
    emulation: Emulation, case: str, pair: tuple[int, int]
) -> None:
    launch = push_launch(np.random.default_rng(8), case, 3, pair, count=500)
    twin = replace(launch, kernel=TWIN[launch.kernel])
    for pushed, shot in zip(emulation.run(launch), emulation.run(twin), strict=True):
        assert same(pushed.output, shot.output)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(
    ("case", "other"),
    [
        *((case, "") for case in CASES),
        *((case, "two_shot") for case in (*CASES[:2], CASES[3])),
        (CASES[0], "ll128"),
        (CASES[2], "reduce_scatter"),
    ],
)
def test_ranks_that_overtake_each_other_share_scratch_with_other_algorithms(
    emulation: Emulation, case: str, size: int, other: str
) -> None:
    """Unregistered inputs: two-shot and reduce-scatter stage them where the rings are."""
    rng = np.random.default_rng(size)
    for count in (1, 90, 1000):
        launch = push_launch(rng, case, size, count=count, repeats=8, lines=2)
        launch.alternate, launch.lines = other, 2 * (count * 4 // 112 + 2)
        verify(launch, emulation.run(launch))


@pytest.mark.parametrize("epoch", [0, (1 << 24) - 3, (1 << 40) - 3, 1 << 46])
def test_flags_of_former_calls_are_told_apart_across_wraps_of_the_epoch(
    emulation: Emulation, epoch: int
) -> None:
    rng = np.random.default_rng(9)
    for fresh, case in ((True, "push_reduce_scatter"), (False, "push_reduce"), (False, CASES[1])):
        launch = push_launch(rng, case, 3, count=600, repeats=6, lines=3)
        launch.chunk, launch.fresh, launch.epoch = 1024, fresh, epoch
        verify(launch, emulation.run(launch))


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_calls_something_else_is_told_to_all_and_nothing_is_written(
    emulation: Emulation, case: str, size: int
) -> None:
    for odd in range(size):
        launch = push_launch(np.random.default_rng(2), case, size, count=1000)
        launch.budget = 20_000_000
        launch.ranks[odd].fingerprint += 1
        for number, outcome in enumerate(emulation.run(launch)):
            assert outcome.code == MISMATCH
            assert (outcome.rank == odd) == (number != odd)
            assert outcome.untouched


@pytest.mark.parametrize("odd", ["ll128", "two_shot", "push_reduce_scatter"])
def test_ranks_that_chose_different_algorithms_are_told(emulation: Emulation, odd: str) -> None:
    launch = push_launch(np.random.default_rng(2), "push_reduce", 3, count=100)
    launch.budget, launch.lines = 20_000_000, 64
    launch.ranks[1].kernel, launch.ranks[1].fingerprint = odd, 77
    outcomes = emulation.run(launch)
    assert [outcome.code for outcome in outcomes] == [MISMATCH] * 3
    assert all(outcome.untouched for outcome in outcomes)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_never_comes_is_named_when_the_budget_is_spent(
    emulation: Emulation, case: str, size: int
) -> None:
    launch = push_launch(np.random.default_rng(4), case, size, count=1000)
    launch.budget, missing = 5_000_000, size - 1
    launch.ranks[missing].absent = True
    outcomes = emulation.run(launch)
    assert outcomes.pop(missing).code == 0
    for outcome in outcomes:
        assert (outcome.code, outcome.rank) == (TIMEOUT, missing)
        assert 5_000_000 <= outcome.detail < 6_000_000
        assert outcome.untouched


@pytest.mark.parametrize("waits", ["await<OWN<HOW>>(piece + 1)", "await(piece - DEPTH + 1)"])
def test_a_rank_that_stops_halfway_is_waited_for_until_the_budget_is_spent(
    cache: Path, waits: str
) -> None:
    """A receiver or a sender of rank 1 returns in the middle: the others do, too, in time."""
    wait = f"flags.{waits}"
    stops = mutant("push_reduce.cu", wait, f"({wait} && !(args.rank == 1 && piece == 9))")
    launch = push_launch(np.random.default_rng(4), "push_reduce", 3, count=3 * 32 * 20)
    launch.budget = 5_000_000
    with Emulation(build(cache, SMALL, stops)) as running:
        outcomes = running.run(launch)
    assert {outcome.code for outcome in outcomes} == {TIMEOUT}
    assert all(outcome.detail >= 5_000_000 for outcome in outcomes)
    assert outcomes[0].rank in (1, 2)


def test_a_call_may_have_more_pieces_than_a_flag_can_count(cache: Path) -> None:
    """With flags that count to 15, as real ones take 2 GiB for a pair to wrap."""
    few = mutant("rings.cuh", "NUMBER_BITS = 24", "NUMBER_BITS = 4")
    with Emulation(build(cache, SMALL, few)) as running:
        for case, size in (("push_reduce", 2), ("push_reduce", 3), (CASES[3], 2)):
            launch = push_launch(
                np.random.default_rng(3), case, size, count=size * 32 * 100, repeats=3
            )
            verify(launch, running.run(launch))
