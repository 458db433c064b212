"""The order of a communicator's calls: one at a time, streams one behind the other, numbered."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

from ..driver.api import Driver, capturing
from ..errors import ClosedError, Error, InvalidValueError, NotZeroCopyError
from ..group import Across
from ..registration import Registry, is_agreed
from .call import BARRIER, Call
from .captured import Counts, Recorder
from .checks import Checker
from .engine import Engine, Repeat
from .plan import Operation
from .point_to_point import Letter

__all__ = ["Line"]

_log = logging.getLogger("cupy_zc")

#: Calls that are kept to be made again.
KEPT = 4096

#: Gives an object as long as it lives.
_Reference: TypeAlias = Callable[[], Any]


def _reference(array: Any) -> _Reference:
    return _no_array if array is None else weakref.ref(array)


def _no_array() -> None:
    """What a rank passes that has no array in a call."""


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
        across: Ranks of other nodes, which what is captured is compared with.
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
        across: Across | None = None,
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
        self._recorder = Recorder(
            checker, driver, registry, engine, self.counts, across, strict=strict
        )
        self._timeout = timeout
        self._named: Callable[[], AbstractContextManager[None]]
        self._named = nullcontext if across is None else across.named
        self._lock = threading.RLock()
        self._current_stream = driver.current_stream
        self._current_device = driver.current_device
        #: How calls were made: input, output, and what makes them again.
        self._repeats: dict[tuple[Any, ...], tuple[_Reference, _Reference, Repeat]] = {}
        #: Calls, and why they staged, that the log knows of.
        self._told: set[tuple[str, ...]] = set()
        #: In the place of a null stream, and which one that was in the last call.
        self._own_stream: Any = None
        self._replaced: Any = None
        #: Recorded behind the last call, where its stream cannot be asked later.
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
                with self._named():
                    self._registry.at_call(self.counts.numbered + 1)
            self.counts.add(numbered)  # a call that ranks disagree on there has no number
        self._follow(stream)
        try:
            self._engine.enqueue(work, stream)
        finally:
            if stream is self._own_stream:
                self._rejoin(stream)
            elif not self._driver.keeps_stream(stream):
                self._event = self._driver.record_event(stream)

    # Calls that were made before

    def keep(self, key: tuple[Any, ...], source: Any, target: Any) -> None:
        """Keep how the call that was enqueued last was made, for :meth:`again`.

        Args:
            key: Its arguments.
            source: Its arrays, as they were passed.
            target: As above.
        """
        repeat = self._engine.repeat()
        if repeat is None:
            return
        if len(self._repeats) >= KEPT:
            self._repeats.clear()
        try:
            self._repeats[key] = (_reference(source), _reference(target), repeat)
        except TypeError:  # no array, where this rank has none
            return

    def again(self, key: tuple[Any, ...], source: Any, target: Any, stream: Any) -> bool:
        """Make a call as it was made before: the way of a loop, with no check made twice.

        Arrays are known again as objects, whose address, size and type do not change. All that may
        have changed is looked at here: the stream, a capture, the device, the registrations, a call
        that failed; and the numbers of calls at which the ranks talk are left to the long way.

        Returns:
            False where the long way must be gone; nothing was done then.
        """
        try:
            kept = self._repeats.get(key)
        except TypeError:  # an argument that is none of a call: the long way says which
            return False
        if kept is None or kept[0]() is not source or kept[1]() is not target:
            return False
        if not self._lock.acquire(False):
            return False
        try:
            self._registry.leases.glance()
            collective = type(key[0]) is Operation
            numbered = self._automatic and collective
            last = self.last_stream
            current = self._current_stream() if stream is None else stream
            if (
                current is not last
                or last is self._own_stream
                or self._event is not None
                or self._current_device() != self._registry.device
                or self.capturing(last)
                or (numbered and is_agreed(self.counts.numbered + 1))
                or self.closed
                or os.getpid() != self.owner
                or not kept[2].launch(last)
            ):
                return False
            if collective:
                self.counts.add(numbered)
            return True
        finally:
            self._lock.release()

    # Streams

    @property
    def point(self) -> Any:
        """What to wait for behind the calls that were enqueued; None where there are none."""
        return self.last_stream if self._event is None else self._event

    def is_idle(self) -> bool:
        """Whether the calls that were enqueued have ended, as far as their stream can be asked."""
        if self._event is None and (self.last_stream is None or self.capturing(self.last_stream)):
            return False
        return bool(self.point.done)

    def wait(self) -> None:
        """Wait for the calls that were enqueued, but on a stream that is capturing by now."""
        point = self.point
        if point is not None and (self._event is not None or not self.capturing(point)):
            self._engine.wait(point)
        self._engine.flush()

    def _follow(self, stream: Any) -> None:
        """Let a stream wait for this communicator's work on the one before."""
        last, event = self.last_stream, self._event
        self.last_stream, self._event = stream, None
        if stream is self._own_stream and self._driver.name == "cuda":
            stream.wait_event(self._driver.record_event(self._replaced))
        if last is None or (last is stream and event is None):
            return
        if event is None and self.capturing(last):  # an event would become part of the capture
            self._driver.synchronize(self._registry.device)
            return
        stream.wait_event(self._driver.record_event(last) if event is None else event)

    def _rejoin(self, stream: Any) -> None:
        """What a thread enqueues on the null stream comes after what was put on its own.

        On a GPU the host waits. If the null stream waited, so would that of the other ranks on the
        GPU, and what this call needs of them might come behind it.
        """
        if self._driver.name == "cuda":
            stream.synchronize()

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
            if self._automatic and place.segment is not None:
                self._registry.touched(place.segment)
        if reasons and (call, *reasons) not in self._told:  # a loop says it once
            self._told.add((call, *reasons))
            _log.info(
                "staged rank=%d call=%s reason=%s", self._checker.rank, call, "; ".join(reasons)
            )
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
        if stream is None:
            stream = self._driver.current_stream()
        else:
            stream = self._driver.resolve_stream(self._checker.name(call), stream)
        device = self._registry.device
        if stream.ptr and stream.device_id not in (device, -1):  # -1: CuPy was not told
            allowed = f"a stream of device {device}, which this rank has"
            raise InvalidValueError(self._checker.name(call), "stream", stream, allowed)
        if stream.ptr or not self._threads:
            return stream
        self._replaced = stream
        if self._own_stream is None:
            self._own_stream = self._driver.make_stream(non_blocking=True)
        return self._own_stream

    def capturing(self, stream: Any) -> bool:
        """Whether work on the stream is recorded and not run."""
        return capturing(self._driver, stream)

    @contextmanager
    def held(self, call: str) -> Iterator[None]:
        """The lock of the communicator, for as long as a rank may be waited for, on its device."""
        if not self._lock.acquire(timeout=self._timeout):
            raise Error(
                f"{self._checker.name(call)}: another thread was inside a call of this "
                f"communicator for {self._timeout:g} s"
            )
        try:
            if self._current_device() == self._registry.device:
                yield
            else:
                with self._driver.use_device(self._registry.device):
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
                    first = self._engine.fail(error)
                    if first is not error:
                        raise first from error
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
