"""The kernels that reduce and store in the switch, on the emulation, by either policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from emulated import FIBERS, MISMATCH, SMALL, TIMEOUT, Emulation, build, build_directory, mutant
from emulated_cases import FLOAT64, ROUNDS, THOROUGH, WRAPS, same
from emulated_multimem import (
    CASES,
    MOVING,
    POLICIES,
    REDUCING,
    SIZES,
    SWITCH_PAIRS,
    multimem_launch,
    odd_multimem_launch,
    verify,
    wrapping_launches,
)
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # the first test compiles them all


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest) -> Path:
    return build_directory(request.config)


@pytest.fixture(scope="module")
def emulation(cache: Path) -> Iterator[Emulation]:
    with Emulation(build(cache, FIBERS)) as running:
        yield running


def test_the_table_has_the_types_and_operations_of_the_instructions() -> None:
    """bool: any; integers of 4 and 8 bytes but for products; halves; sums of the other floats."""
    assert len(SWITCH_PAIRS) == 2 + 4 * 4 + 2 * 4 + 4 * 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", REDUCING)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_type_and_operation_is_reduced_as_numpy_does(
    emulation: Emulation, policy: str, case: str, size: int
) -> None:
    rng = np.random.default_rng(size)
    for _ in range(2 * ROUNDS):
        for pair in SWITCH_PAIRS:
            launch = multimem_launch(rng, policy, case, size, *pair)
            verify(launch, emulation.run(launch))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_odd_counts_at_any_alignment_leave_edges_that_are_right_too(
    emulation: Emulation, policy: str, case: str, size: int
) -> None:
    """Fewer elements than a pack, around packs, lines, slices of ranks, and four packs a thread."""
    rng = np.random.default_rng(size)
    counts = (
        0,
        1,
        2,
        3,
        4,
        5,
        31,
        32,
        33,
        32 * size - 1,
        32 * size + 3,
        1021,
        4 * 4 * 64 * size + 7,
    )
    for _ in range(ROUNDS):
        for element in (7, 9, 11, 14):
            for count in counts:
                launch = multimem_launch(rng, policy, case, size, element, count=count)
                verify(launch, emulation.run(launch))


@pytest.mark.parametrize("case", MOVING)
@pytest.mark.parametrize("policy", POLICIES)
def test_bits_that_are_only_moved_stay_as_they_are(
    emulation: Emulation, policy: str, case: str
) -> None:
    bits = [0x8000000000000000, 0x7FF8DEADBEEF0001, 0xFFF0000000000001, 0x7FF0000000000000, 1]
    for seed in range(8):
        rng = np.random.default_rng(seed)
        launch = multimem_launch(rng, policy, case, 3, FLOAT64, count=5)
        for rank in launch.ranks:
            rank.input[:] = np.array(bits, np.uint64).view(np.float64)
        verify(launch, emulation.run(launch))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_array_that_is_not_everywhere_sends_all_ranks_over_the_links(
    emulation: Emulation, policy: str, case: str, size: int
) -> None:
    rng = np.random.default_rng(size)
    for element in (5, 9, 11, 13):
        for count in (0, 1, 100, 1000):
            for _ in range(ROUNDS):
                launch = multimem_launch(
                    rng, policy, case, size, element, count=count, repeats=4, mixed=True
                )
                verify(launch, emulation.run(launch))


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_that_overtake_each_other_do_not_overwrite_what_is_unread(
    emulation: Emulation, policy: str, case: str, size: int
) -> None:
    rng = np.random.default_rng(size)
    for count in (0, 1, 40, 300):
        for _ in range(ROUNDS):
            launch = multimem_launch(rng, policy, case, size, count=count, repeats=6)
            verify(launch, emulation.run(launch))


@pytest.mark.parametrize(
    ("case", "other"),
    [
        ("ll", "ll"), ("ll", "two_shot"), ("ll", "ll128"), ("ll", "emulated ll"),
        ("all_reduce", "two_shot"), ("all_reduce", "hardware ll"), ("all_reduce", "ll"),
        ("reduce_scatter", "reduce_scatter"), ("all_gather", "all_gather"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [2, 3, 8])
def test_calls_of_other_algorithms_share_the_lane(
    emulation: Emulation, case: str, other: str, size: int
) -> None:
    rng = np.random.default_rng(size)
    for count in (1, 90, 500):
        for mixed in (False, True):
            launch = multimem_launch(
                rng, "hardware", case, size, count=count, repeats=8, mixed=mixed
            )
            launch.packs = 2 * (count * 4 // 16 + 2)
            launch.lines = 2 * (count * 4 // 112 + 2)
            launch.alternate = other
            verify(launch, emulation.run(launch))


@pytest.mark.parametrize("epoch", [0, (1 << 24) - 3, (1 << 32) - 3, (1 << 40) - 3, 1 << 46])
def test_calls_follow_each_other_on_a_lane_across_wraps_of_the_epoch(
    emulation: Emulation, epoch: int
) -> None:
    """The first ones take no barrier: pads of zeros look as if they were of a wrapped epoch."""
    rng = np.random.default_rng(9)
    fresh = True
    for case in (*reversed(REDUCING), *MOVING, *REDUCING):
        for policy in POLICIES:
            launch = multimem_launch(
                rng, policy, case, 3, count=int(rng.integers(100)), repeats=3,
                mixed=bool(rng.integers(2)),
            )  # fmt: skip
            launch.lines, launch.packs, launch.chunk = 64, 64, 768
            launch.fresh, launch.epoch = fresh, epoch
            verify(launch, emulation.run(launch))
            fresh = False


@settings(max_examples=1000 if THOROUGH else 150, deadline=None)
@given(st.data())
def test_any_launch_at_all(emulation: Emulation, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    launch = multimem_launch(
        rng,
        data.draw(st.sampled_from(POLICIES)),
        data.draw(st.sampled_from(CASES)),
        data.draw(st.integers(2, 8)),
        *data.draw(st.sampled_from(SWITCH_PAIRS)),
        count=data.draw(st.integers(0, 600)),
        repeats=2,
        mixed=data.draw(st.booleans()),
    )
    verify(launch, emulation.run(launch))


@pytest.mark.parametrize("pair", SWITCH_PAIRS)
@pytest.mark.parametrize("case", ["all_reduce", "reduce_scatter"])
def test_both_policies_give_the_same_bits_where_the_order_does_not_matter(
    emulation: Emulation, case: str, pair: tuple[int, int]
) -> None:
    launch = multimem_launch(np.random.default_rng(8), "hardware", case, 3, *pair, count=500)
    twin = replace(launch, kernel=f"emulated {case}")
    for one, other in zip(emulation.run(launch), emulation.run(twin), strict=True):
        assert same(one.output, other.output)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_that_calls_something_else_is_told_to_all_and_nothing_is_written(
    emulation: Emulation, policy: str, case: str, size: int
) -> None:
    for odd in range(size):
        launch = odd_multimem_launch(policy, case, size, odd)
        for number, outcome in enumerate(emulation.run(launch)):
            assert outcome.code == MISMATCH
            assert (outcome.rank == odd) == (number != odd)
            assert outcome.untouched


@pytest.mark.parametrize("odd", ["ll128", "two_shot", "hardware all_gather", "hardware ll"])
def test_ranks_that_chose_different_algorithms_are_told(emulation: Emulation, odd: str) -> None:
    launch = odd_multimem_launch("hardware", "all_reduce", 3, 1)
    launch.ranks[1].kernel = odd
    outcomes = emulation.run(launch)
    assert [outcome.code for outcome in outcomes] == [MISMATCH] * 3
    assert all(outcome.untouched for outcome in outcomes)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_that_never_comes_is_named_when_the_budget_is_spent(
    emulation: Emulation, policy: str, case: str, size: int
) -> None:
    launch = odd_multimem_launch(policy, case, size, 0)
    launch.ranks[0].fingerprint -= 1
    launch.budget, missing = 5_000_000, size - 1
    launch.ranks[missing].absent = True
    outcomes = emulation.run(launch)
    assert outcomes.pop(missing).code == 0
    for outcome in outcomes:
        assert (outcome.code, outcome.rank) == (TIMEOUT, missing)
        assert 5_000_000 <= outcome.detail < 6_000_000
        assert outcome.untouched


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_that_does_not_come_to_the_last_meeting_is_named_when_the_budget_is_spent(
    cache: Path, policy: str, late: int
) -> None:
    stays_away = mutant(
        "multimem_all_reduce.cu",
        "    multimem_meet<M>(args, epoch);",
        f"    if (args.rank != {late}) {{\n        multimem_meet<M>(args, epoch);\n    }}",
    )
    launch = odd_multimem_launch(policy, "all_reduce", 3, 0)
    launch.ranks[0].fingerprint -= 1
    launch.budget = 5_000_000
    with Emulation(build(cache, SMALL, stays_away)) as running:
        outcomes = running.run(launch)
    assert outcomes.pop(late).code == 0
    for outcome in outcomes:
        assert (outcome.code, outcome.rank) == (TIMEOUT, late)
        assert 5_000_000 <= outcome.detail < 6_000_000


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("epoch", WRAPS)
def test_fresh_memory_is_not_taken_for_a_packet_where_flags_wrap(
    emulation: Emulation, epoch: int, policy: str
) -> None:
    """It ends flags of 0, which the packets that are stored once for all still had."""
    for seed in range(20):
        for launch in wrapping_launches(np.random.default_rng(seed), policy, epoch):
            verify(launch, emulation.run(launch))
