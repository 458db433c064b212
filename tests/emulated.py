"""Compiles the kernels for the host and runs launches on them: what the emulation's tests share."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import select
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS = {
    name: number
    for number, name in enumerate(
        ("ll128", "ll", "two_shot", "reduce_scatter", "all_gather", "all_to_all", "broadcast",
         "scatter", "gather", "barrier")
    )
}  # fmt: skip
KERNELS |= {
    f"ll128_{name}": number
    for number, name in (
        (20, "all_gather"), (21, "all_to_all"), (22, "broadcast"), (23, "scatter"), (24, "gather"),
        (25, "pair_all_gather"), (26, "pair_all_to_all"), (40, "reduce_scatter"), (41, "reduce"),
        (42, "pair_all_reduce"), (43, "pair_reduce_scatter"),
    )
}  # fmt: skip
KERNELS |= {"push_reduce": 60, "push_reduce_scatter": 61}
#: Those that access all copies at once, by multimem instructions and by ordinary accesses.
KERNELS |= {
    f"{policy} {name}": first + number
    for policy, first in (("hardware", 100), ("emulated", 200))
    for number, name in enumerate(("all_reduce", "reduce_scatter", "ll", "all_gather", "broadcast"))
}
EVERY_RANK = (1 << 32) - 1
TIMEOUT, MISMATCH = 1, 2
GUARD = 64
POISON = 0xA5
#: An ErrorRecord.
RECORD = "<2I5Q"

#: Ubuntu's compiler fortifies by itself, and a longjmp to another stack is an error then.
COMMON = [
    "-std=c++17", "-fno-strict-aliasing", "-ffp-contract=off", "-pthread", "-U_FORTIFY_SOURCE",
]  # fmt: skip
FIBERS = ["-O1"]
#: ThreadSanitizer, which needs real threads; one type and operation keep the compilation short.
SANITIZED = ["-O1", "-g", "-fsanitize=thread", "-DEMULATION_THREADS", "-DEMULATION_SMALL"]
SMALL = ["-O1", "-DEMULATION_SMALL"]
#: What a sanitized program has in its environment.
TSAN = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
#: Of each program: its sources, and the parts, by element types, in which each is compiled: those
#: that take longest first. The last part has the float sums.
PROGRAMS: dict[str, dict[str, tuple[int, ...]]] = {
    "collectives": {
        "kernels.cpp": (0, 2, 1, 3), "multimems.cpp": (0, 1), "pushes.cpp": (0,), "driver.cpp": (0,)
    },
    "mail": {"mail_kernel.cpp": (0,), "mail.cpp": (0,)},
    "layout": {"layout.cpp": (0,)},
}  # fmt: skip


def compiler() -> str:
    """The C++ compiler to use."""
    return os.environ.get("CXX", "g++")


def build_directory(config: pytest.Config) -> Path:
    """Where builds are kept from run to run; without a compiler, the test is skipped."""
    if shutil.which(compiler()) is None:
        pytest.skip(f"needs a C++ compiler with the ucontext calls; there is no {compiler()}")
    assert config.cache is not None
    place = config.cache.mkdir("emulation")
    forget_old_builds(place)
    return place


def forget_old_builds(cache: Path, seconds: float = 86400.0) -> None:
    """Remove what no run of the last day has used."""
    for entry in cache.iterdir():
        if entry.stat().st_mtime > time.time() - seconds:
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)  # another run may be at it
        else:
            entry.unlink(missing_ok=True)


class CompileError(AssertionError):
    """The kernels do not compile for the host."""


def included(sources: dict[str, str], name: str) -> set[str]:
    """A source, and what it includes, directly or not."""
    found, left = set[str](), [name]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += re.findall(r'^#include "(.+)"', sources[name], re.MULTILINE)
    return found


def build(
    cache: Path,
    flags: Sequence[str],
    mutate: Callable[[str, str], str] | None = None,
    name: str = "collectives",
) -> Path:
    """The emulation as a program; compiled only where these very sources never were.

    Args:
        cache: A directory that outlives the test run.
        flags: Compiler options of this build.
        mutate: Given the name and text of each kernel source, its text to compile.
        name: One of the programs.
    """
    sources: dict[str, str] = {}
    for path in sorted([*(ROOT / "cuda").glob("*.cu*"), *(ROOT / "tests/emulation").iterdir()]):
        sources[path.name] = path.read_text()  # the emulation's ptx.cuh comes later, and stays
    if mutate is not None:
        sources = {file: mutate(file, text) for file, text in sources.items()}
    identity = repr((sources, COMMON, flags, compiler(), name))
    key = hashlib.sha256(identity.encode()).hexdigest()[:20]
    place = cache / key
    program = place / "emulation"
    if program.exists():
        os.utime(place)
        return program
    work = cache / f"{key}.{os.getpid()}"
    work.mkdir(parents=True)
    for file, text in sources.items():
        (work / file).write_text(text)

    def call(command: list[str]) -> None:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=300)
        if done.returncode or "warning:" in done.stderr:
            raise CompileError(done.stderr[:4000])

    def compiled(unit: tuple[str, int]) -> str:
        """An object; most of them are as they were where one kernel changes."""
        source, part = unit
        needed = {file: sources[file] for file in sorted(included(sources, source))}
        key = hashlib.sha256(repr((needed, unit, COMMON, flags, compiler())).encode()).hexdigest()
        output = cache / f"{source}-{key[:20]}.o"
        if output.exists():
            os.utime(output)
            return str(output)
        own = f"{source}.{part}.o"
        command = [compiler(), *COMMON, *flags, "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
        call([*command, f"-DSLICE={part}", "-c", source, "-o", own])
        (work / own).rename(output)
        return str(output)

    small = "-DEMULATION_SMALL" in flags
    units = [
        (source, part)
        for source, parts in PROGRAMS[name].items()
        for part in (parts[-1:] if small else parts)
    ]
    with ThreadPoolExecutor(2) as workers:
        objects = [*workers.map(compiled, units)]
    call([compiler(), *COMMON, *flags, *objects, "-o", "emulation"])
    try:
        work.rename(place)
    except OSError:  # another run was quicker
        shutil.rmtree(work)
    return program


def mutant(file: str, old: str, new: str) -> Callable[[str, str], str]:
    """What ``build`` takes to change one thing in one source."""

    def mutate(name: str, text: str) -> str:
        if name != file:
            return text
        assert old in text, f"{file} no longer has {old!r}: mend the mutation"
        return text.replace(old, new)

    return mutate


@dataclass
class Rank:
    """What one rank passes, and where its arrays are."""

    #: Of shape (repeats, rows, count).
    input: np.ndarray[Any, Any] = field(repr=False)
    kernel: str = ""
    registered_input: bool = True
    registered_output: bool = True
    #: At the offsets of all ranks that say so, and bound to a multicast object.
    symmetric: bool = False
    bound: bool = False
    absent: bool = False
    #: "input in output" or "output in input", at a row.
    in_place: str = ""
    row: int = 0
    input_skew: int = 0
    output_skew: int = 0
    fingerprint: int = 0x1234_5678_9ABC_DEF0
    #: Kernel and root of each repeat; empty where all are alike.
    calls: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class Launch:
    """What all ranks share. Every rank calls once for each of its inputs, without a pause."""

    kernel: str
    ranks: list[Rank]
    input_rows: int = 1
    output_rows: int = 1
    element: int = 11
    operation: int = 0
    blocks: int = 2
    threads: int = 32
    root: int = EVERY_RANK
    two_step: bool = False
    fresh: bool = True
    #: Nanoseconds: of the virtual clock, or the real one with threads.
    budget: int = 10**12
    chunk: int = 8192
    lines: int = 128
    packs: int = 512
    #: The number of calls the lanes have seen, where they are fresh.
    epoch: int = 0
    #: A kernel for every second call, in place of the other.
    alternate: str = ""
    #: A rank that the host gives up, so many nanoseconds after the start; none below 0.
    lost: int = -1
    lost_after: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one rank has after a launch; arrays of shape (repeats, rows, count)."""

    code: int
    rank: int
    lane: int
    epoch: int
    detail: int
    mine: int
    input: np.ndarray[Any, Any]
    output: np.ndarray[Any, Any]
    #: The bytes around the output; None where the output lies in the input.
    guards: bytes | None

    @property
    def untouched(self) -> bool:
        """Whether nothing was written to an output that is not in place."""
        return set(self.output.tobytes()) <= {POISON}


@dataclass
class Emulation:
    """A running emulation; use as a context manager."""

    program: Path
    patience: float = 60.0
    environment: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Emulation:
        self._seeds = itertools.count()
        self._process = subprocess.Popen(
            [self.program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **self.environment},
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        process = self._process
        if kind is not None:
            process.kill()
        process.communicate(timeout=30)

    def run(self, launch: Launch) -> list[Outcome]:
        """Run one launch; what every rank has afterwards."""
        size = len(launch.ranks)
        dtype = launch.ranks[0].input.dtype
        repeats = len(launch.ranks[0].input)
        message = [
            struct.pack(
                "<12I8Q", launch.operation, launch.element, dtype.itemsize, size, launch.blocks,
                launch.threads, launch.root, launch.two_step, launch.fresh, launch.input_rows,
                launch.output_rows, repeats, launch.budget, launch.chunk, launch.lines,
                launch.packs, next(self._seeds), launch.epoch, launch.lost + 1,
                launch.lost_after,
            )
        ]  # fmt: skip
        for rank in launch.ranks:
            registered = rank.registered_input | rank.registered_output << 1
            registered |= rank.symmetric << 2 | rank.bound << 3
            in_place = ("", "input in output", "output in input").index(rank.in_place)
            count = rank.input.shape[2]
            assert rank.input.shape == (repeats, launch.input_rows, count)
            calls = rank.calls
            if launch.alternate:
                both = (rank.kernel or launch.kernel, launch.alternate)
                calls = [(both[number % 2], launch.root) for number in range(repeats)]
            assert len(calls) in (0, repeats)
            message += [
                struct.pack(
                    "<8I2Q", KERNELS[rank.kernel or launch.kernel], registered, rank.absent,
                    in_place, rank.row, rank.input_skew, rank.output_skew, len(calls), count,
                    rank.fingerprint,
                ),
                *(struct.pack("<2I", KERNELS[kernel], root) for kernel, root in calls),
                np.ascontiguousarray(rank.input).tobytes(),
            ]  # fmt: skip
        deadline = time.monotonic() + self.patience
        self._write(b"".join(message))
        outcomes = []
        for rank in launch.ranks:
            row = rank.input.shape[2] * dtype.itemsize
            code, culprit, lane, epoch, detail, mine, _ = struct.unpack(
                RECORD, self._read(struct.calcsize(RECORD), deadline)
            )
            inputs, outputs, guards = b"", b"", b""
            for _ in range(repeats):
                inputs += self._read(row * launch.input_rows, deadline)
                framed = self._read(row * launch.output_rows + 2 * GUARD, deadline)
                outputs += framed[GUARD:-GUARD]
                guards += framed[:GUARD] + framed[-GUARD:]
            outcomes.append(
                Outcome(
                    code, culprit, lane, epoch, detail, mine,
                    np.frombuffer(inputs, dtype).reshape(repeats, launch.input_rows, -1),
                    np.frombuffer(outputs, dtype).reshape(repeats, launch.output_rows, -1),
                    None if rank.in_place == "output in input" else guards,
                )
            )  # fmt: skip
        return outcomes

    def _write(self, data: bytes) -> None:
        try:
            self._process.stdin.write(data)  # type: ignore[union-attr]
        except BrokenPipeError:
            raise AssertionError(self._ended()) from None

    def _ended(self) -> str:
        self._process.kill()
        _, errors = self._process.communicate(timeout=30)
        return f"the emulation ended: {errors.decode(errors='replace')[:3000]}"

    def _read(self, size: int, deadline: float) -> bytes:
        stream = self._process.stdout
        assert stream is not None
        parts, left = [], size
        while left:
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"no answer in {self.patience} s; {self._ended()}")
            part = stream.read(left)
            if not part:
                raise AssertionError(self._ended())
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
