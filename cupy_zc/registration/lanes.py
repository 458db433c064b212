"""Who uses which lane: a state machine that is the same on all ranks.

A lane is what an engine needs for the calls of one graph: memory in which the ranks meet. A graph
dies on one rank long before it does on another one, so a lane is given again only when every rank
has said, at an agreed point, that its graph is gone.

Pure, like :mod:`.allocator`: each rank runs one and feeds it with the same messages.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Lanes"]


class Lanes:
    """The lanes of graphs, numbered from 1; lane 0 is that of eager calls, which is not here.

    Args:
        rank: This one.
        ranks: All of them.
    """

    def __init__(self, rank: int, ranks: Iterable[int]) -> None:
        self._rank = rank
        self._ranks = frozenset(ranks)
        #: By lane: the ranks that are not known to have dropped it.
        self._holders: dict[int, set[int]] = {}
        #: What this rank dropped and has not told the others. Appended to by any thread.
        self._dropped: list[int] = []

    def take(self) -> int:
        """The lowest lane that no rank holds; now all hold it. To be called by all ranks alike."""
        lane = next((n for n, holders in self._holders.items() if not holders), None)
        if lane is None:
            lane = 1 + len(self._holders)
        self._holders[lane] = set(self._ranks)
        return lane

    def give_up(self, lane: int) -> None:
        """All ranks take a :meth:`take` back, because what followed failed on one of them."""
        self._holders[lane].clear()

    def drop(self, lane: int) -> None:
        """This rank needs a lane no more. Local, from any thread."""
        self._dropped.append(lane)

    @property
    def dropped(self) -> tuple[int, ...]:
        """What to tell the others at the next agreed point."""
        return tuple(self._dropped)

    def heard(self, rank: int, lanes: Iterable[int]) -> None:
        """What a rank has told all ranks; of this one it is what :attr:`dropped` was."""
        for lane in lanes:
            self._holders[lane].discard(rank)
            if rank == self._rank:
                self._dropped.remove(lane)

    @property
    def held(self) -> tuple[int, ...]:
        """Lanes that some rank is not known to have dropped."""
        return tuple(lane for lane, holders in self._holders.items() if holders)
