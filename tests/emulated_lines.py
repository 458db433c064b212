"""Launches of the LL128 kernels: what the tests of lines and their mutations share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from emulated import EVERY_RANK, POISON, Launch, Outcome, Rank
from emulated_cases import DTYPES, SIZES, call_of, expected, launch_of, same, values

#: The collectives in lines, the all-reduce of many ranks aside.
LINES_REDUCING = (
    "ll128_reduce_scatter", "ll128_reduce", "ll128_pair_all_reduce", "ll128_pair_reduce_scatter",
)  # fmt: skip
LINES_MOVING = (
    "ll128_all_gather", "ll128_all_to_all", "ll128_broadcast", "ll128_scatter", "ll128_gather",
    "ll128_pair_all_gather", "ll128_pair_all_to_all",
)  # fmt: skip
LINES = LINES_REDUCING + LINES_MOVING
#: Those for two ranks alone; and for how many each is.
PAIRED = tuple(kernel for kernel in LINES if "_pair_" in kernel)
LINES_OF_SIZES = [
    (kernel, size) for kernel in LINES for size in SIZES if size == 2 or kernel not in PAIRED
]
#: Kernels of other kinds, which share lanes with them.
OTHERS = ("ll128", "ll", "two_shot", "all_to_all", "broadcast", "gather")


def in_a_line(kernel: str, itemsize: int) -> int:
    """Elements of a line; a moved line ends anywhere in an element of 16 bytes."""
    return 7 if itemsize == 16 and kernel in LINES_REDUCING else 120 // itemsize


def line_launch(
    rng: np.random.Generator,
    kernel: str,
    size: int,
    element: int,
    operation: int = 0,
    *,
    count: int,
    repeats: int = 1,
) -> Launch:
    """A launch with room for the lines of one row, or of a ring, and not one more."""
    launch = launch_of(rng, call_of(kernel), size, element, operation, count=count, repeats=repeats)
    launch.kernel = kernel
    itemsize = DTYPES[element].itemsize
    data = 112 if itemsize == 16 and kernel in LINES_REDUCING else 120
    launch.lines = max(1, -(-count * itemsize // data))
    if kernel in PAIRED:
        launch.lines = min(launch.lines, 4 * launch.blocks * launch.threads // 8)
    return launch


def size_of(kernel: str) -> int:
    """A number of ranks that it is for."""
    return 2 if kernel in PAIRED else 3


def plain(launch: Launch) -> Launch:
    """The same with nothing in place, so that `untouched` says something."""
    for rank in launch.ranks:
        rank.in_place, rank.row = "", 0
    return launch


def odd_line_launch(kernel: str, size: int, odd: int) -> Launch:
    launch = plain(line_launch(np.random.default_rng(2), kernel, size, 11, count=100))
    launch.budget = 20_000_000
    launch.ranks[odd].fingerprint += 1
    return launch


def mixed_launch(
    rng: np.random.Generator,
    size: int,
    kernels: tuple[str, ...],
    *,
    element: int = 11,
    count: int,
    repeats: int,
) -> Launch:
    """Calls of many kinds and roots, one after the other; arrays have a row for each rank."""
    kernels = tuple(kernel for kernel in kernels if size == 2 or kernel not in PAIRED)
    rooted = ("broadcast", "scatter", "gather", "reduce")
    calls = []
    for kernel in rng.choice(kernels, repeats):
        needs_root = call_of(str(kernel)) in rooted
        calls.append((str(kernel), int(rng.integers(size)) if needs_root else EVERY_RANK))
    skews = rng.integers(0, 3, (size, 2)) * DTYPES[element].itemsize
    ranks = [
        Rank(
            values(rng, element, (repeats, size, count)),
            input_skew=int(skews[rank, 0]),
            output_skew=int(skews[rank, 1]),
            calls=calls,
        )
        for rank in range(size)
    ]
    blocks, threads = int(rng.integers(1, 4)), 32 * int(rng.integers(1, 3))
    lines = max(1, -(-count * DTYPES[element].itemsize // 112))
    return Launch(
        calls[0][0], ranks, size, size, element, blocks=blocks, threads=threads, lines=lines
    )


def check_mixed(launch: Launch, outcomes: list[Outcome]) -> None:
    """What every single call gives, and that it leaves the rows alone that are not its own."""
    calls = launch.ranks[0].calls
    assert [outcome.code for outcome in outcomes] == [0] * len(outcomes), outcomes
    for number, (kernel, root) in enumerate(calls):
        name = call_of(kernel)
        rows = len(outcomes) if name in ("reduce_scatter", "all_to_all", "scatter") else 1
        each = [
            replace(rank, input=rank.input[number : number + 1, :rows]) for rank in launch.ranks
        ]
        wanted = expected(replace(launch, kernel=kernel, ranks=each, root=root))
        for outcome, want in zip(outcomes, wanted, strict=True):
            output = outcome.output[number : number + 1]
            written = 0 if want is None else want.shape[1]
            where = f"call {number}, {kernel} with root {root}"
            assert want is None or same(output[:, :written], want), where
            assert set(output[:, written:].tobytes()) <= {POISON}, where
    for outcome, rank in zip(outcomes, launch.ranks, strict=True):
        assert same(outcome.input, rank.input)
        assert outcome.guards is not None
        assert set(outcome.guards) == {POISON}
