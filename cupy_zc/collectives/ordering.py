"""The order of a communicator's calls: one at a time, streams one behind the other, numbered."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from ..driver.api import Driver
from ..errors import ClosedError, Error, InvalidValueError, NotZeroCopyError
from ..registration import Registry
from .call import BARRIER, Call
from .captured import Counts, Recorder
from .checks import Checker
from .engine import Engine
from .point_to_point import Letter

__all__ = ["Line"]


class Line:
    """Where calls of a communicator line up.

    Args:
        checker: The names of calls, for errors.
        driver: Streams and events.
        registry: Registers at agreed call numbers.
        engine: Knows whether the ranks are in step.
        automatic: Whether calls are numbered at all.
        threads: Whether the ranks are threads, which must not use the null stream.
        strict: Whether to refuse calls that copy.
        timeout: Seconds that another thread may be inside a call.
    """

    def __init__(
        self,
        checker: Checker,
        driver: Driver,
        registry: Registry,
        engine: Engine,
        *,
        automatic: bool,
        threads: bool,
        strict: bool,
        timeout: float,
    ) -> None:
        self.closed = False
        #: The process that it belongs to.
        self.owner = os.getpid()
        #: Of the last call that was not captured.
        self.last_stream: Any = None
        self._checker = checker
        self._driver = driver
        self._registry = registry
        self._engine = engine
        self._automatic = automatic
        self._threads = threads
        self._strict = strict
        self.counts = Counts()
        self._recorder = Recorder(checker, driver, registry, engine, self.counts, strict=strict)
        self._timeout = timeout
        self._lock = threading.RLock()
        self._own_stream: Any = None
        self._event: Any = None

    def enqueue(self, call: str, work: Call | Letter, stream: Any) -> None:
        """Enqueue a call behind this communicator's work on other streams. Under :meth:`turn`.

        Args:
            call: For errors.
            work: The call. Collectives count for registration at agreed call numbers, but for
                barriers and what is captured.
            stream: Where; None for the current stream.
        """
        stream = self.stream(call, stream)
        if self.capturing(stream):
            self._recorder.record(work, stream)
            return
        self._admit(call, work)
        self._registry.leases.glance()
        if isinstance(work, Call):
            numbered = self._automatic and work is not BARRIER
            if numbered:
                self._registry.at_call(self.counts.numbered + 1)
            self.counts.add(numbered)  # a call that ranks disagree on there has no number
        if self._event is not None and self.last_stream is not stream:
            stream.wait_event(self._event)
        self.last_stream = stream
        try:
            self._engine.enqueue(work, stream)
        finally:
            self._event = self._driver.record_event(stream)

    def answer_captures(self, awaited: Collection[int], number: int, call: Call) -> None:
        """Tell ranks that capture while this one waits for them in an eager call. In any thread.

        Args:
            awaited: The ranks waited for.
            number: Of the eager call, from 1.
            call: What it is.
        """
        if self._lock.acquire(blocking=False):  # else somebody is talking to the ranks already
            try:
                self._recorder.answer(awaited, number, call)
            finally:
                self._lock.release()

    def _admit(self, call: str, work: Call | Letter) -> None:
        """Note what is not registered, and refuse it where the user asked for that."""
        places = self._engine.places(work)
        reasons = [place.reason for place in places if place.reason]
        for place in places:
            if place.segment is not None:
                self._registry.touched(place.segment)
        if reasons and self._strict:
            raise NotZeroCopyError(
                f"{self._checker.name(call)}: {'; '.join(reasons)}; register the array, or take it "
                "from empty() of the communicator; explain(array) says more"
            )

    def stream(self, call: str, stream: Any) -> Any:
        """The stream that a caller means, None being the current one.

        Raises:
            InvalidTypeError: it is no stream of the driver. InvalidValueError: it is one of another
                device. DriverError: it is one of another driver.
        """
        current = self._driver.current_stream()
        if stream is None:
            stream = current
        else:
            name, device = self._checker.name(call), self._registry.device
            stream = current.streams.resolve(name, stream)
            if stream.ptr and stream.device_id != device:
                allowed = f"a stream of device {device}, which this rank has"
                raise InvalidValueError(name, "stream", stream, allowed)
        if stream.ptr or not self._threads:
            return stream
        if self._own_stream is None:
            self._own_stream = self._driver.make_stream()
        return self._own_stream

    def capturing(self, stream: Any) -> bool:
        """Whether work on the stream is recorded and not run."""
        try:
            return bool(stream.ptr) and bool(self._driver.is_capturing(stream.ptr))
        except RuntimeError:  # CuPy's answer for a capture that is invalid and was not ended
            return True

    @contextmanager
    def held(self, call: str) -> Iterator[None]:
        """The lock of the communicator, for as long as a rank may be waited for."""
        if not self._lock.acquire(timeout=self._timeout):
            raise Error(
                f"{self._checker.name(call)}: another thread was inside a call of this "
                f"communicator for {self._timeout:g} s"
            )
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def turn(self, call: str) -> Iterator[None]:
        """As :meth:`held`, for what only an open communicator can do.

        Raises:
            ClosedError: it is closed, or a former call failed. An error in the block after which
            the ranks cannot talk any more makes all later calls fail so.
        """
        with self.held(call):
            self.check_open(call)
            try:
                yield
            except BaseException as error:
                if self._registry.channel.closed:
                    self._engine.fail(error)
                raise

    def check_open(self, call: str) -> None:
        """Raise where no call can be made any more.

        Raises:
            ClosedError: see :meth:`turn`.
        """
        if self.closed or os.getpid() != self.owner:
            why = "is closed" if self.closed else "belongs to the parent of this process"
            raise ClosedError(f"{self._checker.name(call)}: this communicator {why}")
        self._engine.check(f"Communicator.{call}")
