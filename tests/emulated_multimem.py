"""Launches of the kernels that access all copies at once, for the tests that share them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from emulated import Launch, Outcome
from emulated_cases import DTYPES, FLOAT32, OPERATIONS, PAIRS, Array, check, launch_of, values

__all__ = [
    "CASES",
    "MOVING",
    "POLICIES",
    "REDUCING",
    "SIZES",
    "SWITCH_PAIRS",
    "multimem_launch",
    "odd_multimem_launch",
    "verify",
    "wrapping_launches",
]

#: By the instructions that the emulation stands in for, and by ordinary accesses.
POLICIES = ("hardware", "emulated")
REDUCING = ("all_reduce", "reduce_scatter", "ll")
MOVING = ("all_gather", "broadcast")
CASES = REDUCING + MOVING
SIZES = (2, 3, 4, 8)
#: What gives the same result by other means.
TWINS = {"all_reduce": "two_shot"}


def _in_the_switch(element: int, operation: str) -> bool:
    kind, itemsize = DTYPES[element].kind, DTYPES[element].itemsize
    if kind == "b":
        return operation in ("sum", "max")
    if kind in "iu":
        return operation != "prod" and itemsize >= 4
    return operation in (("sum", "avg", "min", "max") if itemsize == 2 else ("sum", "avg"))


#: Elements and operations that multimem instructions know.
SWITCH_PAIRS = [pair for pair in PAIRS if _in_the_switch(pair[0], OPERATIONS[pair[1]])]


def exact(rng: np.random.Generator, element: int, shape: tuple[int, ...]) -> Array:
    """Numbers whose sums, of eight, are exact in any order and in 8 bits of a mantissa."""
    dtype = DTYPES[element]
    if dtype.kind in "biu":
        return values(rng, element, shape)
    numbers = rng.integers(-8, 9, shape) / 8
    if dtype.kind == "c":
        numbers = numbers + 1j * rng.integers(-8, 9, shape) / 8
    return np.asarray(numbers).astype(dtype)


def multimem_launch(
    rng: np.random.Generator,
    policy: str,
    case: str,
    size: int,
    element: int = FLOAT32,
    operation: int = 0,
    *,
    count: int | None = None,
    repeats: int = 1,
    mixed: bool = False,
) -> Launch:
    """A launch with everything that is not given drawn at random.

    Args:
        rng: Draws.
        policy: One of ``POLICIES``.
        case: One of ``CASES``.
        size: Ranks.
        element: Number of the type.
        operation: Number of the reduction.
        count: Elements of a row.
        repeats: Calls.
        mixed: Whether the arrays of some ranks are somewhere else, not bound, or not registered.
    """
    twin = TWINS.get(case, case)
    launch = launch_of(rng, twin, size, element, operation, count=count, repeats=repeats)
    launch.kernel = f"{policy} {case}"
    halves = DTYPES[element].itemsize == 2 and DTYPES[element].kind not in "iu"
    tame = case != "ll" and (policy == "hardware" or halves)
    skews = [launch.ranks[0].input_skew, launch.ranks[0].output_skew]
    if case == "all_reduce" and rng.random() < 0.8:
        skews[1] = skews[0]  # otherwise no access of 16 bytes suits both
    chances = [1.0, 1.0, 1.0, 1.0]
    if mixed:
        chances[int(rng.integers(4))] = 0.7 if rng.integers(2) else 0.0
    for rank in launch.ranks:
        there = [bool(rng.random() < chance) for chance in chances]
        rank.registered_input, rank.registered_output, rank.symmetric, rank.bound = there
        if rank.in_place:
            rank.registered_output = rank.registered_input
        if not mixed:
            rank.input_skew, rank.output_skew = skews
        if tame and case in REDUCING:
            rank.input = exact(rng, element, rank.input.shape)
    if case == "ll":
        launch.packs = -(-launch.packs * size // (size - 1))
    return launch


def wrapping_launches(rng: np.random.Generator, policy: str, epoch: int) -> Iterator[Launch]:
    """An all-reduce in fresh lanes that have seen ``epoch`` calls, and one in packets after it."""
    for case in ("all_reduce", "ll"):
        launch = multimem_launch(rng, policy, case, 3, count=200, repeats=2)
        launch.packs, launch.lines, launch.chunk = 128, 0, 768
        launch.fresh, launch.epoch = case == "all_reduce", epoch
        yield launch


def verify(launch: Launch, outcomes: list[Outcome]) -> None:
    """Every rank has what NumPy says, and nothing else was written."""
    case = launch.kernel.split()[-1]
    check(replace(launch, kernel=TWINS.get(case, case)), outcomes)


def odd_multimem_launch(policy: str, case: str, size: int, odd: int) -> Launch:
    """A launch in which one rank calls something else, with nothing in place."""
    launch = multimem_launch(np.random.default_rng(2), policy, case, size, count=100)
    launch.budget = 20_000_000
    for rank in launch.ranks:
        rank.in_place, rank.row = "", 0
        rank.output_skew = rank.input_skew
    launch.ranks[odd].fingerprint += 1
    return launch
