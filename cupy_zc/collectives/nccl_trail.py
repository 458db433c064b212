"""How far calls have come that run one after another: an event behind each, or each of some."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

from ..driver.api import Driver, Event

__all__ = ["Trail"]

#: Calls that are told apart. Of more that are under way, each event is behind several.
MOST = 64


class _Mark(NamedTuple):
    event: Event
    #: When the call was made.
    made: float


class Trail:
    """Calls of one queue, made by one thread at a time and looked at by any.

    Args:
        driver: Of the device.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._marks: deque[_Mark] = deque()
        self._spare: list[Event] = []
        #: When a call was found to be over.
        self._over = 0.0

    def made(self, stream: Any) -> None:
        """A call was put at the end of a stream. On its device."""
        with self._lock:
            if len(self._marks) >= MOST:
                self._make_room()
            if self._spare:
                event = self._spare.pop()
                event.record(stream)
            else:
                event = self._driver.record_event(stream)
            self._marks.append(_Mark(event, time.monotonic()))

    def _make_room(self) -> None:
        """Forget half of them: what is over, or every other one."""
        marks = list(self._marks)
        half = len(marks) // 2
        if marks[half].event.done:
            self._over = time.monotonic()
            gone, kept = marks[: half + 1], marks[half + 1 :]
        else:
            gone, kept = marks[::2], marks[1::2]
        self._marks = deque(kept)
        self._spare += [mark.event for mark in gone]

    def since(self) -> float | None:
        """Since when the first call that is not over may run; None where all are over."""
        with self._lock:
            marks = self._marks
            while marks and marks[0].event.done:
                self._spare.append(marks.popleft().event)
                self._over = time.monotonic()
            return max(marks[0].made, self._over) if marks else None

    @property
    def idle(self) -> bool:
        """Whether all calls are over."""
        with self._lock:
            return not self._marks or self._marks[-1].event.done
