"""``cupy-zc selftest``: run every example, shortly, and look whether its result is right.

With ``--multicast``: run every kernel of NVLink SHARP, which few machines can.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.text import Text

from ..driver import select
from ..errors import DriverError
from .checks.finding import Machine
from .checks.software import look_at_software
from .checks.switch import Tried, measure
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
@click.option("-n", "ranks", type=click.IntRange(1), help="Ranks (2; with --multicast all GPUs).")
@click.option(
    "--multicast", is_flag=True, help="Try every collective of NVLink SHARP, on all types."
)
@json_option
@click.pass_context
def command(ctx: click.Context, ranks: int | None, *, multicast: bool, as_json: bool) -> None:
    """Run every example, shortly, and look whether its result is right.

    Each checks itself: against one process, or against SciPy. Exit code 1 where one failed; one
    that could not be run, for want of a package, is named and is no failure.

    With --multicast, collectives go through the switch in place of the examples, and results are
    compared with NumPy. It makes multicast objects, so it needs two GPUs of one NVLink fabric, and
    does nothing where a switch such as NCCL_NVLS_ENABLE=0 is set. The report is to be pasted.
    """
    if multicast:
        ctx.exit(_try_multicast(ranks, as_json=as_json))
    ranks = ranks or 2
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


def _try_multicast(ranks: int | None, *, as_json: bool) -> int:
    try:
        count = select("cuda").device_count()
    except DriverError as error:
        raise CannotError(f"multicast needs GPUs: {error}") from error
    if max(ranks or count, 2) > count:
        raise CannotError(f"multicast needs a GPU for each rank, of 2 at least; there are {count}")
    machine = [f"{each.name}: {each.found}" for each in look_at_software(Machine())]
    results = measure(ranks or count)
    bad = [each for each in results if each.wrong or _elsewhere(each)]
    if as_json:
        print_json({"machine": machine, "results": [asdict(each) for each in results]})
    else:
        out = console()
        for words in machine:
            out.print(words, soft_wrap=True)
        for each in results:
            word = "failed" if each in bad else "passed"
            line = Text()
            line.append(f"{word:<8}", style=_STYLES[word])
            line.append(
                f"  {each.collective:<14}  {each.dtype:<10}  {each.op:<4}  "
                f"{each.wrong:,} of {each.compared:,} wrong  {', '.join(each.algorithms)}"
            )
            out.print(line, soft_wrap=True)
    return int(Exit.FINDING if bad else Exit.OK)


def _elsewhere(tried: Tried) -> bool:
    """Whether it did not go through the switch after all."""
    return not all(name.startswith("multimem") for name in tried.algorithms)
