"""What the collectives in lines rely on, with one part of it taken away: it must be noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from emulated import SANITIZED, SMALL, TSAN, CompileError, Emulation, build, build_directory, mutant
from emulated_cases import FLOAT32, check
from emulated_lines import LINES, PAIRED, check_mixed, line_launch, mixed_launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest) -> Path:
    return build_directory(request.config)


def exercise(program: Path, kernels: tuple[str, ...], *, threads: bool) -> None:
    """Calls of all roots one after the other, and the same call again and again, in place too."""
    rng = np.random.default_rng(6)
    with Emulation(program, environment=TSAN if threads else {}) as running:
        for size in (2,) if kernels[0] in PAIRED else (2, 3):
            for turn in range(1 if threads else 20):
                launch = mixed_launch(rng, size, kernels, count=61, repeats=12)
                # Several lines for each eight lanes, of one block, and of two that are not in step.
                count = 1900 if kernels[0] in PAIRED else 470  # more than a ring has at a time
                alike = line_launch(rng, kernels[0], size, FLOAT32, count=count, repeats=6)
                alike.blocks, alike.threads = 1 + turn % 2, 32
                if kernels[0] in PAIRED:
                    alike.lines = 16 * alike.blocks
                if threads:
                    launch.blocks, launch.threads = 1, 32
                for each in (launch, alike):
                    each.budget = 20 * 10**9 if threads else 50 * 10**6
                check_mixed(launch, running.run(launch))
                check(alike, running.run(alike))


def test_thread_sanitizer_sees_every_access_ordered(cache: Path) -> None:
    program = build(cache, SANITIZED)
    exercise(program, LINES, threads=True)
    for kernel in LINES:
        exercise(program, (kernel,), threads=True)


#: What is taken away: (file, from, to, the kernels each of which must notice).
MUTATIONS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "flags of all": (
        "lines.cuh", "&& is_old(packs[rank])", "&& false",
        ("ll128_all_gather", "ll128_gather", "ll128_reduce")),
    "flag of one": (
        "lines.cuh", "is_old(pack) ? peer :", "false ? peer :",
        ("ll128_broadcast", "ll128_scatter")),
    "epoch in a flag": (
        "lines.cuh", "flag_(epoch << 24", "flag_(1 << 24", ("ll128_all_to_all", "ll128_scatter")),
    "second buffer of lines": (
        "lines.cuh", "(epoch) & 1", "(epoch) & 0", ("ll128_all_gather",)),
    "turn in a flag": (
        "lines.cuh", "fingerprint + turn", "fingerprint + 0 * turn", PAIRED),
    "places of a ring": (
        "line_pairs.cuh", "round % ROUNDS *", "round % (ROUNDS - 1) *", PAIRED),
    "a place more than two ranks are apart": (
        "line_pairs.cuh", "ROUNDS = 4;\nstatic_assert(", "ROUNDS = 3;\nstatic_assert(true || ",
        PAIRED),
    "wait for empty lines": (
        "line_routes.cuh", "peers == 0 || line >= count) {\n            return true;",
        "line != ~count) {\n            return true;",
        ("ll128_broadcast", "ll128_scatter", "ll128_gather", "ll128_reduce")),
    "lane that sends what it later overwrites": (
        "line_moves.cuh", "line = line_group(); line < rows_.lines(); line += line_groups()",
        "line = rows_.lines() - 1 - line_group(); line < rows_.lines(); line -= line_groups()",
        ("ll128_all_to_all",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_taking_away_a_part_of_the_protocol_is_noticed(cache: Path, name: str) -> None:
    file, old, new, kernels = MUTATIONS[name]
    program = build(cache, SMALL, mutant(file, old, new))
    for kernel in kernels:
        with pytest.raises(AssertionError) as noticed:
            exercise(program, (kernel,), threads=False)
        assert not isinstance(noticed.value, CompileError)


@pytest.mark.parametrize("kernel", LINES)
def test_memory_that_does_not_keep_lines_whole_is_noticed(cache: Path, kernel: str) -> None:
    """What set-up asks of links and memory is needed: eight lanes that each load on their own."""
    program = build(cache, [*SMALL, "-DEMULATION_SPLIT_LINES"])
    with pytest.raises(AssertionError) as noticed:
        exercise(program, (kernel,), threads=False)
    assert not isinstance(noticed.value, CompileError)


def test_nothing_is_noticed_where_nothing_was_taken_away(cache: Path) -> None:
    program = build(cache, SMALL)
    for kernel in ("ll128_all_to_all", "ll128_scatter", "ll128_reduce"):
        exercise(program, (kernel,), threads=False)
