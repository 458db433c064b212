"""The orders the rings of push_reduce rely on: under ThreadSanitizer, and with one taken away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from emulated import SANITIZED, SMALL, TSAN, CompileError, Emulation, build, build_directory, mutant
from emulated_push import CASES, possible, push_launch, verify

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest) -> Path:
    return build_directory(request.config)


def exercise(program: Path, *, threads: bool) -> None:
    """Calls without a pause that wrap the rings, alternating with others that use scratch."""
    with Emulation(program, environment=TSAN if threads else {}) as running:
        for case in CASES:
            for size, pieces, other in ((2, 9, ""), (2, 2, ""), (3, 9, "two_shot")):
                size = size if possible(case, size) else 2
                for seed in range(1 if threads else 6):
                    rng, in_place = np.random.default_rng(seed), other == ""
                    count = 32 * pieces * (1 if "scatter" in case else size)
                    launch = push_launch(rng, case, size, count=count, in_place=in_place, repeats=4)
                    scatters = launch.input_rows > 1
                    launch.alternate = "reduce_scatter" if other and scatters else other
                    launch.budget = 20 * 10**9 if threads else 50 * 10**6
                    verify(launch, running.run(launch))


def test_thread_sanitizer_sees_every_access_ordered(cache: Path) -> None:
    exercise(build(cache, SANITIZED), threads=True)


def test_nothing_is_noticed_where_nothing_was_taken_away(cache: Path) -> None:
    exercise(build(cache, SMALL), threads=False)


#: What is taken away: (file, from, to, noticed on real threads or on fibers).
MUTATIONS = {
    "release of a flag": ("rings.cuh", "store_release(flag", "store_relaxed(flag", True),
    "acquire of a flag": ("rings.cuh", "load_acquire(mine)", "load_relaxed(mine)", True),
    "barrier before a signal": (
        "rings.cuh", "= threadIdx.x;\n        __syncthreads();", "= threadIdx.x;", True),
    "epoch in a flag": ("rings.cuh", "of_this_call && ", "(void)of_this_call, ", False),
    "number in a flag": (
        "rings.cuh", "of_this_call && ((value - number) & NUMBERS) < most",
        "(void)number, (void)most, of_this_call", False),
    "wait for a piece": ("push_reduce.cu", "!flags.await<OWN<HOW>>(piece + 1)", "false", False),
    "wait for the own sender": (
        "push_reduce.cu", "!flags.await<OWN<HOW>>(piece + 1)", "!flags.await(piece + 1)", False),
    "wait for a free slot": (
        "push_reduce.cu", "!flags.await(piece - DEPTH + 1)", "false", False),
    "signal of a free slot": (
        "push_reduce.cu", "{  // somebody waits for this slot", "{ continue;", False),
    "last meeting": (
        "push_reduce.cu", "if (HOW == Cutting::SLICES) {\n        meet",
        "if (false) {\n        meet", False),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_taking_away_a_part_of_the_protocol_is_noticed(cache: Path, name: str) -> None:
    file, old, new, threads = MUTATIONS[name]
    program = build(cache, SANITIZED if threads else SMALL, mutant(file, old, new))
    try:
        exercise(program, threads=threads)
    except CompileError:
        raise
    except AssertionError as failure:
        assert not threads or "data race" in str(failure)
    else:
        pytest.fail(f"without the {name}, everything still passed")
