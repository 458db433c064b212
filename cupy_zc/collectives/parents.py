"""Which call of a communicator the calls of its parts belong to."""

from __future__ import annotations

from .call import Call

__all__ = ["Parents"]

#: Calls that are remembered: more than can be on their way where a rank waits for another one.
_KEPT = 64


class Parents:
    """Which call of a communicator a call of the node's eager lane belongs to."""

    def __init__(self) -> None:
        self._made = 0
        #: Last call of the node, number of the communicator's call, and what that is.
        self._known: list[tuple[int, int, Call]] = []
        self._calls = 0

    def add(self, call: Call, steps: int) -> None:
        """A call of the communicator takes so many of the node."""
        self._calls += 1
        self._made += steps
        self._known = [*self._known[1 - _KEPT :], (self._made, self._calls, call)]

    def of(self, number: int) -> tuple[int, Call] | None:
        """Number and kind of the call that the ``number``-th of the node is part of."""
        for last, parent, call in self._known:
            if number <= last:
                return parent, call
        return None
