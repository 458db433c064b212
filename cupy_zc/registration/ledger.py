"""Which segments all ranks have at the same place: pure, and the same on every rank.

Every rank keeps one and feeds it with what all ranks heard at agreed points, so all of them know
the same without asking. Numbers of arenas count on each rank for itself; that they mean the same
memory is what equal offsets and sizes make of them, and nothing depends on it: what is bound
together is only ever used together where every rank names the same arena and offset in a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .agreed import News

__all__ = ["Ledger", "Place"]


class Place(NamedTuple):
    """Where a segment begins."""

    arena: int
    offset: int


class Ledger:
    """What every rank has published.

    Args:
        ranks: In their order.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        #: Of each rank: size and generation by place.
        self._published: dict[int, dict[Place, tuple[int, int]]] = {rank: {} for rank in ranks}
        #: Bytes of each arena of each rank.
        self._arenas: dict[int, dict[int, int]] = {rank: {} for rank in ranks}

    def release(self, said: Mapping[int, News]) -> None:
        """Take out what ranks released. To hear of it again changes nothing."""
        for rank, news in said.items():
            published = self._published[rank]
            for name in news.released:
                place = Place(name.arena, name.offset)
                if published.get(place, (0, None))[1] == name.generation:
                    del published[place]
            for arena in news.retired:
                self._arenas[rank].pop(arena, None)
                for place in [each for each in published if each.arena == arena]:
                    del published[place]

    def add(self, said: Mapping[int, News]) -> None:
        """Enter what ranks published."""
        for rank, news in said.items():
            for offer in news.offers:
                place = Place(offer.name.arena, offer.name.offset)
                self._published[rank][place] = (offer.size, offer.name.generation)
                self._arenas[rank][offer.name.arena] = offer.arena_size

    def room(self, arena: int) -> int:
        """Bytes that an arena has on every rank."""
        return min(sizes.get(arena, 0) for sizes in self._arenas.values())

    def common(self) -> dict[Place, int]:
        """Bytes of what all ranks have at the same place and in the same size, by place, in order.

        Generations may differ: they count on each rank for itself, and one that once failed to
        grow, or grew more, is ahead for ever. A segment that takes the place of another one is
        published when that one was released, so it is not taken for it.
        """
        first, *others = self._published.values()
        return {
            place: size
            for place, (size, _) in sorted(first.items())
            if all(place in each and each[place][0] == size for each in others)
        }
