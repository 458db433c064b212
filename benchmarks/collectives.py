"""Collectives side by side in one run: this package, NCCL and PyTorch, one process a GPU.

    export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
    python benchmarks/collectives.py -b 1K -e 1G -f 4 --json benchmarks/results/collectives.jsonl

A figure is the median of 7 replays of a CUDA graph that holds 20 calls (4 above 16 MiB), out of
place, the slowest rank counting. The engines take turns inside each size. Every engine is checked
once at each size against a reference, its outputs poisoned before. At 1 KiB there is also the cost
of an eager call in Python thread time, and at the beginning what the link between two GPUs can do.

Sizes are bytes of the larger buffer; ``send_recv`` exchanges between pairs of ranks. Without a GPU
(``--driver host``) the same is done over NumPy, with wall clock times.

Exit code: 0 all measured, 1 a rank failed or a result was wrong, 2 wrong usage or multicast not
switched off, 3 the deadline passed. Figures are written as they come, so none is lost.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peers
from peers import report
from peers.api import COLLECTIVES, DTYPES, OPS
from peers.supervisor import Outcome, supervise
from peers.worker import Plan, smallest

#: Multicast must be off for every library in the run; these say so.
GUARDS: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
OK, FAILED, USAGE, LATE = 0, 1, 2, 3


def unguarded(environment: Mapping[str, str]) -> list[str]:
    """The switches that are not set, as ``NAME=value``."""
    wanted = GUARDS.items()
    return [f"{name}={value}" for name, value in wanted if environment.get(name) != value]


def _names(allowed: Sequence[str], *, other: str = "") -> Any:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in names:
            if name not in allowed and not (other and other in name):
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return names

    return parse


def _size(text: str) -> int:
    try:
        return report.number_of_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _at_least(least: int) -> Any:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least}")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("-b", dest="first", type=_size, default="1K", help="smallest size (1K)")
    add("-e", dest="last", type=_size, default="1G", help="largest size (1G)")
    add("-f", dest="factor", type=_at_least(2), default=4, help="from one size to the next (4)")
    add("-n", dest="iterations", type=_at_least(1), help="calls in a graph (20; 4 above 16M)")
    add("-w", dest="warm_up", type=_at_least(0), default=3, help="calls before that (3)")
    add("-c", dest="check", choices=["on", "off"], default="on", help="check results (on)")
    add("-d", dest="dtype", choices=DTYPES, default="float32", help="element type (float32)")
    add("-o", dest="op", choices=OPS, default="sum", help="operation of reductions (sum)")
    add("-g", dest="ranks", type=_at_least(1), help="processes, one a GPU (all GPUs; host: 2)")
    known = ", ".join(peers.ENGINES)
    add(
        "--engines",
        type=_names(tuple(peers.ENGINES), other=":"),
        default=tuple(peers.ENGINES),
        help=f"some of {known}, or module:class, with commas between (all)",
    )
    add(
        "--collective",
        dest="collectives",
        type=_names(COLLECTIVES),
        default=COLLECTIVES,
        help=f"some of {', '.join(COLLECTIVES)}, with commas between (all)",
    )
    add("--driver", choices=["cuda", "host"], default="cuda", help="host: without a GPU (cuda)")
    add("--json", type=Path, metavar="FILE", help="append a JSON line for each figure")
    add("--deadline", type=_seconds, default=280.0, help="seconds for the whole run (280)")
    return made


def sizes(first: int, last: int, factor: int) -> tuple[int, ...]:
    """``first``, times ``factor`` again and again, up to ``last``."""
    found = []
    while first <= last:
        found.append(first)
        first *= factor
    return tuple(found)


def _gpus() -> int:
    import cupy

    count: int = cupy.cuda.runtime.getDeviceCount()
    return count


def plan_of(options: argparse.Namespace, made: argparse.ArgumentParser, started: float) -> Plan:
    """The plan of a command line; exits with code 2 where it makes no sense."""
    ranks = options.ranks
    if options.driver == "cuda":
        try:
            gpus = _gpus()
        except (ImportError, RuntimeError) as error:
            made.error(f"no usable GPU: {error}; --driver host needs none")
        if (ranks or gpus) > gpus:
            made.error(f"-g {ranks}: there are {gpus} GPUs")
        ranks = ranks or gpus
    ranks = ranks or 2
    least = smallest(ranks, options.dtype)
    if options.first < least:
        made.error(f"-b {options.first}: {ranks} ranks of {options.dtype} need {least} bytes")
    if options.last < options.first:
        made.error(f"-e {options.last} is less than -b {options.first}")
    return Plan(
        ranks=ranks,
        platform=options.driver,
        engines=options.engines,
        collectives=options.collectives,
        sizes=sizes(options.first, options.last, options.factor),
        iterations=options.iterations,
        warm_up=options.warm_up,
        check=options.check == "on",
        dtype=options.dtype,
        op=options.op,
        deadline=started + options.deadline,
    )


class Listener:
    """Collects what the ranks tell, and writes it down at once."""

    def __init__(self, driver: str, file: Path | None) -> None:
        self.rows: list[report.Row] = []
        self._file = file
        self._said: set[str] = set()
        self._about: report.Row = {
            "benchmark": "collectives",
            "driver": driver,
            "machine": platform.platform(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "commit": _commit(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def __call__(self, kind: str, value: Any) -> None:
        """Take a message; see :func:`peers.supervisor.supervise`."""
        if kind == "about":
            self._about |= value
        elif kind == "unavailable":
            name, reason = value
            self._note(f"{name}: not available: {reason}")
        elif kind == "refused":
            name, collective, reason = value
            self._note(f"{name}, {collective}: not measured: {reason}")
        elif kind == "row":
            self._row(value)

    def _row(self, row: report.Row) -> None:
        if self._file is not None:
            report.append(self._file, self._about | row)
        if "skipped" in row:
            words = f"{row['engine']}, {row['collective']} of {report.show_bytes(row['asked'])}"
            verdict = "WRONG" if row.get("correct") is False else "not measured"
            self._note(f"{words}: {verdict}: {row['skipped']}")
        self.rows.append(row)

    def _note(self, text: str) -> None:
        """Say something once."""
        if text not in self._said:
            self._said.add(text)
            print(text, file=sys.stderr, flush=True)

    @property
    def wrong(self) -> bool:
        """Whether any result was."""
        return any(row.get("correct") is False for row in self.rows)


def _commit() -> str:
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return said.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    made = parser()
    options = made.parse_args(arguments)
    missing = unguarded(os.environ)
    if missing:
        print(
            f"collectives.py starts only where multicast is switched off for every library: "
            f"set {' '.join(missing)} in its environment",
            file=sys.stderr,
        )
        return USAGE
    plan = plan_of(options, made, started)
    listener = Listener(options.driver, options.json)
    code = OK
    try:
        for rank in supervise(plan, listener):
            print(f"rank {rank} measured everything but did not close", file=sys.stderr)
    except Outcome as outcome:
        print(f"stopped: {outcome}", file=sys.stderr)
        code = LATE if outcome.late else FAILED
    if listener.rows:
        print(report.tables(listener.rows))
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    return code or (FAILED if listener.wrong else OK)


if __name__ == "__main__":
    sys.exit(main())
