"""The orders the kernels rely on: under ThreadSanitizer, and with one of them taken away.

What is taken away must be noticed, by ThreadSanitizer or by results; so these tests can fail.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from emulated import (
    MISMATCH,
    SANITIZED,
    SMALL,
    TSAN,
    CompileError,
    Emulation,
    Launch,
    build,
    build_directory,
    forget_old_builds,
    mutant,
)
from emulated_cases import FLOAT32, MOVING, REDUCING, check, launch_of, odd_launch
from emulated_lines import line_launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest) -> Path:
    return build_directory(request.config)


def staged(case: str, size: int, *, registered: bool) -> Launch:
    launch = launch_of(np.random.default_rng(6), case, size, FLOAT32, count=77, repeats=4)
    launch.blocks, launch.threads, launch.chunk = 1, 32, 128 * size
    for rank in launch.ranks:
        rank.in_place, rank.row = "", 0
        rank.registered_input = rank.registered_output = registered
    return launch


def exercise(program: Path, cases: tuple[str, ...], *, threads: bool) -> None:
    """A few launches that together need every order that the protocols rely on."""
    with Emulation(program, environment=TSAN if threads else {}) as running:
        for case in cases:
            for size, registered in ((2, False), (2, True), (3, False)):
                for _ in range(1 if threads else 30):
                    launch = staged(case, size, registered=registered)
                    launch.budget = 20 * 10**9 if threads else 50 * 10**6
                    check(launch, running.run(launch))
        if not threads:
            for case in cases:
                outcomes = running.run(odd_launch(case, 3, 1))
                assert all(each.untouched and each.code == MISMATCH for each in outcomes)


@pytest.mark.parametrize("case", REDUCING + MOVING)
def test_thread_sanitizer_sees_every_access_ordered(cache: Path, case: str) -> None:
    exercise(build(cache, SANITIZED), (case,), threads=True)


#: What is taken away: (file, from, to, the cases that must notice, on real threads or fibers).
MUTATIONS: dict[str, tuple[str, str, str, tuple[str, ...], bool]] = {
    "release of a meeting": (
        "negotiate.cuh", "store_release(theirs", "store_relaxed(theirs", ("two_shot",), True),
    "acquire of a meeting": (
        "negotiate.cuh", "load_acquire(mine)", "load_relaxed(mine)", ("two_shot",), True),
    "release of an announcement": (
        "negotiate.cuh", "store_release(words", "store_relaxed(words", ("two_shot",), True),
    "acquire of an announcement": (
        "negotiate.cuh", "load_acquire(words", "load_relaxed(words", ("two_shot",), True),
    "last meeting": (
        "exchange.cuh", "chunk + 1);\n        }\n        if (!meet(args, epoch, ++step))",
        "chunk + 1);\n        }\n        if (false)", ("two_shot", "all_gather"), False),
    "meeting after the first fill": (
        "exchange.cuh", "fill(0);\n        if (!meet(args, epoch, ++step))",
        "fill(0);\n        if (false)", ("two_shot",), False),
    "advance of the epoch": (
        "wait.cuh", "state_of(args_), share_of(",
        "state_of(args_), 0 * share_of(", ("ll128", "ll"), False),
    "second buffer of lines": (
        "lines.cuh", "(epoch) & 1", "(epoch) & 0", ("ll128",), False),
    "second buffer of packets": (
        "ll.cu", "epoch & 1", "epoch & 0", ("ll",), False),
    "second place of words": (
        "wait.cuh", "words_offset(epoch & 1", "words_offset(epoch & 0", ("ll",), False),
    "flags of all": (
        "lines.cuh", "&& is_old(packs[rank])", "&& false", ("ll128",), False),
    "flag of a packet": (
        "packets.cuh", "is_of(high.high, flag)", "true", ("ll",), False),
    "fingerprint in a flag": (
        "lines.cuh", "args_.fingerprint & 0xffffff", "0", ("ll128",), False),
    "comparison of fingerprints": (
        "negotiate.cuh", "agreed && !differs(args, epoch, peer)", "agreed", ("two_shot", "ll"),
        False),
    "double scratch": (
        "exchange.cuh", "chunk & 1,", "0,", ("two_shot",), False),
}  # fmt: skip


def noticed(cache: Path, name: str) -> str:
    """What the checks say with a mutation in place; empty where they do not notice."""
    file, old, new, cases, threads = MUTATIONS[name]
    flags = SANITIZED if threads else SMALL
    program = build(cache, flags, mutant(file, old, new))
    try:
        exercise(program, cases, threads=threads)
    except CompileError:
        raise
    except AssertionError as failure:
        return str(failure) or "failed"
    return ""


def test_nothing_is_noticed_where_nothing_was_taken_away(cache: Path) -> None:
    exercise(build(cache, SMALL), ("ll128", "ll", "two_shot", "all_gather"), threads=False)


@pytest.mark.parametrize("name", MUTATIONS)
def test_taking_away_a_part_of_the_protocol_is_noticed(cache: Path, name: str) -> None:
    said = noticed(cache, name)
    assert said, f"without the {name}, everything still passed"
    if MUTATIONS[name][-1]:
        assert "data race" in said


def indirect(mutate: Callable[[str, str], str] | None = None) -> Callable[[str, str], str]:
    """As in large grids: one thread of a block reads the number of the call."""
    always = mutant("wait.cuh", "DIRECT_BLOCKS = 40", "DIRECT_BLOCKS = 0")
    return always if mutate is None else lambda name, text: mutate(name, always(name, text))


def test_blocks_of_large_grids_pass_the_number_of_the_call_on(cache: Path) -> None:
    cases = ("ll128", "ll", "two_shot", "all_gather")
    exercise(build(cache, SMALL, indirect()), cases, threads=False)
    exercise(build(cache, SANITIZED, indirect()), ("ll128", "two_shot"), threads=True)
    nothing = indirect(
        mutant("wait.cuh", "            epoch = number;\n", "            epoch = 0;\n")
    )
    with pytest.raises(AssertionError):
        exercise(build(cache, SMALL, nothing), ("ll128",), threads=False)


@pytest.mark.parametrize(
    ("file", "kernel"), [("ll128.cu", "ll128"), ("line_pairs.cuh", "ll128_pair_all_reduce")]
)
def test_a_thread_that_heard_from_nobody_lets_no_kernel_start(
    cache: Path, file: str, kernel: str
) -> None:
    """Blocks of the next call could take the room of a rank that shares the GPU."""
    early = mutant(file, "    if (group < count) {  // a line", "    {  // a line")
    launch = line_launch(np.random.default_rng(6), kernel, 2, FLOAT32, count=77)
    launch.blocks, launch.threads, launch.lines = 1, 64, 77
    with (
        Emulation(build(cache, SMALL, early)) as running,
        pytest.raises(AssertionError, match="before it heard from the other ranks"),
    ):
        check(launch, running.run(launch))


REST = "block == 0 ? one - (blocks - 1) * each : each"


def counted_by(
    cache: Path, mutate: Callable[[str, str], str], *, blocks: int, threads: int
) -> None:
    """Calls are counted right, and wrong with a mutation, which is noticed."""
    launch = launch_of(np.random.default_rng(6), "ll128", 2, FLOAT32, count=600, repeats=4)
    launch.blocks, launch.threads, launch.budget = blocks, threads, 50 * 10**6
    with Emulation(build(cache, SMALL)) as running:
        check(launch, running.run(launch))
    with Emulation(build(cache, SMALL, mutate)) as running, pytest.raises(AssertionError):
        for _ in range(20):
            check(launch, running.run(launch))


def test_shares_of_blocks_that_do_not_make_a_whole_call_are_noticed(cache: Path) -> None:
    counted_by(cache, mutant("wait.cuh", REST, "block == blocks ? 0 : each"), blocks=3, threads=32)


def test_a_call_that_is_counted_before_all_threads_have_its_number_is_noticed(cache: Path) -> None:
    meeting = "        if (direct_) {\n            __syncthreads();\n        }\n"
    counted_by(cache, mutant("wait.cuh", meeting, ""), blocks=1, threads=512)


def test_a_barrier_that_some_threads_never_reach_ends_the_emulation(cache: Path) -> None:
    once = mutant("barrier.cu", "agree(args", "threadIdx.x == 0 && agree(args")
    with (
        pytest.raises(AssertionError, match="others never reach"),
        Emulation(build(cache, SMALL, once)) as running,
    ):
        running.run(odd_launch("barrier", 2, 0))


def test_a_kernel_that_does_not_compile_is_told_with_the_compiler_s_words(cache: Path) -> None:
    with pytest.raises(CompileError, match="undeclared_name"):
        build(cache, SMALL, mutant("barrier.cu", "agree(args", "undeclared_name(args"))


def test_an_emulation_that_does_not_answer_is_ended(cache: Path) -> None:
    launch = odd_launch("barrier", 2, 0)
    launch.ranks[0].absent, launch.budget = True, 1 << 62
    with (
        pytest.raises(AssertionError, match=r"no answer in 0\.2 s"),
        Emulation(build(cache, SMALL), patience=0.2) as running,
    ):
        running.run(launch)


def test_builds_that_no_run_used_for_a_day_are_forgotten(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "emulation").touch()
        (tmp_path / f"{name}.o").touch()
    long_ago = time.time() - 90000
    for name in ("old", "old.o"):
        os.utime(tmp_path / name, (long_ago, long_ago))
    forget_old_builds(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "new.o"]
