"""``cupy-zc selftest``: run every example, shortly, and look whether its result is right."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.text import Text

from .examples import EXAMPLES, Example, run
from .output import CannotError, Exit, console, json_option, print_json

__all__ = ["command"]

#: Seconds for one example.
_PATIENCE = 300.0
_STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow"}


@dataclass(frozen=True, slots=True)
class _Result:
    name: str
    #: "passed", "failed" or "not run".
    outcome: str
    seconds: float
    #: Why it did not pass.
    reason: str


@click.command("selftest")
@click.option("-n", "ranks", type=click.IntRange(1), default=2, help="Ranks (2).")
@json_option
@click.pass_context
def command(ctx: click.Context, ranks: int, *, as_json: bool) -> None:
    """Run every example, shortly, and look whether its result is right.

    Each checks itself: against one process, or against SciPy. Exit code 1 where one failed; one
    that could not be run, for want of a package, is named and is no failure.
    """
    out = console()
    results = []
    for name, example in EXAMPLES.items():
        result = _try(name, example, ranks)
        results.append(result)
        if not as_json:
            line = Text()
            line.append(f"{result.outcome:<8}", style=_STYLES[result.outcome])
            line.append(f"  {name:<8}  {result.seconds:5.1f} s  {result.reason}".rstrip())
            out.print(line, soft_wrap=True)
    if as_json:
        print_json([asdict(result) for result in results])
    failed = any(result.outcome == "failed" for result in results)
    ctx.exit(int(Exit.FINDING if failed else Exit.OK))


def _try(name: str, example: Example, ranks: int) -> _Result:
    missing = example.missing()
    if missing:
        return _Result(name, "not run", 0.0, f"needs {missing}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cupy-zc-") as folder:
        try:
            words = example.command(ranks, example.short)
            done = run(words, timeout=_PATIENCE, cwd=Path(folder))
        except CannotError as error:
            return _Result(name, "failed", time.monotonic() - began, error.message)
    took = time.monotonic() - began
    if done.returncode == 0:
        return _Result(name, "passed", took, "")
    said = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
    return _Result(name, "failed", took, f"exit code {done.returncode}: {said}")
