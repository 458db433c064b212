"""``cupy-zc bench``: time, bandwidth and results of collectives, engines side by side."""

from __future__ import annotations

import importlib.util
import os
import time

import click

from ..output import CannotError, Exit
from . import report, tuning
from .guard import guarded, overruled
from .listener import STDOUT, Listener
from .options import Options, flags, plan_of
from .supervisor import Outcome, supervise
from .worker import Plan

__all__ = ["command"]


#: Where a launcher of MPI says how many processes it started.
_LAUNCHED = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")

_HELP = """Measure collectives: the table of nccl-tests, with the flags people know.

Sizes are bytes of the larger buffer; algbw and busbw are what nccl-tests calls so. Results are
checked before anything is timed. The engines take turns; of each round the slowest rank counts, and
of the rounds the median.

\b
  cupy-zc bench --plot bench.png
  cupy-zc bench --collective all -g 4 -b 1K -e 1G --graph --json runs.jsonl
  cupy-zc bench --driver host --against mpi -g 4

Exit code 1 where a result was wrong, 3 where a rank failed or the deadline passed; what was
measured until then is shown all the same. No multicast object is created: every process runs with
NCCL_NVLS_ENABLE=0 and the like."""


@click.command("bench", help=_HELP)
@flags
@click.pass_context
def command(ctx: click.Context, options: Options) -> None:
    """See the help text above."""
    started = time.monotonic()
    wrong = overruled(os.environ)
    if wrong:
        raise click.UsageError(
            f"multicast must be off for every library in a benchmark: set {' '.join(wrong)}, "
            "or unset it"
        )
    size = next((os.environ[name] for name in _LAUNCHED if name in os.environ), "1")
    if size != "1":
        raise click.UsageError(
            f"{size} processes of bench were started: it starts its ranks itself, -g {size}"
        )
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CannotError("--plot needs matplotlib: pip install 'cupy-zc[plot]'")
    plan = plan_of(options, started)
    listener = Listener(plan, options.json)
    failure = _measure(plan, listener)
    _show(plan, listener, options)
    click.echo(f"{time.monotonic() - started:.0f} s", err=True)
    if failure:
        raise CannotError(f"stopped: {failure}")
    if options.tune is not None:
        tuning.write(options.tune, tuning.thresholds(listener.rows, plan.ranks), listener.about)
        click.echo(f"wrote {options.tune}: set CUPY_ZC_PLAN={options.tune}", err=True)
    ctx.exit(int(Exit.FINDING if listener.wrong else Exit.OK))


def _measure(plan: Plan, listener: Listener) -> str:
    """Run a plan; why it was stopped, if it was."""
    with guarded(os.environ), listener.showing():
        try:
            for rank in supervise(plan, listener):
                click.echo(f"rank {rank} measured everything but did not close", err=True)
        except Outcome as outcome:
            return str(outcome)
        finally:
            listener.flush()
            listener.close_table()
    return ""


def _show(plan: Plan, listener: Listener, options: Options) -> None:
    """What needs all figures: engines beside each other, and the plot."""
    rows = listener.rows
    if options.json != STDOUT and rows and (len(plan.engines) > 1 or plan.host_cost):
        click.echo(report.tables(rows))
    if options.plot is not None and rows:
        from .plot import write_plot

        write_plot(rows, listener.title(), options.plot)
        click.echo(f"wrote {options.plot}", err=True)
