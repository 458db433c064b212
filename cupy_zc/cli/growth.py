"""What is in a pool, in groups of blocks that are alike, and which groups only ever grow."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from ..memory.snapshot import show_bytes

__all__ = ["Group", "Key", "groups", "growing", "key_of", "sentence"]

#: What blocks of a group have in common: device, place (innermost caller first), and the size where
#: the place was not recorded, else 0. A leak of batches of different lengths is one leak.
Key: TypeAlias = "tuple[int, tuple[str, ...], int]"

#: Blocks a group must have gained to be called growing.
LEAST = 3
#: Moments at which groups are counted: looks, evenly over the recording, the last one its end.
MOMENTS = 5


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks from one place of the program, or else of one size, that are there at the end."""

    device: int
    #: The place, innermost caller first; empty where it was not recorded.
    site: tuple[str, ...]
    #: Bytes of the smallest and the largest one, and of all.
    least: int
    most: int
    bytes: int
    count: int
    #: The arrays in them, such as ``float32 (1024, 512)``; empty where nobody looked.
    array: str
    #: The path that keeps them alive, with ``[*]`` for numbers that differ; empty if not known.
    held_by: str
    #: How many others came and went.
    gone: int
    #: Blocks there at each of the moments.
    counts: tuple[int, ...]
    #: Seconds from the first to the last of the moments.
    span: float

    @property
    def key(self) -> Key:
        """See :func:`key_of`."""
        return self.device, self.site, 0 if self.site else self.least

    @property
    def each(self) -> str:
        """The size of one, or the two ends."""
        if self.least == self.most:
            return show_bytes(self.least)
        return f"{show_bytes(self.least)} to {show_bytes(self.most)}"

    @property
    def grows(self) -> bool:
        """Whether it never got smaller, and gained in both halves of the recording."""
        first, middle, last = self.counts[0], self.counts[MOMENTS // 2], self.counts[-1]
        steady = all(before <= after for before, after in pairwise(self.counts))
        return steady and first < middle < last and last - first >= LEAST

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "grows": self.grows}


def key_of(film: dict[str, Any], block: dict[str, Any]) -> Key:
    """The group that a block of a film belongs to."""
    if block["site"] is None:
        return block["device"], (), block["size"]
    return block["device"], tuple(film["sites"][block["site"]]), 0


def groups(film: dict[str, Any]) -> list[Group]:
    """All groups of a film, those with most bytes first."""
    sorted_out: dict[Key, list[dict[str, Any]]] = {}
    for block in film["blocks"]:
        sorted_out.setdefault(key_of(film, block), []).append(block)
    looks = [frame["at"] for frame in film["frames"]]
    moments = [looks[(len(looks) - 1) * (at + 1) // MOMENTS] for at in range(MOMENTS)]
    found = []
    for (device, site, _), blocks in sorted_out.items():
        there = [block for block in blocks if block["to"] is None]
        if not there:
            continue
        arrays = [array for block in there for array in block["arrays"]]
        sizes = [block["size"] for block in there]
        group = Group(
            device=device,
            site=site,
            least=min(sizes),
            most=max(sizes),
            bytes=sum(sizes),
            count=len(there),
            array=_common(f"{a['dtype']} ({', '.join(map(str, a['shape']))})" for a in arrays),
            held_by=_common(re.sub(r"\[\d+\]", "[*]", a["held_by"] or "") for a in arrays),
            gone=len(blocks) - len(there),
            counts=tuple(_count(blocks, at) for at in moments),
            span=moments[-1] - moments[0],
        )
        found.append(group)
    return sorted(found, key=lambda group: (-group.bytes, group.key))


def growing(all_groups: Iterable[Group]) -> list[Group]:
    """The groups that look like a leak."""
    return [group for group in all_groups if group.grows]


def sentence(group: Group) -> str:
    """What is to be said of a group that grows."""
    gained = group.counts[-1] - group.counts[0]
    text = (
        f"{group.count} blocks of {group.each} are in use at the end "
        f"({show_bytes(group.bytes)}), one more every {_duration(group.span / gained)}"
    )
    text += f", {group.gone} given back" if group.gone else ", none given back"
    if group.site:
        text += f". They come from {group.site[0]}"
    if group.array:
        text += f". They hold {group.array}"
    if group.held_by:
        text += f". {group.held_by} keeps them alive"
    return f"{text}."


def _count(blocks: list[dict[str, Any]], at: float) -> int:
    return sum(b["from"] <= at and (b["to"] is None or b["to"] > at) for b in blocks)


def _common(words: Iterable[str]) -> str:
    """The word that there is most of, and how many others there are."""
    count: dict[str, int] = {}
    for word in words:
        count[word] = count.get(word, 0) + 1
    if not count:
        return ""
    most = max(count, key=lambda word: count[word])
    others = len(count) - 1
    return f"{most} and {others} other{'s' * (others > 1)}" if most and others else most


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
