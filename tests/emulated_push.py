"""Launches of the reductions by stores, for the tests of their results and of their orders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from emulated import EVERY_RANK, Launch, Outcome, Rank
from emulated_cases import DTYPES, FLOAT32, check, values

#: Elements and operations that are compiled: float sum, byte sum, long maximum, half average,
#: complex product.
PAIRS = ((11, 0), (2, 0), (7, 3), (9, 4), (14, 1))
CASES = (
    "push_reduce", "push_reduce to a root", "push_reduce_scatter", "push_reduce in one hop"
)  # fmt: skip
SIZES = (2, 3, 4, 8)
DEPTH = 4
#: What gives the same result by other means.
TWIN = {"push_reduce": "two_shot", "push_reduce_scatter": "reduce_scatter"}


def possible(case: str, size: int) -> bool:
    """Whether so many ranks do that; others stage where two take one hop."""
    return size == 2 or "one hop" not in case


def push_launch(
    rng: np.random.Generator,
    case: str,
    size: int,
    pair: tuple[int, int] = (FLOAT32, 0),
    *,
    count: int,
    in_place: bool = False,
    lines: int = 1,
    repeats: int = 1,
    blocks: int = 2,
    threads: int = 32,
    skewed: bool = False,
) -> Launch:
    """A launch whose slots hold so many lines of 128 bytes; inputs are not registered.

    In one hop go two ranks one of which has an output that is not registered, either.
    """
    kernel = case.split()[0]
    rows = size if kernel == "push_reduce_scatter" else 1
    element, operation = pair
    dtype = DTYPES[element]
    unit = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    ranks = []
    for rank in range(size):
        entry = Rank(
            values(rng, element, (repeats, rows, count)),
            registered_input=False,
            registered_output=kernel == "push_reduce",
        )
        if skewed:
            entry.input_skew, entry.output_skew = (
                int(each) * unit for each in rng.integers(0, 16 // unit + 1, 2)
            )
        if in_place:
            entry.in_place = "input in output" if rows == 1 else "output in input"
            entry.row = rank if rows > 1 else 0
        ranks.append(entry)
    if "one hop" in case:
        ranks[rng.integers(size)].registered_output = False
    pairs = max(1, blocks // 2)
    return Launch(
        kernel,
        ranks,
        rows,
        1,
        element,
        operation,
        blocks=blocks,
        threads=threads,
        chunk=max(128 * rows, 128 * lines * (size - 1) * pairs),
        lines=0,
        packs=0,
        root=int(rng.integers(size)) if "root" in case else EVERY_RANK,
    )


def verify(launch: Launch, outcomes: list[Outcome]) -> None:
    check(replace(launch, kernel=TWIN.get(launch.kernel, launch.kernel)), outcomes)
