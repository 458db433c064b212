"""What lives as long as a CUDA graph, for rooms above this one.

Nothing can run when a graph dies: CUDA forbids it, and it may be the garbage collector that drops
the last reference. So whoever holds memory for a graph leaves a *tie* here, and whenever a pool is
at work anyway, it unties those whose graphs are gone.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Tie", "settle", "tie"]


class Tie(Protocol):
    """Something that is held for a graph."""

    @property
    def released(self) -> bool:
        """Whether the graph and all its executables are gone. Never waits."""
        ...

    def release(self) -> None:
        """Let go of it. Local, from any thread; again does nothing."""
        ...


#: Kept here, so that what a graph uses outlives everything else that knows of it.
_ties: dict[Tie, None] = {}


def tie(held: Tie) -> None:
    """Keep something until its graph is gone."""
    _ties[held] = None


def settle() -> bool:
    """Release what belongs to graphs that are gone; whether there was any. Not for the region."""
    done = False
    for held in list(_ties):
        if held.released:
            held.release()
            _ties.pop(held, None)  # another thread may be at it
            done = True
    return done
