"""Captures, graphs and graph leases of the host driver.

A capture records work instead of running it: a list of callables in the order they were enqueued,
each with the earlier ones it depends on. The order is enough to replay; the dependencies tell at
the end whether every forked stream was joined, as CUDA checks it.

All that is recorded hangs on one :class:`GraphBody`. Graphs, executables, parents that launch it as
a child and queued replays hold the body; a lease looks at it through a weak reference, so it can
tell when all of them are gone without any code running in a finalizer.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import DriverError, InvalidTypeError
from .api import CaptureInfo
from .host_queue import Work
from .host_result import Result, refused

if TYPE_CHECKING:
    from .host_stream import HostStream, HostStreams

__all__ = ["Capture", "CapturedPoint", "GraphBody", "HostGraph", "HostLease", "Mode", "lease"]

_ids = itertools.count(1)


class Mode:
    """``CUstreamCaptureMode``: what else may be called while a capture is under way."""

    GLOBAL = 0
    THREAD_LOCAL = 1
    RELAXED = 2


class GraphBody:
    """What was recorded, in order; it lives as long as anything that could still run it."""

    __slots__ = ("__weakref__", "nodes")

    def __init__(self) -> None:
        self.nodes: list[Work] = []

    def replay(self) -> None:
        """Run everything once. The first exception ends the replay."""
        for node in self.nodes:
            node()


@dataclass(frozen=True, slots=True)
class CapturedPoint:
    """Where an event stands that was recorded on a capturing stream."""

    capture: Capture
    frontier: frozenset[int]


class Capture:
    """One capture under way. Every method is called under the lock of the driver's streams.

    Args:
        origin: The stream that begins it.
        mode: One of :class:`Mode`.
    """

    def __init__(self, origin: HostStream, mode: int) -> None:
        self.id = next(_ids)
        self.mode = mode
        self.origin = origin
        self.thread = threading.get_ident()
        self.valid = True
        self.ended = False
        self.body = GraphBody()
        self._parents: list[frozenset[int]] = []
        #: For each stream that takes part, the nodes its next one depends on.
        self._frontiers: dict[HostStream, frozenset[int]] = {}
        self.join(origin, frozenset())

    def join(self, stream: HostStream, frontier: frozenset[int]) -> None:
        """Let a stream's next node depend on ``frontier`` too; it takes part from now on."""
        self._frontiers[stream] = self._frontiers.get(stream, frozenset()) | frontier
        stream.capture = self
        stream.streams.capturing.add(stream.ptr)

    def record(self, call: str, stream: HostStream, work: Work) -> None:
        """Add work of a stream as a node."""
        body = self.check(call, stream)
        self._parents.append(self._frontiers[stream])
        self._frontiers[stream] = frozenset({len(body.nodes)})
        body.nodes.append(work)

    def point(self, call: str, stream: HostStream) -> CapturedPoint:
        """The place where a stream stands now, for an event."""
        self.check(call, stream)
        return CapturedPoint(self, self._frontiers[stream])

    def check(self, call: str, stream: HostStream) -> GraphBody:
        """The graph under construction, where the capture is still valid."""
        if not self.valid:
            cause = "an earlier call broke a rule of captures; end the capture and start again"
            raise refused(call, Result.STREAM_CAPTURE_INVALIDATED, f"stream={stream.ptr:#x}", cause)
        return self.body

    def info(self, stream: HostStream) -> CaptureInfo:
        """Its id and a weak reference to its graph."""
        body = self.check("cuStreamGetCaptureInfo", stream)
        return CaptureInfo(self.id, weakref.ref(body), stream.ptr)

    def invalidate(self) -> None:
        """A rule was broken: nothing more is recorded, and only ``end_capture`` is left to do."""
        self.valid = False

    def finish(self, stream: HostStream) -> tuple[GraphBody, DriverError | None]:
        """End the capture on ``stream``: all its streams leave it.

        Returns:
            What was recorded, and why the caller must drop it, or None. Not raised here: the
            traceback would keep what was recorded alive.

        Raises:
            DriverError: the wrong stream or thread; the capture goes on.
        """
        call, detail = "cuStreamEndCapture", f"stream={stream.ptr:#x}"
        if stream is not self.origin:
            cause = f"the capture began on stream {self.origin.ptr:#x}; end it there"
            raise refused(call, Result.STREAM_CAPTURE_UNMATCHED, detail, cause)
        if self.mode != Mode.RELAXED and threading.get_ident() != self.thread:
            cause = "another thread began it, and the mode is not relaxed; end it in that thread"
            raise refused(call, Result.STREAM_CAPTURE_WRONG_THREAD, detail, cause)
        error = self._failure(call, detail)
        self.valid, self.ended = False, True
        for each in self._frontiers:
            each.capture = None
            each.streams.capturing.discard(each.ptr)
        self._frontiers.clear()
        body, self.body = self.body, GraphBody()
        return body, error

    def _failure(self, call: str, detail: str) -> DriverError | None:
        if not self.valid:
            cause = "an earlier call broke a rule of captures; what was recorded is dropped"
            return refused(call, Result.STREAM_CAPTURE_INVALIDATED, detail, cause)
        before_end = self._before_end()
        unjoined = [hex(each.ptr) for each, at in self._frontiers.items() if not at <= before_end]
        if not unjoined:
            return None
        cause = (
            f"work on the forked streams {', '.join(unjoined)} was not joined: record an event on "
            "each and wait for it on the origin; what was recorded is dropped"
        )
        return refused(call, Result.STREAM_CAPTURE_UNJOINED, detail, cause)

    def _before_end(self) -> set[int]:
        """The nodes that come before whatever the origin would do next."""
        reached: set[int] = set()
        left = list(self._frontiers[self.origin])
        while left:
            node = left.pop()
            if node not in reached:
                reached.add(node)
                left.extend(self._parents[node])
        return reached


class HostGraph:
    """A captured graph that can be launched, as ``cupy.cuda.Graph``."""

    __slots__ = ("_streams", "body")

    def __init__(self, streams: HostStreams, body: GraphBody) -> None:
        self._streams = streams
        self.body = body

    def launch(self, stream: Any = None) -> None:
        """Replay everything in order on ``stream`` (None: the current one).

        On a stream that is being captured the graph becomes a node of that capture.
        """
        call = "cuGraphLaunch"
        if stream is None:
            stream = self._streams.current_stream()
        self._streams.resolve(call, stream).submit(call, self.body.replay)

    def instantiate(self) -> HostGraph:
        """Another executable of the same graph; it lives on without this one."""
        return HostGraph(self._streams, self.body)


class HostLease:
    """Tells when a graph is gone; see :meth:`cupy_zc.driver.api.Driver.lease_graph`."""

    __slots__ = ("_body",)

    def __init__(self, body: weakref.ref[GraphBody]) -> None:
        self._body = body

    @property
    def released(self) -> bool:
        """Whether the graph, its executables, its parents and its queued replays are all gone."""
        return self._body() is None


def lease(graph: object) -> HostLease:
    """A lease on a :class:`HostGraph` or on what :class:`~.api.CaptureInfo` has as its graph.

    Raises:
        InvalidTypeError: it is neither. DriverError: the graph is gone already.
    """
    call = "cuGraphRetainUserObject"
    if isinstance(graph, HostGraph):
        return HostLease(weakref.ref(graph.body))
    if not isinstance(graph, weakref.ref):
        raise InvalidTypeError(call, "graph", graph, "a HostGraph, or the graph of a CaptureInfo")
    if not isinstance(graph(), GraphBody):
        cause = "the graph is gone: its capture failed, or nobody kept it"
        raise refused(call, Result.INVALID_VALUE, f"graph={graph!r}", cause)
    return HostLease(graph)
