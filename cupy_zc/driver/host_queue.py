"""The queue of work behind a host stream: what runs now, what waits, and for what.

There are no threads of its own. While nothing is ahead of it, work runs at once in the thread that
puts it in; behind a point that was not reached yet it queues up, and runs in the thread that
reaches the point.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from ..config import settings
from .host_result import Result, refused

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Hold", "Point", "Work", "WorkQueue", "run_queues"]

_log = logging.getLogger("cupy_zc")

#: Work, as engines enqueue it.
Work = Callable[[], None]


class Point:
    """A place in a queue that is reached once, and the queues that wait for it."""

    __slots__ = ("_changed", "_waiters", "done")

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._waiters: list[WorkQueue] = []
        #: Whether it was reached.
        self.done = False

    def reach(self) -> list[WorkQueue]:
        """Reached; returns the queues that can go on."""
        with self._changed:
            self.done = True
            self._changed.notify_all()
            waiters, self._waiters = self._waiters, []
            return waiters

    def call_on(self, queue: WorkQueue) -> None:
        """Have ``queue`` among those that :meth:`reach` returns."""
        if queue not in self._waiters:
            self._waiters.append(queue)

    def wait(self, call: str, detail: str, deadline: float) -> None:
        """Wait until it is reached, or ``deadline`` on the monotonic clock.

        Raises:
            DriverError: ``CUDA_ERROR_TIMEOUT``.
        """
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            if self._changed.wait_for(lambda: self.done, timeout=left):
                return
        cause = (
            f"the work did not finish within {settings().timeout:g} s (CUPY_ZC_TIMEOUT); a hold or "
            "an event that it waits for was never completed"
        )
        raise refused(call, Result.TIMEOUT, detail, cause)


class _Wait:
    """An entry: nothing behind it runs before the point is reached."""

    __slots__ = ("point",)

    def __init__(self, point: Point) -> None:
        self.point = point


class _Mark:
    """An entry: the point is reached when everything before it has run."""

    __slots__ = ("point",)

    def __init__(self, point: Point) -> None:
        self.point = point


class WorkQueue:
    """Work in order.

    Args:
        changed: Guards the queues of a driver, and is notified when a point is reached. Work runs
            without it.
        name: Who the queue belongs to, for messages.
    """

    __slots__ = ("__weakref__", "_changed", "_entries", "_errors", "_name", "_runner")

    def __init__(self, changed: threading.Condition, name: str) -> None:
        self._changed = changed
        self._name = name
        self._entries: deque[Work | _Wait | _Mark] = deque()
        self._runner: int | None = None  # the thread that is running work of this queue
        self._errors: list[Exception] = []

    @property
    def busy(self) -> bool:
        """Whether something is running or waiting."""
        return self._runner is not None or bool(self._entries)

    # The first half of putting something in, under the lock of the caller

    def claim(self, work: Work) -> bool:
        """Put work in; True if it is to run at once, with :meth:`run_claimed`, else :meth:`run`."""
        if self.busy:
            self._entries.append(work)
            return False
        self._runner = threading.get_ident()
        return True

    def put_wait(self, point: Point) -> None:
        """Let what comes later wait for a point; :meth:`run` afterwards."""
        self._entries.append(_Wait(point))

    def put_mark(self) -> Point:
        """A point that is reached when everything put in so far has run; :meth:`run` afterwards."""
        point = Point(self._changed)
        if self.busy:
            self._entries.append(_Mark(point))
        else:
            point.done = True
        return point

    # The second half, without the lock

    def run_claimed(self, work: Work) -> None:
        """Run work that was claimed; what it raises, this raises."""
        ready: deque[WorkQueue] = deque()
        try:
            work()
        finally:
            self._run(ready)
            run_queues(ready)

    def run(self) -> None:
        """Run what can be run, here and in the queues that this unblocks."""
        run_queues([self])

    def mark(self) -> Point:
        """A point that is reached when everything put in so far has run."""
        with self._changed:
            point = self.put_mark()
        self.run()
        return point

    def synchronize(self, call: str, deadline: float) -> None:
        """Wait until everything put in so far has run.

        Raises:
            DriverError: as :meth:`wait`.
            Exception: the first one of work that was queued; the others are logged.
        """
        self.wait(call, deadline)
        with self._changed:
            errors, self._errors = self._errors, []
        for error in errors[1:]:
            _log.error("%s: more queued work failed", self._name, exc_info=error)
        if errors:
            raise errors[0]

    def wait(self, call: str, deadline: float) -> None:
        """Wait until everything put in so far has run; what failed is left to ``synchronize``.

        Raises:
            DriverError: the caller is itself work of the queue, or ``deadline`` on the monotonic
                clock went by.
        """
        if self._runner == threading.get_ident():
            cause = "work of the stream cannot wait for the stream; it would wait for itself"
            raise refused(call, Result.NOT_PERMITTED, self._name, cause)
        self.mark().wait(call, self._name, deadline)

    def forget_runner(self) -> None:
        """In a forked child: a thread that was running work, and its work, are not here."""
        if self._runner != threading.get_ident():
            self._runner = None

    def run_into(self, ready: deque[WorkQueue]) -> None:
        """Run the queue until it is empty or has to wait, unless another call is at it.

        Args:
            ready: Gets the queues that this unblocks.
        """
        with self._changed:
            if self._runner is not None:
                return
            self._runner = threading.get_ident()
        self._run(ready)

    def _run(self, ready: deque[WorkQueue]) -> None:
        try:
            while (work := self._next(ready)) is not None:
                self._run_guarded(work)
        except BaseException:  # an interrupt; the next call on the queue goes on from here
            self._runner = None
            raise

    def _run_guarded(self, work: Work) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the next synchronize() raises it
            with self._changed:
                self._errors.append(error)

    def _next(self, ready: deque[WorkQueue]) -> Work | None:
        """The next work to run; None, and no runner any more, if there is none for now."""
        with self._changed:
            while self._entries:
                entry = self._entries[0]
                if isinstance(entry, _Wait) and not entry.point.done:
                    entry.point.call_on(self)
                    break
                self._entries.popleft()
                if isinstance(entry, _Mark):
                    ready.extend(entry.point.reach())
                elif not isinstance(entry, _Wait):
                    return entry
            self._runner = None
            return None


def run_queues(queues: Iterable[WorkQueue]) -> None:
    """Run what can be run in these queues, and in those that this unblocks, one by one."""
    ready = deque(queues)
    while ready:
        ready.popleft().run_into(ready)


class Hold:
    """Keeps a stream from going on; a context manager. A stream's ``hold()`` makes it."""

    def __init__(self, point: Point) -> None:
        self._point = point

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let the stream go on; what waited runs in this thread. Idempotent."""
        run_queues(self._point.reach())
