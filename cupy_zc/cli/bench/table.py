"""The table of nccl-tests: a line for each size, and here for each engine.

The columns are theirs, in their order, so that what reads their output reads this as well; the
engine is the last one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from .report import Row

__all__ = ["about", "averages", "header", "lines", "wrong"]

_HALF = f"{'time':>9}{'algbw':>9}{'busbw':>9}{'#wrong':>8}"
_UNITS = f"{'(us)':>9}{'(GB/s)':>9}{'(GB/s)':>9}{'':>8}"
_LEFT = f"{'size':>12}{'count':>14}{'type':>10}{'redop':>8}{'root':>6}"


def header(collective: str, about: str) -> str:
    """What stands above the lines of a collective."""
    left = f"{'(B)':>12}{'(elements)':>14}{'':>24}"
    return "\n".join(
        [
            f"# {collective}: {about}",
            f"#{'':49}{'out-of-place':^35}{'in-place':^35}".rstrip(),
            f"#{_LEFT[1:]}{_HALF}{_HALF}  engine",
            f"#{left[1:]}{_UNITS}{_UNITS}".rstrip(),
        ]
    )


def lines(rows: Iterable[Row]) -> list[str]:
    """The lines of one size of a collective: one for each engine, in the order of the rows."""
    halves: dict[str, dict[bool, Row]] = {}
    for row in rows:
        halves.setdefault(row["engine"], {})[row["in_place"]] = row
    return [_line(name, of_engine) for name, of_engine in halves.items()]


def _line(engine: str, halves: dict[bool, Row]) -> str:
    row = next(iter(halves.values()))
    op = row["op"] or "none"
    root = -1 if row["root"] is None else row["root"]
    left = f"{row['bytes']:>12}{row['count']:>14}{row['dtype']:>10}{op:>8}{root:>6}"
    return f"{left}{_half(halves.get(False))}{_half(halves.get(True))}  {engine}"


def _half(row: Row | None) -> str:
    if row is None or "us" not in row:
        count = wrong(row) if row is not None else None
        return f"{'-':>9}{'-':>9}{'-':>9}{'N/A' if count is None else count:>8}"
    time = f"{row['us']:.2f}" if row["us"] < 1e5 else f"{row['us']:.0f}"
    alg, bus = row.get("alg_gbps", 0.0), row.get("bus_gbps", 0.0)
    count = wrong(row)
    return f"{time:>9}{alg:>9.2f}{bus:>9.2f}{'N/A' if count is None else count:>8}"


def wrong(row: Row) -> int | None:
    """How many elements of all ranks were wrong; None where nobody looked."""
    if row.get("correct") is False:
        count: int = row["wrong"]
        return count
    return 0 if row.get("checked") else None


def averages(rows: Sequence[Row]) -> list[str]:
    """What stands below a table: how many elements were wrong, and the mean bus bandwidth."""
    total = sum(wrong(row) or 0 for row in rows)
    said = [f"# Wrong elements : {total} {'FAILED' if total else 'OK'}"]
    for name in dict.fromkeys(row["engine"] for row in rows):
        rates = [row["bus_gbps"] for row in rows if row["engine"] == name and "bus_gbps" in row]
        if rates:
            said.append(f"# Avg bus bandwidth : {statistics.mean(rates):.4g} GB/s  {name}")
    return said


def about(row: Row, driver: str) -> str:
    """What is alike in all lines of a table."""
    how = {"device_us": "calls of a CUDA graph", "eager_us": "eager calls"}[row["metric"]]
    if driver == "host":
        how = "calls"
    return f"{row['ranks']} ranks, {driver} driver; medians of rounds of {how}"
