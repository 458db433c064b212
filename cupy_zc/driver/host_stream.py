"""Streams of the host driver, with the interface of CuPy's.

Differences from CUDA, on purpose: the null stream is a queue like any other (it does not
synchronise with the others), and work that runs at once raises to its caller. The exception of
*queued* work is kept and raised by the next ``synchronize()`` of its stream; work behind it runs.
:mod:`.host_queue` says when work runs, and in which thread.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..config import settings
from ..errors import InvalidTypeError
from .api import CaptureInfo
from .host_event import HostEvent
from .host_graph import Capture, CapturedPoint, HostGraph, Mode
from .host_queue import Hold, Point, Work, WorkQueue
from .host_result import Result, refused

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["HostStream", "HostStreams"]

#: CUDA gives the numbers 0, 1 and 2 a meaning.
_pointers = itertools.count(0x1000, 0x10)


class _ThreadState(threading.local):
    """A thread's current device, and the current stream of each device.

    The collector may run what asks for them while a thread's own ones are being made.
    """

    device = 0

    def __init__(self, null: tuple[HostStream, ...]) -> None:
        self.device = 0
        self.stream = null[0]
        self.of_device = list(null)
        self._blocks = [[stream] for stream in null]
        self._devices: list[int] = []

    def use(self, stream: HostStream) -> None:
        """Make a stream current on its device."""
        self.of_device[stream.device_id] = stream
        self.stream = self.of_device[self.device]

    def enter(self, stream: HostStream) -> None:
        """Make a stream current for a ``with`` block."""
        self._devices.append(stream.device_id)
        self._blocks[stream.device_id].append(stream)

    def leave(self) -> None:
        """Back to the stream of the block around it; as in CuPy, what ``use()`` set is lost."""
        blocks = self._blocks[self._devices.pop()]
        blocks.pop()
        self.use(blocks[-1])


class HostStreams:
    """All streams of one driver: what they share.

    Args:
        devices: How many devices; each has a null stream of its own.
    """

    def __init__(self, devices: int) -> None:
        #: Guards every field of every stream and capture of the driver; work runs without it.
        self.changed = threading.Condition()
        #: ``ptr`` of the streams that take part in a capture, invalidated or not.
        self.capturing: set[int] = set()
        #: The captures that were begun and not ended; weak, because a stream can be dropped.
        self.captures: weakref.WeakSet[Capture] = weakref.WeakSet()
        #: The queues of each device. A queue outlives its stream while it has work.
        self.queues: tuple[weakref.WeakSet[WorkQueue], ...] = tuple(
            weakref.WeakSet() for _ in range(devices)
        )
        self.null = tuple(HostStream(self, device, null=True) for device in range(devices))
        self.state = _ThreadState(self.null)

    def current_stream(self) -> HostStream:
        """The calling thread's current stream on its current device."""
        try:
            return self.state.stream
        except AttributeError:  # a finalizer asks, in the middle of the thread's first question
            return self.null[0]

    def current_device(self) -> int:
        """The calling thread's current device."""
        return self.state.device

    @contextmanager
    def use_device(self, device: int) -> Iterator[None]:
        """Make a device current in the calling thread."""
        before = self.state.device
        self.make_current(device)
        try:
            yield
        finally:
            self.make_current(before)

    def make_current(self, device: int) -> None:
        """As :meth:`use_device`, until another device is made current."""
        self.state.device, self.state.stream = device, self.state.of_device[device]

    def resolve(self, call: str, stream: Any) -> HostStream:
        """The stream of this driver that a caller means; any with ``ptr`` 0 is the null stream.

        Raises:
            InvalidTypeError: it is no stream. DriverError: it is one of another driver.
        """
        if isinstance(stream, HostStream):
            if stream.streams is self:
                return stream
            cause = "the stream belongs to another driver; make one with this driver's make_stream"
            raise refused(call, Result.INVALID_HANDLE, repr(stream), cause)
        if getattr(stream, "ptr", None) == 0:
            return self.null[self.state.device]
        raise InvalidTypeError(call, "stream", stream, "a stream of the host driver")

    def synchronize(self, device: int) -> None:
        """Wait for all work of a device; what is being captured is none yet."""
        with self.changed:
            queues = tuple(self.queues[device])
        deadline = time.monotonic() + settings().timeout
        for queue in queues:
            queue.wait("cuCtxSynchronize", deadline)

    def forget_threads(self) -> None:
        """In a forked child: work that other threads of the parent were running is not run here."""
        for queues in self.queues:
            for queue in tuple(queues):
                queue.forget_runner()


class HostStream:
    """A queue of work, with the interface of ``cupy.cuda.Stream``.

    Args:
        streams: The driver's streams.
        device: Ordinal of its device.
        null: Whether it is the device's null stream, which has ``ptr`` 0.
        non_blocking: As in CuPy; of no consequence here.
    """

    def __init__(
        self, streams: HostStreams, device: int, *, null: bool = False, non_blocking: bool = False
    ) -> None:
        #: A number of its own; never used again in this process.
        self.ptr = 0 if null else next(_pointers)
        self.device_id = device
        self.is_non_blocking = non_blocking
        self.streams = streams
        self.capture: Capture | None = None
        self._cupy_zc_key = self.ptr
        self._queue = WorkQueue(streams.changed, repr(self))
        with streams.changed:
            streams.queues[device].add(self._queue)

    def __repr__(self) -> str:
        return f"<HostStream {self.ptr:#x} on device {self.device_id}>"

    # The current stream

    def use(self) -> HostStream:
        """Make it the calling thread's current stream."""
        self._make_current()
        return self

    def __enter__(self) -> Self:
        self._make_current()
        self.streams.state.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.streams.state.leave()

    def _make_current(self) -> None:
        state = self.streams.state
        if state.device != self.device_id:
            cause = f"it belongs to device {self.device_id}, and device {state.device} is current"
            raise refused("cuStreamGetCtx", Result.INVALID_CONTEXT, repr(self), cause)
        state.use(self)

    # Work

    def enqueue(self, work: Work) -> None:
        """Run ``work`` in the order of the stream; recorded instead while the stream captures.

        Raises:
            DriverError: the capture was invalidated.
            Exception: what ``work`` raised, if it could run at once.
        """
        self.submit("cuLaunchKernel", work)

    def launch_host_func(self, callback: Callable[[Any], None], arg: Any) -> None:
        """Enqueue ``callback(arg)``."""
        self.submit("cuLaunchHostFunc", functools.partial(callback, arg))

    def submit(self, call: str, work: Work) -> None:
        """As :meth:`enqueue`, under the name of the call that an error shall have."""
        with self.streams.changed:
            if self.capture is not None:
                self.capture.record(call, self, work)
                return
            at_once = self._queue.claim(work)
        if at_once:
            self._queue.run_claimed(work)
        else:
            self._queue.run()  # in case an interrupt left it stalled

    def hold(self) -> Hold:
        """Stop the stream here: later work queues up until the hold is released. For tests."""
        point = Point(self.streams.changed)
        with self.streams.changed:
            self._refuse_in_capture("HostStream.hold")
            self._queue.put_wait(point)
        self._queue.run()
        return Hold(point)

    # Waiting

    @property
    def done(self) -> bool:
        """Whether all work has run. Not to be asked while capturing: it invalidates the capture."""
        with self.streams.changed:
            self._refuse_in_capture("cuStreamQuery")
            return not self._queue.busy

    def synchronize(self) -> None:
        """Wait for all work enqueued so far.

        Raises:
            DriverError: the stream is capturing (which invalidates the capture), the call comes
                from the stream's own work, or ``settings().timeout`` went by.
            Exception: the first that queued work raised since the last call; others are logged.
        """
        call = "cuStreamSynchronize"
        with self.streams.changed:
            self._refuse_in_capture(call)
        self._queue.synchronize(call, time.monotonic() + settings().timeout)

    # Events

    def record(self, event: HostEvent | None = None) -> HostEvent:
        """Record an event (None: a new one) at the end of the stream; returns it."""
        if event is None:
            event = HostEvent(self.streams)
        event.record(self)
        return event

    def record_outside_capture(self) -> HostEvent | None:
        """A new event at the end of the stream; None while capturing, which stays valid."""
        event = HostEvent(self.streams)
        with self.streams.changed:
            if self.capture is not None:
                return None
            event.at = self._queue.put_mark()
        self._queue.run()
        return event

    def point(self, call: str) -> Point | CapturedPoint:
        """Where the stream stands now, for an event."""
        with self.streams.changed:
            if self.capture is not None:
                return self.capture.point(call, self)
        return self._queue.mark()

    def wait_event(self, event: HostEvent) -> None:
        """Let later work wait for an event; a captured event draws the stream into its capture.

        Raises:
            InvalidTypeError: it is no event of a host driver.
            DriverError: the event is of another driver, or the wait would connect a capture with
                work outside of it or with another capture (which invalidates the captures).
        """
        call = "cuStreamWaitEvent"
        if not isinstance(event, HostEvent):
            raise InvalidTypeError(call, "event", event, "an event of the host driver")
        if event.streams is not self.streams:
            cause = "the event belongs to another driver, and streams of two cannot be ordered"
            raise refused(call, Result.INVALID_HANDLE, f"hEvent={event!r}", cause)
        with self.streams.changed:
            if self.capture is not None:
                self.capture.check(call, self)
            at = event.at
            if isinstance(at, CapturedPoint):
                self._join(call, at)
                return
            if at is None:
                return
            if self.capture is not None:
                self.capture.invalidate()
                cause = (
                    "the event was recorded outside the capture; record it inside, or wait before"
                )
                raise refused(call, Result.STREAM_CAPTURE_ISOLATION, repr(self), cause)
            if at.done:
                return
            self._queue.put_wait(at)
        self._queue.run()

    def _join(self, call: str, at: CapturedPoint) -> None:
        if at.capture.ended:
            if self.capture is None:
                cause = "the event was recorded in a capture, so it never happens by itself"
                raise refused(call, Result.CAPTURED_EVENT, repr(self), cause)
            self.capture.invalidate()
            cause = "the event belongs to a capture that has ended"
            raise refused(call, Result.STREAM_CAPTURE_ISOLATION, repr(self), cause)
        at.capture.check(call, self)
        if self.capture is not None and self.capture is not at.capture:
            self.capture.invalidate()
            at.capture.invalidate()
            cause = "the event belongs to another capture, and two captures cannot be merged"
            raise refused(call, Result.STREAM_CAPTURE_MERGE, repr(self), cause)
        if self.ptr == 0:
            at.capture.invalidate()
            cause = "the null stream cannot take part in a capture; use a stream from make_stream"
            raise refused(call, Result.STREAM_CAPTURE_IMPLICIT, repr(self), cause)
        at.capture.join(self, at.frontier)

    # Captures

    def begin_capture(self, mode: int | None = None) -> None:
        """Record work from now on instead of running it.

        Args:
            mode: 0 global, 1 thread-local, 2 relaxed; None is relaxed, as in CuPy.
        """
        call, detail = "cuStreamBeginCapture", f"stream={self.ptr:#x}, mode={mode}"
        if self.ptr == 0:
            cause = "the null stream cannot be captured; use a stream from make_stream"
            raise refused(call, Result.STREAM_CAPTURE_UNSUPPORTED, detail, cause)
        if mode not in (None, Mode.GLOBAL, Mode.THREAD_LOCAL, Mode.RELAXED):
            cause = "the mode must be 0 (global), 1 (thread-local) or 2 (relaxed)"
            raise refused(call, Result.INVALID_VALUE, detail, cause)
        with self.streams.changed:
            if self.capture is not None:
                cause = "the stream is capturing already; end that capture first"
                raise refused(call, Result.ILLEGAL_STATE, detail, cause)
            self.streams.captures.add(Capture(self, Mode.RELAXED if mode is None else mode))

    def end_capture(self) -> HostGraph:
        """End the capture this stream began; returns what was recorded.

        Raises:
            DriverError: no capture, or one that another stream or thread began (it goes on); or it
                was invalidated or a forked stream was not joined (it is over, its work dropped).
        """
        with self.streams.changed:
            if self.capture is None:
                cause = "the stream is not capturing; call begin_capture first"
                raise refused("cuStreamEndCapture", Result.ILLEGAL_STATE, repr(self), cause)
            body, error = self.capture.finish(self)
        if error is None:
            return HostGraph(self.streams, body)
        del body  # what was recorded goes now, not when the error's traceback goes
        raise error

    def is_capturing(self) -> bool:
        """Whether work is being recorded.

        Raises:
            DriverError: the capture was invalidated and has to be ended (CuPy raises here too).
        """
        with self.streams.changed:
            if self.capture is None:
                return False
            self.capture.check("cuStreamIsCapturing", self)
            return True

    def capture_info(self) -> CaptureInfo | None:
        """The capture the stream takes part in, or None.

        Raises:
            DriverError: the capture was invalidated and has to be ended.
        """
        with self.streams.changed:
            return None if self.capture is None else self.capture.info(self)

    def _refuse_in_capture(self, call: str) -> None:
        if self.capture is not None:
            self.capture.check(call, self)
            self.capture.invalidate()
            cause = (
                "the stream is capturing and this cannot be recorded; the capture is invalidated"
            )
            raise refused(call, Result.STREAM_CAPTURE_UNSUPPORTED, repr(self), cause)
