"""What the kernels that access all copies at once rely on, with one part of it taken away.

It must be noticed, by ThreadSanitizer, by the stand-ins for the instructions, or by results.
"""

from __future__ import annotations

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
    mutant,
)
from emulated_cases import WRAPS
from emulated_multimem import (
    CASES,
    POLICIES,
    multimem_launch,
    odd_multimem_launch,
    verify,
    wrapping_launches,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # the first test compiles them all


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest) -> Path:
    return build_directory(request.config)


def small_launch(seed: int, policy: str, case: str, size: int, *, mixed: bool) -> Launch:
    rng = np.random.default_rng(seed)
    launch = multimem_launch(rng, policy, case, size, count=77, repeats=4, mixed=mixed)
    launch.blocks, launch.threads = 1, 32
    return launch


def exercise(program: Path, kernels: tuple[str, ...], *, threads: bool) -> None:
    """A few launches that together need every order that the kernels rely on."""
    with Emulation(program, environment=TSAN if threads else {}) as running:
        for policy, case in (kernel.split() for kernel in kernels):
            for size in (2, 3):
                for seed in range(3 if threads else 40):
                    launch = small_launch(seed, policy, case, size, mixed=seed % 2 == 1)
                    launch.budget = 20 * 10**9 if threads else 50 * 10**6
                    verify(launch, running.run(launch))
            if case == "ll":
                for epoch in WRAPS:
                    for launch in wrapping_launches(np.random.default_rng(0), policy, epoch):
                        verify(launch, running.run(launch))
            if not threads:
                outcomes = running.run(odd_multimem_launch(policy, case, 3, 1))
                assert all(each.untouched and each.code == MISMATCH for each in outcomes)


KERNELS = tuple(f"{policy} {case}" for policy in POLICIES for case in CASES)


@pytest.mark.parametrize("kernel", KERNELS)
def test_thread_sanitizer_sees_every_access_ordered(cache: Path, kernel: str) -> None:
    exercise(build(cache, SANITIZED), (kernel,), threads=True)


REDUCE, SCATTER = "multimem_all_reduce.cu", "multimem_reduce_scatter.cu"
MOVE, LL = "multimem_move.cu", "multimem_ll.cu"
MEET = "    multimem_meet<M>(args, epoch);\n"

#: What is taken away: (file, from, to, the kernels each of which must notice, on real threads).
MUTATIONS: dict[str, tuple[str, str, str, tuple[str, ...], bool]] = {
    "release of a meeting in the switch": (
        "ptx_multimem.cuh", "        add_release(", "        atomic_add(",
        ("hardware all_reduce",), True),
    "release of a meeting over the links": (
        "multimem.cuh", "            add_release(", "            atomic_add(",
        ("emulated all_gather",), True),
    "acquire of a meeting": (
        "multimem.cuh", "load_acquire(arrivals)", "load_relaxed(arrivals)",
        ("hardware all_gather", "emulated all_reduce"), True),
    "release of an announcement": (
        "negotiate.cuh", "store_release(words", "store_relaxed(words",
        ("hardware all_reduce", "hardware all_gather"), True),
    "acquire of an announcement": (
        "negotiate.cuh", "load_acquire(words", "load_relaxed(words",
        ("hardware reduce_scatter",), True),
    "last meeting of an all-reduce": (
        REDUCE, MEET, "", ("hardware all_reduce", "emulated all_reduce"), False),
    "last meeting of a reduce-scatter": (SCATTER, MEET, "", ("hardware reduce_scatter",), False),
    "last meeting of a move": (
        MOVE, MEET, "", ("hardware all_gather", "emulated broadcast"), False),
    "advance of what a meeting expects": (
        "multimem.cuh", "store_relaxed(expected, all);", "", ("hardware all_reduce",), False),
    "advance of the epoch": (
        "wait.cuh", "state_of(args_), share_of(", "state_of(args_), 0 * share_of(",
        ("hardware ll", "hardware all_reduce"), False),
    "second place of packets": (LL, "epoch & 1", "epoch & 0", ("hardware ll",), False),
    "flags other than 0": (
        "packets.cuh", "number % 0xffffffff + 1", "number", ("hardware ll",), False),
    "flag of a packet": (
        "packets.cuh", "is_of(high.high, flag)", "true", ("hardware ll", "emulated ll"), False),
    "wait for the fingerprints": (
        LL, "if (!agree(", "if (args.size == 0 && !agree(", ("hardware ll",), False),
    "fence before a reduction": (
        REDUCE, "    fence_alias();\n    packs.pass(", "    packs.pass(",
        ("hardware all_reduce",), False),
    "fence after a reduction": (
        REDUCE, "    }\n    fence_alias();\n}", "    }\n}", ("hardware all_reduce",), False),
    "fence before a load of a row": (
        SCATTER, "    fence_alias();\n    packs.pass(", "    packs.pass(",
        ("hardware reduce_scatter",), False),
    "fence before a store of a row": (
        MOVE, "    fence_alias();\n    if (", "    if (", ("hardware broadcast",), False),
    "fence after a store of a row": (
        MOVE, "    }\n    fence_alias();\n}", "    }\n}", ("hardware all_gather",), False),
    "fence after a meeting's own addition": (
        "multimem.cuh", ", 1);\n        fence_alias();", ", 1);", ("hardware all_reduce",), False),
    "fence before packets": (
        LL, "    fence_alias();\n    for (", "    for (", ("hardware ll",), False),
    "fence after packets": (
        LL, "    fence_alias();\n    if (", "    if (", ("hardware ll",), False),
    "question whether arrays are everywhere": (
        "multimem.cuh", "same && locations[rank] == locations[0]", "same",
        ("hardware all_reduce", "hardware all_gather", "hardware reduce_scatter"), False),
    "question whether arrays are bound": (
        "multimem.cuh", "(locations[0] & MULTICAST) != 0", "true",
        ("hardware all_reduce",), False),
    "one rank alone for the edges": (
        REDUCE, "blockIdx.x == 0 && args.rank == args.size - 1", "blockIdx.x == 0",
        ("hardware all_reduce",), False),
    "edges of a row": (
        MOVE, "copy(target + packs.end()", "copy(target + bytes", ("hardware broadcast",), False),
    "slices of ranks": (
        REDUCE, "args.rank * share)", "0)", ("emulated all_reduce",), False),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_taking_away_a_part_of_the_protocol_is_noticed(cache: Path, name: str) -> None:
    file, old, new, kernels, threads = MUTATIONS[name]
    program = build(cache, SANITIZED if threads else SMALL, mutant(file, old, new))
    for kernel in kernels:
        with pytest.raises(AssertionError) as noticed:
            exercise(program, (kernel,), threads=threads)
        assert not isinstance(noticed.value, CompileError)
        assert "data race" in str(noticed.value) or not threads


def test_nothing_is_noticed_where_nothing_was_taken_away(cache: Path) -> None:
    exercise(build(cache, SMALL), KERNELS, threads=False)
