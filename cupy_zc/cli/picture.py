"""The picture of ``cupy-zc view``: the last frame of a film along the address axis, and its totals.

The page has more; this is for reports and terminals without a browser. Colours are the page's.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ..memory.snapshot import show_bytes
from .growth import Group, growing, key_of, sentence

__all__ = ["write_png"]

USED, GROWS, CAPTURE, FREE = "#0072b2", "#d55e00", "#cc79a7", "#dfe3e8"
REGISTERED, MULTICAST, INK = "#009e73", "#f0e442", "#1b1f24"
#: Rows of the address axis, at most; the height of one in inches, and how much of it is filled.
_ROWS, _INCHES, _FILLED = 12, 0.32, 0.75


def write_png(film: dict[str, Any], found: list[Group], path: Path) -> None:
    """Draw a film into a PNG.

    Raises:
        OSError: the file cannot be written.
    """
    grown = growing(found)
    maps = [_Map(film, device, grown) for device in film["devices"]]
    heights = [each.rows * _INCHES + 0.9 for each in maps]
    moves = len(film["frames"]) > 1
    heights += [2.2] if moves else []
    if not heights:  # a pool that was never used
        heights = [1.0]
    notes = [textwrap.fill(f"GROWS: {sentence(g)}", 120) for g in grown]
    title = "\n".join([film["title"], *notes])
    size = (10, sum(heights) + 0.25 * (title.count("\n") + 3))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=10, ha="left", x=0.02)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for each, place in zip(maps, axes, strict=False):
        each.draw(place)
    if moves:
        _totals(film, axes[-1])
    if not maps:
        axes[0].set_axis_off()
    colours = {"in use": USED, "grows": GROWS, "of a CUDA graph": CAPTURE, "free": FREE}
    colours |= {"registered": REGISTERED, "multicast": MULTICAST}
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=6, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120, format="png")


class _Map:
    """The address axis of one device, broken into rows like text."""

    def __init__(self, film: dict[str, Any], device: dict[str, Any], grown: list[Group]) -> None:
        self._device = device
        self._last = film["frames"][-1]["devices"]
        self._segments = _there(film["segments"], device)
        self._blocks = _there(film["blocks"], device)
        self._grown = {id(b) for b in self._blocks if key_of(film, b) in {g.key for g in grown}}
        extent = max((each["offset"] + each["size"] for each in self._segments), default=0)
        self.row = device["granule"]
        while self.row * _ROWS < extent:
            self.row *= 2
        self.rows = max(1, -(-extent // self.row))

    def draw(self, axes: Axes) -> None:
        """Segments, blocks in them, and what is registered."""
        patches, colours = [], []
        for run, colour, height in self._runs():
            for x, row, width in self._parts(run):
                patches.append(Rectangle((x, row + _FILLED - height), width, height))
                colours.append(colour)
        axes.add_collection(
            PatchCollection(patches, facecolors=colours, edgecolors="white", linewidths=0.3)
        )
        outlines = [
            Rectangle((x, row), width, _FILLED)
            for segment in self._segments
            for x, row, width in self._parts(segment)
        ]
        axes.add_collection(
            PatchCollection(outlines, facecolors="none", edgecolors=INK, linewidths=0.6)
        )
        axes.set_xlim(0, self.row)
        axes.set_ylim(self.rows, -0.1)
        axes.set_yticks([row + _FILLED / 2 for row in range(self.rows)])
        axes.set_yticklabels([f"+{row * self.row:#x}" for row in range(self.rows)], fontsize=7)
        axes.set_xticks([0, self.row / 2, self.row])
        axes.set_xticklabels(["0", show_bytes(self.row / 2), show_bytes(self.row)], fontsize=7)
        axes.set_title(self._title(), fontsize=9, loc="left")

    def _title(self) -> str:
        number = self._device["device"]
        figures = next(each for each in self._last if each["device"] == number)
        return (
            f"device {number}: {show_bytes(figures['used_bytes'])} in use of "
            f"{show_bytes(figures['total_bytes'])}, fragmentation {figures['fragmentation']:.0%}"
        )

    def _runs(self) -> Iterator[tuple[dict[str, Any], str, float]]:
        for segment in self._segments:
            yield segment, FREE, _FILLED
        graphs = [each for each in self._segments if each["capture"] is not None]
        for block in self._blocks:
            at = block["offset"]
            captured = any(s["offset"] <= at < s["offset"] + s["size"] for s in graphs)
            grows = id(block) in self._grown
            yield block, CAPTURE if captured else GROWS if grows else USED, _FILLED
        for segment in self._segments:
            if segment.get("multicast"):
                yield segment, MULTICAST, 0.25
            if segment["registered"]:
                yield segment, REGISTERED, 0.15

    def _parts(self, run: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
        start, end = run["offset"], run["offset"] + run["size"]
        while start < end:
            row = start // self.row
            stop = min(end, (row + 1) * self.row)
            yield start - row * self.row, row, stop - start
            start = stop


def _there(things: list[dict[str, Any]], device: dict[str, Any]) -> list[dict[str, Any]]:
    return [t for t in things if t["to"] is None and t["device"] == device["device"]]


def _totals(film: dict[str, Any], axes: Axes) -> None:
    times = [each["at"] for each in film["frames"]]
    for name, colour, label in (("total_bytes", FREE, "held"), ("used_bytes", USED, "in use")):
        sums = [sum(d[name] for d in each["devices"]) / 2**20 for each in film["frames"]]
        axes.fill_between(times, sums, color=colour, label=label, step="post", linewidth=0)
    axes.set_xlabel("seconds", fontsize=8)
    axes.set_ylabel("MiB", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.margins(x=0)
    axes.legend(fontsize=7, loc="upper left")
