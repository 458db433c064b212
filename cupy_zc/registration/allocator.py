"""The state machine that gives every rank the same offsets, whoever drops what when.

It is pure: every rank runs one, and feeds it with the same calls in the same order. Nothing in it
depends on when a garbage collector ran; it is told of drops by messages that all ranks see.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from ..errors import MismatchError

__all__ = ["SymmetricAllocator", "SymmetricBlock"]


class SymmetricBlock:
    """A run of bytes that every rank has at the same offset."""

    __slots__ = ("holders", "number", "offset", "segment", "size")

    def __init__(
        self, number: int, segment: int, offset: int, size: int, holders: Iterable[int]
    ) -> None:
        #: Which allocation it is, from 0; never given again.
        self.number = number
        #: Offset of the segment it is in.
        self.segment = segment
        #: From the base of the arena, in bytes.
        self.offset = offset
        self.size = size
        #: Ranks that have not dropped it.
        self.holders = set(holders)


class SymmetricAllocator:
    """First fit with merging over segments; a block is free once every rank has dropped it.

    Args:
        ranks: All ranks.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = tuple(ranks)
        self._next = 0
        self._blocks: dict[int, SymmetricBlock] = {}
        #: By offset of the segment: its free runs as (offset, size), sorted.
        self._holes: dict[int, list[tuple[int, int]]] = {}

    def grow(self, offset: int, size: int) -> None:
        """Add a segment."""
        self._holes[offset] = [(offset, size)]

    def allocate(self, size: int) -> SymmetricBlock | None:
        """The lowest ``size`` bytes that are free in one segment; None where there are none."""
        for segment in sorted(self._holes):
            holes = self._holes[segment]
            for at, (offset, room) in enumerate(holes):
                if room < size:
                    continue
                holes[at : at + 1] = [(offset + size, room - size)] if room > size else []
                block = SymmetricBlock(self._next, segment, offset, size, self._ranks)
                self._next += 1
                self._blocks[block.number] = block
                return block
        return None

    def drop(self, rank: int, numbers: Iterable[int]) -> None:
        """A rank has dropped blocks.

        Raises:
            MismatchError: one of them is not the rank's to drop.
        """
        for number in numbers:
            block = self._blocks.get(number)
            if block is None or rank not in block.holders:
                raise MismatchError(
                    f"rank {rank} dropped symmetric block {number}, which it does not hold; "
                    "the ranks are not at the same allocation"
                )
            block.holders.discard(rank)
            if not block.holders:
                del self._blocks[number]
                self._free(block)

    def blocks(self) -> tuple[SymmetricBlock, ...]:
        """Blocks that some rank holds, in the order they were made."""
        return tuple(self._blocks.values())

    def holes(self) -> list[tuple[int, int]]:
        """Free runs as (offset, size), sorted; those of two segments are never joined."""
        return [hole for segment in sorted(self._holes) for hole in self._holes[segment]]

    def _free(self, block: SymmetricBlock) -> None:
        holes = self._holes[block.segment]
        start, end = block.offset, block.offset + block.size
        at = bisect.bisect_left(holes, (start, 0))
        first = last = at
        if at and sum(holes[at - 1]) == start:
            first, start = at - 1, holes[at - 1][0]
        if at < len(holes) and holes[at][0] == end:
            last, end = at + 1, sum(holes[at])
        holes[first:last] = [(start, end - start)]
