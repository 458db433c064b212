"""Events of the host driver, with the interface of CuPy's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..config import settings
from .host_graph import CapturedPoint
from .host_queue import Point
from .host_result import Result, refused

if TYPE_CHECKING:
    from .host_stream import HostStreams

__all__ = ["HostEvent"]


class HostEvent:
    """A point in a stream, with the interface of ``cupy.cuda.Event``; done before it is recorded.

    Args:
        streams: The driver's streams.
    """

    def __init__(self, streams: HostStreams) -> None:
        self.streams = streams
        self.at: Point | CapturedPoint | None = None

    def record(self, stream: Any = None) -> None:
        """Record it at the end of ``stream`` (None: the current one), in place of what it was."""
        call = "cuEventRecord"
        if stream is None:
            stream = self.streams.current_stream()
        self.at = self.streams.resolve(call, stream).point(call)

    @property
    def done(self) -> bool:
        """Whether the stream has passed it."""
        point = self._outside_capture("cuEventQuery")
        return point is None or point.done

    def synchronize(self) -> None:
        """Wait until the stream has passed it, at most ``settings().timeout``."""
        call = "cuEventSynchronize"
        point = self._outside_capture(call)
        if point is not None:
            point.wait(call, repr(self), time.monotonic() + settings().timeout)

    def _outside_capture(self, call: str) -> Point | None:
        if isinstance(self.at, CapturedPoint):
            cause = "the event was recorded in a capture, so it never happens by itself"
            raise refused(call, Result.CAPTURED_EVENT, repr(self), cause)
        return self.at
