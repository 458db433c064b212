"""Graphs that have calls of NCCL: whether there are any, and what is held in their names."""

from __future__ import annotations

from collections.abc import Callable

from ..driver.api import CaptureInfo, Driver, GraphLease

__all__ = ["Graphs"]


class Graphs:
    """The graphs of one engine. Collectives have a lane, which tells of the end of its graph.

    Point-to-point calls have none, so the driver is asked.

    Args:
        driver: Of the device.
        let_go: Called when a graph is gone, with what was held in its name; from any thread.
    """

    def __init__(self, driver: Driver, let_go: Callable[[object], None]) -> None:
        self._driver = driver
        self._let_go = let_go
        self._lanes: dict[int, object] = {}
        #: By capture.
        self._mail: dict[int, GraphLease] = {}

    def begin(self, lane: int) -> None:
        """A lane has a graph."""
        self._lanes[lane] = object()

    def end(self, lane: int) -> None:
        """It has none any more. From any thread."""
        self._let_go(self._lanes.pop(lane))

    def holder(self, lane: int) -> object:
        """In whose name something is held for a lane."""
        return self._lanes[lane]

    def holder_of_mail(self, capture: CaptureInfo) -> object:
        """In whose name something is held for point-to-point calls of a capture."""
        if capture.id not in self._mail:
            self._mail[capture.id] = self._driver.lease_graph(capture.graph)
        return self._mail[capture.id]

    def alive(self) -> bool:
        """Whether there are any. From any thread."""
        for capture in list(self._mail):
            token = self._mail.get(capture)  # of two threads, one takes it out
            if token is not None and token.released and self._mail.pop(capture, None) is token:
                self._let_go(token)
        return bool(self._lanes or self._mail)
