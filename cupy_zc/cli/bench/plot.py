"""The picture of a run: time and bus bandwidth against size, of all engines, and the ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogFormatter

from .report import Row, show_bytes

__all__ = ["write_plot"]

#: Colours that people who do not see all colours can tell apart (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
_WIDTH, _HEIGHT = 10.0, 3.6


def write_plot(rows: Sequence[Row], about: str, path: Path) -> None:
    """Draw figures into a PNG or an SVG, by the suffix of the file.

    Args:
        rows: Of one run; a collective is a row of the picture.
        about: Machine and settings, for the title.
        path: Where.

    Raises:
        OSError: the file cannot be written.
    """
    figures = [row for row in rows if "us" in row and row["metric"] != "host_us"]
    kinds = list(dict.fromkeys(row["collective"] for row in figures)) or [""]
    colours = dict(zip(dict.fromkeys(row["engine"] for row in figures), _COLOURS * 9, strict=False))
    best = max((row["both_gbps"] for row in rows if row["metric"] == "ceiling"), default=None)
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(kinds) + 0.7), layout="constrained")
    figure.suptitle(about, fontsize=9)
    grid = figure.subplots(len(kinds), 2, squeeze=False)
    for kind, (left, right) in zip(kinds, grid, strict=True):
        of_kind = [row for row in figures if row["collective"] == kind]
        left.set_title(f"{kind}: time of a call, us", fontsize=9)
        right.set_title(f"{kind}: bus bandwidth, GB/s", fontsize=9)
        left.set_yscale("log")
        left.yaxis.set_major_formatter(LogFormatter())
        left.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        for engine, colour in colours.items():
            for in_place in (False, True):
                series = [
                    row
                    for row in of_kind
                    if row["engine"] == engine and row["in_place"] is in_place
                ]
                _draw(left, right, series, colour, "--" if in_place else "-")
        if best is not None:
            right.axhline(best, color="#444444", linestyle=":", linewidth=1.2)
        for axes in (left, right):
            _size_axis(axes)
    handles = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    handles += _styles(figures, best)
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150, format=path.suffix.lower().removeprefix("."))


def _draw(left: Axes, right: Axes, series: Sequence[Row], colour: str, style: str) -> None:
    if not series:
        return
    series = sorted(series, key=lambda row: row["bytes"])
    sizes = [row["bytes"] for row in series]
    look: dict[str, Any] = {"color": colour, "linestyle": style, "marker": ".", "linewidth": 1.4}
    left.plot(sizes, [row["us"] for row in series], **look)
    least, most = ([row[name] for row in series] for name in ("least_us", "most_us"))
    left.fill_between(sizes, least, most, color=colour, alpha=0.12, linewidth=0)
    right.plot(sizes, [row.get("bus_gbps", 0.0) for row in series], **look)


def _size_axis(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: show_bytes(int(size) or 1)))
    axes.set_xlabel("size", fontsize=8)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(visible=True, which="major", linewidth=0.4, alpha=0.5)


def _styles(figures: Sequence[Row], best: float | None) -> list[Line2D]:
    """The rest of the legend: what a line that is broken means."""
    handles = []
    if any(row["in_place"] for row in figures):
        handles.append(Line2D([], [], color="#444444", linestyle="--", label="in place"))
    if best is not None:
        words = f"ceiling, {best:.4g} GB/s"
        handles.append(Line2D([], [], color="#444444", linestyle=":", label=words))
    return handles
