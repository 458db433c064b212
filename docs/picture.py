"""The one picture: arenas, mirrored at the same offsets in the process of every rank.

python docs/picture.py    # writes docs/images/mirrored-ranges.svg
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["FILE", "draw"]

FILE = Path(__file__).parent / "images" / "mirrored-ranges.svg"

#: Pixels: of an arena, of a row, and of the whole.
LENGTH, ROW, WIDTH, HEIGHT = 320, 62, 840, 385
#: The offset that is marked, in parts of an arena.
AT = 0.44
COLOURS = ("#2f6fb0", "#c46a1b")


class Segment(NamedTuple):
    """A segment, in parts of its arena."""

    offset: float
    size: float
    name: str
    registered: bool


ARENAS = (
    (Segment(0, 0.25, "a", True), Segment(0.25, 0.25, "b", True), Segment(0.5, 0.2, "c", False)),
    (Segment(0, 0.25, "d", True), Segment(0.25, 0.4, "e", True)),
)


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{f" {style}" if style else ""}>{words}</text>'


def _range(x: float, y: float, owner: int, *, own: bool) -> list[str]:
    """An address range: the arena of ``owner``, or its mirror, where only part of it is mapped."""
    parts = [f'<rect x="{x:g}" y="{y:g}" width="{LENGTH}" height="26" class="range"/>']
    for segment in ARENAS[owner]:
        if own or segment.registered:
            left, wide = x + segment.offset * LENGTH, segment.size * LENGTH
            fill = f'fill="{COLOURS[owner]}" fill-opacity="{1 if segment.registered else 0.4}"'
            parts.append(
                f'<rect x="{left:g}" y="{y:g}" width="{wide:g}" height="26" {fill} class="seg"/>'
            )
            parts.append(_text(left + wide / 2, y + 18, segment.name, 'class="in"'))
    return parts


def _offset(x: float, y: float, down: float) -> str:
    """A mark at the offset that the picture is about."""
    at = x + AT * LENGTH
    return f'<line x1="{at:g}" y1="{y - 4:g}" x2="{at:g}" y2="{y + down:g}" class="offset"/>'


def _process(x: float, rank: int) -> list[str]:
    peer = 1 - rank
    parts = [_text(x, 60, f"process of rank {rank}", 'class="head"')]
    rows = (
        (f"local_base: its own arena, where rank {rank} allocates", rank, True),
        (f"peer_base[{peer}]: the arena of rank {peer}, mirrored", peer, False),
    )
    for number, (words, owner, own) in enumerate(rows):
        y = 100 + number * ROW
        parts += [_text(x, y - 8, words), *_range(x, y, owner, own=own), _offset(x, y, 30)]
    y = 100 + 2 * ROW
    parts.append(_text(x, y - 8, "multicast_base: one range for all, for NVLink SHARP"))
    parts.append(f'<rect x="{x:g}" y="{y:g}" width="{LENGTH}" height="26" class="later"/>')
    parts.append(_offset(x, y, 44))
    parts.append(_text(x + AT * LENGTH, y + 56, "offset", 'class="mid"'))
    return parts


def draw() -> str:
    """The picture as SVG."""
    notes = (
        "One colour, one letter: the same physical memory. A segment keeps its offset everywhere.",
        "Pale: a segment that is not registered. The peers have not mapped it.",
        "Bases never move while a communicator lives, so base + offset stays true in a CUDA graph.",
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"',
        '  font-family="sans-serif" font-size="12" fill="#222">',
        "<title>Mirrored ranges: every rank maps the registered segments of its peers at the same "
        "offsets</title>",
        "<style>.range{fill:#f2f2f2;stroke:#777}.later{fill:none;stroke:#777;stroke-dasharray:5 4}"
        ".seg{stroke:#fff}.in{fill:#fff;text-anchor:middle;font-weight:bold}"
        ".mid{text-anchor:middle;font-style:italic}.head{font-weight:bold;font-size:15px}"
        ".offset{stroke:#111;stroke-width:2}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(50, 30, "addresses grow to the right", 'font-style="italic"'),
        *_process(50, 0),
        *_process(460, 1),
        *(_text(50, 318 + 22 * number, words) for number, words in enumerate(notes)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(draw())
