"""From times to figures, from figures to lines of JSON and to tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .api import ROOTED, Case

__all__ = [
    "SUFFIXES",
    "Row",
    "append",
    "ceiling",
    "figure",
    "number_of_bytes",
    "show_bytes",
    "skipped",
    "tables",
]

#: A figure, ready for JSON.
Row = dict[str, Any]

#: Of files that a plot can be written to.
SUFFIXES = (".png", ".svg")

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
#: How much slower than the best peer is still noise.
_NOISE = 1.03


def number_of_bytes(text: str) -> int:
    """``"64K"``, ``"1GiB"`` or ``"1024"`` as bytes.

    Raises:
        ValueError: it is not a positive size.
    """
    word = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = word[-1:] if word[-1:] in ("k", "m", "g") else ""
    digits = word.removesuffix(unit)
    if not (digits.isascii() and digits.isdigit() and int(digits)):
        raise ValueError(f"{text!r} is not a size such as 1024, 64K, 16M or 1G")
    return int(digits) * _UNITS[unit]


def show_bytes(size: int) -> str:
    """``65536`` as ``"64 KiB"``; sizes that are not whole units in bytes."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def _base(case: Case, engine: str, metric: str) -> Row:
    return {
        "metric": metric,
        "engine": engine,
        "collective": case.collective,
        "asked": case.asked,
        "bytes": case.nbytes,
        "dtype": case.dtype,
        "count": case.call_count,
        "op": case.op if case.reduces else None,
        "root": case.root if case.collective in ROOTED else None,
        "in_place": case.in_place,
        "ranks": case.ranks,
    }


def figure(
    case: Case, engine: str, metric: str, times: Sequence[Sequence[float]], calls: int
) -> Row:
    """The median over the rounds of the slowest rank of each.

    Args:
        case: What ran.
        engine: What ran it.
        metric: ``"device_us"``, ``"eager_us"`` or ``"host_us"``.
        times: For each rank, microseconds of one call in each round.
        calls: Calls that were timed together in a round.
    """
    slowest = [max(rounds) for rounds in zip(*times, strict=True)]
    median = statistics.median(slowest)
    row = _base(case, engine, metric) | {
        "us": round(median, 3),
        "least_us": round(min(slowest), 3),
        "most_us": round(max(slowest), 3),
        "rounds": len(slowest),
        "calls": calls,
    }
    if metric != "host_us" and median > 0:
        row["alg_gbps"] = round(case.nbytes / median / 1e3, 2)
        row["bus_gbps"] = round(case.bus_bytes / median / 1e3, 2)
    return row


def skipped(case: Case, engine: str, metric: str, reason: str, *, wrong: int = 0) -> Row:
    """A figure that is not there, and why. ``wrong``: because so many elements were."""
    row = _base(case, engine, metric) | {"skipped": reason}
    return row | {"correct": False, "wrong": wrong} if wrong else row


def ceiling(name: str, nbytes: int, one: float, both: float) -> Row:
    """What the link can do, in GB/s a direction: one direction busy, and both at once."""
    return {
        "metric": "ceiling",
        "name": name,
        "bytes": nbytes,
        "one_gbps": round(one, 1),
        "both_gbps": round(both, 1),
    }


def append(file: Path, row: Row) -> None:
    """Add a figure to a file of JSON lines; at once, so that a run that is killed loses nothing."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


def tables(rows: Iterable[Row], *, ours: str = "cupy-zc") -> str:
    """Figures of the engines beside each other: a table for each collective, then host cost.

    At the end the ceilings.
    """
    rows = list(rows)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["metric"] in ("device_us", "eager_us"):
            where = " in place" if row["in_place"] else ""
            groups.setdefault(f"{row['collective']}{where}, us", []).append(row)
    parts = [_table(title, "asked", of_title, ours) for title, of_title in groups.items()]
    of_host = [row for row in rows if row["metric"] == "host_us"]
    if of_host:
        title = "eager call, us of Python thread time a call"
        parts.append(_table(title, "collective", of_host, ours))
    limits = [row for row in rows if row["metric"] == "ceiling"]
    if limits:
        size = show_bytes(limits[0]["bytes"])
        lines = [f"ceilings, GB/s each direction, {size}", f"{'':22}{'one':>8}{'both':>8}"]
        lines += [f"{r['name']:22}{r['one_gbps']:8.0f}{r['both_gbps']:8.0f}" for r in limits]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _table(title: str, key: str, rows: Sequence[Row], ours: str) -> str:
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    width = max(10, *(len(name) + 2 for name in engines))
    against = any(name.startswith(ours) for name in engines) and len(engines) > 1
    header = f"{'':14}" + "".join(f"{name:>{width}}" for name in engines)
    lines = [title, header + (f"{'to best peer':>14}" if against else "")]
    for value in dict.fromkeys(row[key] for row in rows):
        line = {row["engine"]: row for row in rows if row[key] == value}
        label = show_bytes(value) if isinstance(value, int) else value
        cells = "".join(f"{_cell(line.get(name)):>{width}}" for name in engines)
        ratio = f"{_ratio(line, ours):>14}" if against else ""
        lines.append(f"{label:14}{cells}{ratio}")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None or "us" not in row:
        return "WRONG" if row is not None and row.get("correct") is False else "-"
    return f"{row['us']:.2f}" if row["us"] < 100 else f"{row['us']:.0f}"


def _ratio(line: dict[str, Row], ours: str) -> str:
    """Our best time as a fraction of the best peer's, marked where it is more than noise above."""
    times = {name: row["us"] for name, row in line.items() if row.get("us")}
    own = [time for name, time in times.items() if name.startswith(ours)]
    peers = [time for name, time in times.items() if not name.startswith(ours)]
    if not own or not peers:
        return "-"
    ratio = min(own) / min(peers)
    return f"{ratio:.2f}{' !' if ratio > _NOISE else ''}"
