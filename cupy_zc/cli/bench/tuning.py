"""``cupy-zc bench --tune``: each algorithm by itself, and from where one is ahead of another.

The communicators have tables that force an algorithm, whatever the size. What comes out is a file
of thresholds for this number of ranks, which ``CUPY_ZC_PLAN`` names. Multicast is off in a
benchmark, so thresholds of the switch are not among them.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from ...collectives import Communicator
from ...collectives.device_tables import MOST, VERSION, Tables, load_tables
from ...collectives.opening import Options, start
from ...group import from_tcp
from .api import Case
from .own import Registered
from .report import Row

__all__ = [
    "COLLECTIVES", "FORCED", "LINES", "PUSH", "SHOTS", "TWO_STEPS", "Lines", "Push", "Shots",
    "TwoSteps", "most_lines", "thresholds", "write",
]  # fmt: skip

#: What is measured, and the largest row for which lines are tried, in bytes: of two ranks, and of
#: more, whose lanes have a buffer for each peer.
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
MOST_LINES, MOST_LINES_OF_MANY = 64 << 20, 16 << 20


def most_lines(ranks: int) -> int:
    """The largest row for which lines are tried."""
    return MOST_LINES if ranks == 2 else MOST_LINES_OF_MANY


_ONCE = ("ll128_one_step", "ll128_reduce_scatter", "ll128_broadcast", "ll128_row")
_LINES = (*_ONCE, "ll128_two_steps")
#: Collectives whose figures are by the bytes of a row.
_OF_ROWS = ("all_reduce", "broadcast")
_PUSHES = ("push_reduce", "push_reduce_scatter")


class _Forced(Registered):
    """This package, made to take one algorithm."""

    platforms: ClassVar[tuple[str, ...]] = ("cuda",)
    #: Entries of the tables for any number of ranks; others are 0.
    entries: ClassVar[Mapping[str, int]] = {}

    def connect(self, port: int) -> Communicator:
        """A communicator with these tables."""
        ranks = self.context.ranks
        values = {name: {str(ranks): self.entries.get(name, 0)} for name in _PUSHES}
        for name in _LINES:
            values[name] = {str(ranks): min(self.entries.get(name, 0), most_lines(ranks))}
        options = Options.of("bench --tune", backend="device", register="manual")
        options = dataclasses.replace(options, tables=Tables.with_entries("bench --tune", values))
        bootstrap = from_tcp(ranks, self.context.rank, "127.0.0.1", port)
        return start(Communicator, bootstrap, options)


class Lines(_Forced):
    """LL128, all_reduce in one step."""

    entries: ClassVar[Mapping[str, int]] = {
        **dict.fromkeys(_ONCE, MOST_LINES),
        **dict.fromkeys(_PUSHES, MOST),
    }

    def refuses(self, case: Case) -> str:
        """Rows for which lanes would be too large."""
        row = case.nbytes if case.collective in _OF_ROWS else case.nbytes // case.ranks
        too_large = row > most_lines(case.ranks)
        return "a row is too large for lines" if too_large else super().refuses(case)


class TwoSteps(_Forced):
    """LL128 in two steps."""

    entries: ClassVar[Mapping[str, int]] = {"ll128_two_steps": MOST_LINES, "push_reduce": MOST}

    def refuses(self, case: Case) -> str:
        """What has no second step, and rows for which lanes would be too large."""
        if case.collective != "all_reduce" or case.ranks == 2:
            return "only an all_reduce of more than two ranks has two steps"
        return "a row is too large for lines" if case.nbytes > MOST_LINES_OF_MANY else ""


class Shots(_Forced):
    """two_shot and one_shot; what only moves data is pushed."""

    entries: ClassVar[Mapping[str, int]] = dict.fromkeys(_PUSHES, MOST)


class Push(_Forced):
    """push_reduce."""


#: The engines of a tuning run, by the names that they have in figures.
FORCED = tuple(f"{__name__}:{kind.__name__}" for kind in (Lines, TwoSteps, Shots, Push))
LINES, TWO_STEPS, SHOTS, PUSH = FORCED

_Times: TypeAlias = Mapping[int, Mapping[str, float]]


def _ahead_until(times: _Times, one: str, others: Sequence[str]) -> int:
    """The largest size up to which one engine is ahead of others at every size; 0 for none."""
    until = 0
    for size in sorted(times):
        here = times[size]
        if here.get(one, MOST) > min((here[name] for name in others if name in here), default=0):
            break
        until = size
    return until


def _ahead_from(times: _Times, one: str, other: str) -> int:
    """The smallest size from which one engine is ahead of another at every size; MOST for none."""
    start_at = MOST
    for size in sorted(times, reverse=True):
        if times[size].get(one, MOST) > times[size].get(other, MOST):
            break
        start_at = size
    return start_at


def thresholds(rows: Sequence[Row], ranks: int) -> dict[str, dict[str, int]]:
    """The tables for a number of ranks, as in a file; of figures of all engines of :data:`FORCED`.

    Args:
        rows: Figures.
        ranks: How many there were.
    """
    times: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row.get("metric") == "device_us" and row.get("us") is not None:
            rows_of = 1 if row["collective"] in _OF_ROWS else ranks
            times[row["collective"]][row["bytes"] // rows_of][row["engine"]] = row["us"]
    reduced, scattered, gathered, spread = (times[name] for name in COLLECTIVES)
    either = {
        size: {**here, LINES: min(here.get(LINES, MOST), here.get(TWO_STEPS, MOST))}
        for size, here in reduced.items()
    }
    found = {
        "ll128_one_step": _ahead_until(reduced, LINES, (TWO_STEPS, SHOTS, PUSH)),
        "ll128_two_steps": _ahead_until(either, LINES, (SHOTS, PUSH)),
        "ll128_reduce_scatter": _ahead_until(scattered, LINES, (SHOTS, PUSH)),
        "ll128_broadcast": _ahead_until(spread, LINES, (SHOTS,)),
        "ll128_row": _ahead_until(gathered, LINES, (SHOTS,)),
        "push_reduce": _ahead_from(reduced, PUSH, SHOTS),
        "push_reduce_scatter": _ahead_from(scattered, PUSH, SHOTS),
    }
    return {name: {str(ranks): value} for name, value in found.items()}


def write(path: Path, tables: Mapping[str, Mapping[str, int]], about: Mapping[str, Any]) -> None:
    """Write thresholds; those of other numbers of ranks in the file stay.

    Raises:
        InvalidValueError: there is a file, and it is none of tables. OSError: it cannot be written.
    """
    content: dict[str, Any] = {"version": VERSION, "tables": {}}
    if path.exists():
        load_tables(str(path))
        content = json.loads(path.read_text(encoding="utf-8"))
    content["measured"] = dict(about)
    for name, entries in tables.items():
        content["tables"].setdefault(name, {}).update(entries)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    load_tables(str(path))
