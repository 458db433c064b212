"""How far calls have come that run one after another: an event behind each, or behind a few."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from ..driver.api import Driver, Event

__all__ = ["Trail"]

#: Calls under way that are told apart. Of more, the last event is behind all the others.
MOST = 256


class _Mark:
    """An event behind a call, or behind several."""

    __slots__ = ("event", "made")

    def __init__(self, event: Event) -> None:
        self.event = event
        #: When the first of them was made.
        self.made = 0.0


class Trail:
    """Calls of one queue, made by one thread at a time and looked at by another one.

    Without a lock, for a call must cost the host little more than its event, and drivers are not
    called under one. One thread adds marks, the other takes those away that are over, but for the
    newest: so that one may be recorded anew at any time. What they do to the ends of a deque is one
    step each.

    Args:
        driver: Of the device.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._marks: deque[_Mark] = deque()
        self._spare: deque[_Mark] = deque()
        #: When a call was found to be over.
        self._over = 0.0

    def made(self, stream: Any) -> None:
        """A call was put at the end of a stream. On its device."""
        marks, spare = self._marks, self._spare
        if len(marks) >= MOST:
            marks[-1].event.record(stream)
            return
        if spare:
            mark = spare.pop()
            mark.event.record(stream)
        else:
            mark = _Mark(self._driver.record_event(stream))
        mark.made = time.monotonic()
        marks.append(mark)

    def since(self) -> float | None:
        """Since when the first call that is not over may run; None where all are over.

        For one thread.
        """
        marks = self._marks
        while len(marks) > 1 and marks[0].event.done:
            self._over = time.monotonic()
            self._spare.append(marks.popleft())
        if not marks or marks[0].event.done:
            return None
        return max(marks[0].made, self._over)

    @property
    def idle(self) -> bool:
        """Whether all calls are over. For who makes them."""
        return not self._marks or self._marks[-1].event.done
