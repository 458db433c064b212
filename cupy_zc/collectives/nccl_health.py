"""Whether NCCL's calls go well: its kernels wait without an end, so a thread looks after them.

The thread looks every :data:`LOOK` seconds at what NCCL says of errors in the background, at who
has gone, and at an event behind calls that were made. A call that is not over ``timeout`` seconds
after it was made, or after the one before it was over, has failed; so has one of which a rank has
gone. Then all communicators of the engine are aborted, which ends their kernels, and the next call
raises. Who waits by :meth:`NcclHealth.wait` learns it there.

A replay of a graph has no event: what it waits for is found by :meth:`NcclHealth.wait`, or once a
rank of the node has gone.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ..driver.api import Driver, Event
from ..errors import ClosedError, Error, PeerTimeoutError
from ..group.naming import name_ranks
from ..group.waiting import WARN_AFTER
from .nccl_library import Nccl, NotInTimeError, in_time

__all__ = ["NcclHealth"]

_log = logging.getLogger("cupy_zc")

#: Seconds between two looks.
LOOK = 0.05
#: Seconds in which what a rank did before it went may still end a call.
SETTLE = 0.5
#: Seconds in which calls of NCCL under way are given to end before it is aborted under them.
COURTESY = 0.2
#: Seconds that a communicator is given to be destroyed in :meth:`NcclHealth.close`.
CLOSING = 10.0
#: Seconds: how long a wait polls without a pause; by how much its pauses grow; the longest one.
SPIN, PAUSE, LONGEST_PAUSE = 100e-6, 20e-6, 1e-3


class NcclHealth:
    """Looks after the communicators of one engine.

    Args:
        rank: This one.
        library: NCCL.
        driver: Of the device.
        device: Of this rank.
        timeout: Seconds that a call may take.
        departed: Gives the ranks that are known to have died or closed.
        abandon: Called when the ranks have lost each other, to let the peers know.
    """

    def __init__(
        self,
        rank: int,
        library: Nccl,
        driver: Driver,
        device: int,
        timeout: float,
        departed: Callable[[], Collection[int]],
        abandon: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._library = library
        self._driver = driver
        self._device = device
        self._timeout = timeout
        self._departed = departed
        self._abandon = abandon
        #: What went wrong.
        self.failure: BaseException | None = None
        #: Whether graphs hold calls of the communicators.
        self.replays = False
        #: Since when this rank waits for what it enqueued; 0 where it does not.
        self._awaited = 0.0
        #: Since when this rank is inside a call of NCCL; 0 where it is not.
        self.inside = 0.0
        self._comms: list[Any] = []
        self._aborted = False
        self._lock = threading.Lock()
        #: Behind the last eager call, and when that was made; None before the first.
        self._event: Event | None = None
        self._made = 0.0
        #: What the thread has in its eye: an event, and since when the call behind it may run.
        self._seen: tuple[Event, float] | None = None
        self._spare: Event | None = None
        self._gone_since: float | None = None
        self._stop = threading.Event()

    def watch(self, comms: Collection[Any]) -> None:
        """Look after communicators from now on."""
        self._comms.extend(comms)
        watching = partial(_watch, weakref.ref(self), self._stop, self._driver, self._device)
        threading.Thread(target=watching, name="cupy-zc nccl", daemon=True).start()

    def made(self, stream: Any) -> None:
        """An eager call was enqueued. On its device."""
        event = self._event
        if event is None:
            self._event = self._driver.record_event(stream)
        else:
            event.record(stream)
        self._made = time.monotonic()

    @property
    def idle(self) -> bool:
        """Whether every eager call is over."""
        seen = self._seen
        return (self._event is None or self._event.done) and (seen is None or seen[0].done)

    # What went wrong

    def check(self, call: object) -> None:
        """Raise what went wrong; see :meth:`Engine.check`."""
        if self.failure is not None:
            raise ClosedError(
                f"{call} (rank {self._rank}): this communicator cannot be used since a call "
                f"failed: {self.failure}; close it and make a new one"
            ) from self.failure

    def fail(self, error: BaseException) -> BaseException:
        """Make no further calls, and end those under way.

        Returns:
            What went wrong first.
        """
        with self._lock:
            if self.failure is None:
                self.failure = error
            aborts, self._aborted = not self._aborted and bool(self._comms), True
        for comm in list(self._comms) if aborts else ():
            # Not waited for: it does not return while a graph lives that has calls recorded. Each
            # in a thread of its own: one gives memory back, for which CUDA waits for all kernels.
            end = partial(self._abort, comm)
            threading.Thread(target=end, name="cupy-zc nccl abort", daemon=True).start()
        self._abandon()
        return self.failure

    def _abort(self, comm: Any) -> None:
        until = time.monotonic() + COURTESY
        while self.inside and time.monotonic() < until:
            time.sleep(0.001)
        with self._driver.use_device(self._device), self._logging():
            self._library.abort(comm)

    @contextmanager
    def _logging(self) -> Iterator[None]:
        """What goes wrong at the end of a communicator is for the log: nobody can mend it."""
        try:
            yield
        except Error as error:
            _log.warning("rank %d: %s", self._rank, error)

    # Looking

    def look(self) -> None:
        """Look once; what is wrong makes the communicator fail."""
        if self.failure is not None:
            return
        for comm in self._comms:
            words = self._library.async_error(comm)
            if words:
                self.fail(PeerTimeoutError(self._says(f"NCCL lost a rank: {words}"), ()))
                return
        now = time.monotonic()
        gone = self._departed()
        if gone and self._gone_since is None:
            self._gone_since = now
        since = self._running_since(now)
        if self.inside and (since is None or self.inside < since):
            since = self.inside  # it connects ranks, which may take until they come
        lost = self._gone_since is not None and now - self._gone_since > SETTLE
        if lost and (since is not None or self.replays):
            what = "a call waits for it" if since is not None else "a graph may wait for it"
            self.fail(PeerTimeoutError(self._says(f"{name_ranks(gone)} gone; {what}"), tuple(gone)))
            return
        if since is None and self.replays and self._awaited:
            since = self._awaited
        if since is not None and now - since > self._timeout:
            self.fail(self._late())

    def _running_since(self, now: float) -> float | None:
        """Since when a call is the first that is not over, as far as this can know."""
        if self._seen is None:
            event, made = self._event, self._made
            if event is None or event.done:
                return None
            self._seen = (event, made)
            self._event, self._spare = self._spare, None
            return made
        event, since = self._seen
        if not event.done:
            return since
        self._seen, self._spare = None, event
        if self._event is not None and not self._event.done:
            self._seen = (self._event, now)  # it could not run before
            self._event, self._spare = event, None
            return now
        return None

    def _late(self) -> PeerTimeoutError:
        words = (
            f"a call was not over after {self._timeout:g} s: a rank did not come to it, or calls "
            "something else, which NCCL does not tell; CUPY_ZC_TIMEOUT or timeout= give more time"
        )
        return PeerTimeoutError(self._says(words), ())

    def _says(self, words: str) -> str:
        return f"rank {self._rank}: {words}"

    # Waiting

    def wait(self, point: Any) -> None:
        """Wait for a stream or an event. It takes as long as what the caller enqueued before it.

        Raises:
            PeerTimeoutError: replays of graphs did not end within the timeout.
            Error: a call failed.
        """
        began = time.monotonic()
        pause, warned = 0.0, False
        with self.waiting():
            while not point.done:
                waited = time.monotonic() - began
                if waited > SPIN:
                    time.sleep(pause)
                    pause = min(LONGEST_PAUSE, pause + PAUSE)
                if self.failure is not None:
                    self._wait_for_the_end(point)
                    raise self.failure
                if waited > WARN_AFTER and not warned:
                    warned = True
                    _log.warning("rank %d: has waited %g s for NCCL", self._rank, WARN_AFTER)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block that waits for what was enqueued, replays among it: they have the timeout."""
        self._awaited = time.monotonic()
        try:
            yield
        finally:
            self._awaited = 0.0

    def _wait_for_the_end(self, point: Any) -> None:
        """Kernels that are aborted end soon."""
        until = time.monotonic() + CLOSING
        while not point.done and time.monotonic() < until:
            time.sleep(LONGEST_PAUSE)

    # The end

    def close(self) -> None:
        """Give the communicators back. Local; calls have ended before, but for what failed."""
        self._stop.set()
        self._abandon = _nothing  # it belongs to the communicator, which the collector would have
        with self._lock:
            comms, self._comms = self._comms, []
            destroys, self._aborted = not self._aborted, True
        if not destroys:
            return
        self.failure = self.failure or ClosedError(self._says("the communicator is closed"))
        try:
            in_time("nccl destroy", partial(self._destroy, comms), CLOSING)
        except NotInTimeError:
            _log.warning(
                "rank %d: ncclCommDestroy did not end within %g s; it goes on by itself",
                self._rank, CLOSING,
            )  # fmt: skip

    def _destroy(self, comms: Collection[Any]) -> None:
        with self._driver.use_device(self._device), ExitStack() as stack:
            stack.enter_context(self._logging())
            for comm in comms:
                stack.callback(self._library.destroy, comm)


def _watch(of: weakref.ref[NcclHealth], stop: threading.Event, driver: Driver, device: int) -> None:
    """Look again and again, until the engine is closed or gone."""
    with driver.use_device(device):
        while not stop.wait(LOOK):
            health = of()
            if health is None:
                return
            try:
                health.look()
            except Error as error:  # the device is lost
                health.fail(error)
            del health


def _nothing() -> None:
    """In the place of what must not be called any more."""
