"""The flags of ``cupy-zc bench``, and the plan they make. Letters are those of nccl-tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ...config import settings
from .api import COLLECTIVES, DTYPES, OPS
from .engines import ENGINES, GROUPS
from .listener import STDOUT
from .report import SUFFIXES, number_of_bytes, show_bytes
from .tuning import COLLECTIVES as TUNED
from .tuning import FORCED
from .worker import Plan, smallest

__all__ = ["Options", "flags", "plan_of", "sizes"]

#: What is measured beside this package unless told otherwise, and the largest size.
_PEERS = {"cuda": ("nccl", "nccl-window", *GROUPS["torch"]), "host": ("mpi",)}
_LAST = {"cuda": 256 << 20, "host": 16 << 20}
#: What nccl-tests calls types.
_TYPES_OF_NCCL = {"float": "float32", "double": "float64", "half": "float16"}
#: Words for all collectives, and for no other engine.
_ALL, _NONE = "all", "none"


@dataclass(frozen=True, slots=True)
class Options:
    """The values of the flags."""

    first: int
    last: int | None
    factor: int
    iterations: int | None
    warm_up: int
    check: str
    dtype: str
    op: str
    ranks: int | None
    root: int
    collectives: tuple[str, ...]
    against: tuple[str, ...] | None
    engines: tuple[str, ...] | None
    driver: str
    graph: bool
    in_place: bool
    host_cost: bool
    plot: Path | None
    json: Path | None
    tune: Path | None
    deadline: float


def _size(text: str) -> int:
    try:
        return number_of_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _names(
    allowed: Sequence[str], groups: Mapping[str, tuple[str, ...]], *, classes: bool = False
) -> Callable[[str], tuple[str, ...]]:
    """A reader of names with commas between them.

    Args:
        allowed: The names.
        groups: Names for several of them, or for none.
        classes: Whether ``module:class`` is a name too.
    """

    def parse(text: str) -> tuple[str, ...]:
        found: list[str] = []
        for name in map(str.strip, text.split(",")):
            if name in groups:
                found += groups[name]
            elif name in allowed or (classes and ":" in name):
                found.append(name)
            else:
                known = ", ".join([*allowed, *groups])
                raise click.BadParameter(f"{name!r} is none of {known}")
        return tuple(dict.fromkeys(found))

    return parse


def _dtype(text: str) -> str:
    name = _TYPES_OF_NCCL.get(text, text)
    if name not in DTYPES:
        known = ", ".join([*DTYPES, *_TYPES_OF_NCCL])
        raise click.BadParameter(f"{text!r} is none of {known}")
    return name


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in SUFFIXES:
        raise click.BadParameter(f"{text!r} ends neither in {' nor in '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(path.parent)!r}")
    return path


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise click.BadParameter(f"{text!r} is no positive number of seconds")
    return number


_OPTION = click.option
_FLAGS = (
    _OPTION("-b", "first", type=_size, metavar="SIZE", default="1K", help="Smallest size (1K)."),
    _OPTION(
        "-e", "last", type=_size, metavar="SIZE", help="Largest size (256M; host driver: 16M)."
    ),
    _OPTION("-f", "factor", type=click.IntRange(2), default=4, help="From size to size (4)."),
    _OPTION(
        "-n", "iterations", type=click.IntRange(1),
        help="Calls that are timed together (20; 4 above 16M). Of 7 rounds the median counts.",
    ),
    _OPTION("-w", "warm_up", type=click.IntRange(0), default=3, help="Calls before that (3)."),
    _OPTION(
        "-c", "check", type=click.Choice(["on", "off", "1", "0"]), default="on",
        help="Compare results with a reference (on).",
    ),
    _OPTION(
        "-d", "dtype", type=_dtype, metavar="TYPE", default="float32",
        help=f"One of {', '.join(DTYPES)} (float32).",
    ),
    _OPTION("-o", "op", type=click.Choice(OPS), default="sum", help="Operation (sum)."),
    _OPTION(
        "-g", "ranks", type=click.IntRange(1),
        help="Processes, one for each GPU (all GPUs; host driver: 2).",
    ),
    _OPTION("-r", "root", type=click.IntRange(0), default=0, help="Root, where there is one (0)."),
    _OPTION(
        "--collective", "collectives", metavar="NAMES", default="all_reduce",
        type=_names(COLLECTIVES, {_ALL: COLLECTIVES}),
        help=f"Some of {', '.join(COLLECTIVES)}, with commas between, or all (all_reduce).",
    ),
    _OPTION(
        "--against", metavar="NAMES",
        type=_names(tuple(ENGINES), {**GROUPS, _NONE: ()}, classes=True),
        help=f"What to measure beside cupy-zc: some of {', '.join([*ENGINES, *GROUPS])}, "
        "or module:class, with commas between, or none (nccl,nccl-window,torch; host driver: mpi).",
    ),
    _OPTION(
        "--engines", metavar="NAMES", type=_names(tuple(ENGINES), GROUPS, classes=True),
        help="Exactly what to measure, instead of --against.",
    ),
    _OPTION(
        "--driver", type=click.Choice(["auto", "cuda", "host"]), default="auto",
        help="auto: cuda where there is a GPU, else host (auto).",
    ),
    _OPTION(
        "--graph/--eager",
        help="Replay the calls in a CUDA graph. The host driver repeats calls either way.",
    ),
    _OPTION("--in-place/--no-in-place", default=True, help="Measure in place as well (yes)."),
    _OPTION(
        "--host-cost/--no-host-cost",
        help="Measure the Python thread time of an eager call as well (no).",
    ),
    _OPTION("--plot", type=_picture, metavar="FILE", help="Draw into this file, .png or .svg."),
    _OPTION(
        "--json", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
        help=f"Append a JSON line for each figure to this file; {STDOUT}: to standard output, "
        "and no table.",
    ),
    _OPTION(
        "--tune", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
        help="Measure each algorithm by itself, and write the thresholds between them to this "
        "file, for CUPY_ZC_PLAN.",
    ),
    _OPTION(
        "--deadline", type=_seconds, metavar="SECONDS", default="280",
        help="Seconds for the whole run (280).",
    ),
)  # fmt: skip


def flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all flags, as one argument of type :class:`Options`."""

    @functools.wraps(command)
    def taking(*arguments: Any, **values: Any) -> Any:
        return command(*arguments, Options(**values))

    for flag in reversed(_FLAGS):
        taking = flag(taking)
    return taking


def sizes(first: int, last: int, factor: int) -> tuple[int, ...]:
    """``first``, times ``factor`` again and again, up to ``last``."""
    found = []
    while first <= last:
        found.append(first)
        first *= factor
    return tuple(found)


def gpus() -> int:
    """How many GPUs there are.

    Raises:
        RuntimeError: none that can be used.
    """
    import cupy

    count: int = cupy.cuda.runtime.getDeviceCount()
    return count


def _platform(driver: str) -> tuple[str, int]:
    """The driver to use, and the number of GPUs where that is CUDA."""
    if driver == "auto":
        driver = settings().driver
    if driver == "host":
        return "host", 0
    try:
        return "cuda", gpus()
    except RuntimeError as error:
        if driver == "cuda":
            raise click.UsageError(f"no usable GPU: {error}; --driver host needs none") from error
        click.echo("no GPU: the host driver is measured", err=True)
        return "host", 0


def _tuning_plan(options: Options, platform: str, ranks: int, started: float) -> Plan:
    """What ``--tune`` measures: sizes are the user's, all else is given."""
    if platform != "cuda" or ranks < 2:
        raise click.UsageError("--tune needs two GPUs: the host driver has no such thresholds")
    return Plan(
        ranks=ranks, platform=platform, engines=FORCED,
        collectives=TUNED, sizes=sizes(max(options.first, ranks << 8), options.last or 64 << 20, 2),
        iterations=options.iterations, warm_up=options.warm_up, check=options.check in ("on", "1"),
        dtype="float32", op="sum", root=0, graph=True, placements=(False,), host_cost=False,
        deadline=started + options.deadline,
    )  # fmt: skip


def plan_of(options: Options, started: float) -> Plan:
    """The plan of a command line.

    Raises:
        click.UsageError: it makes no sense here.
    """
    platform, most = _platform(options.driver)
    ranks = options.ranks or most or 2
    if platform == "cuda" and ranks > most:
        raise click.UsageError(f"-g {ranks}: there are {most} GPUs")
    if options.root >= ranks:
        raise click.UsageError(f"-r {options.root}: there are {ranks} ranks")
    if options.engines is not None and options.against is not None:
        raise click.UsageError("--engines says exactly what to measure: leave --against away")
    least, last = smallest(ranks, options.dtype), options.last or _LAST[platform]
    if options.first < least:
        raise click.UsageError(
            f"-b {options.first}: {ranks} ranks of {options.dtype} need {least} bytes"
        )
    if last < options.first:
        raise click.UsageError(f"-e {show_bytes(last)} is less than -b {show_bytes(options.first)}")
    if options.tune is not None:
        return _tuning_plan(options, platform, ranks, started)
    peers = _PEERS[platform] if options.against is None else options.against
    return Plan(
        ranks=ranks,
        platform=platform,
        engines=options.engines or tuple(dict.fromkeys(("cupy-zc", *peers))),
        collectives=options.collectives,
        sizes=sizes(options.first, last, options.factor),
        iterations=options.iterations,
        warm_up=options.warm_up,
        check=options.check in ("on", "1"),
        dtype=options.dtype,
        op=options.op,
        root=options.root,
        graph=options.graph,
        placements=(False, True) if options.in_place else (False,),
        host_cost=options.host_cost,
        deadline=started + options.deadline,
    )
