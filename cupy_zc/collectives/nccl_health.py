"""Whether NCCL's calls go well: its kernels wait without an end, so a thread looks after them.

The thread looks every :data:`LOOK` seconds at what NCCL says of errors in the background, at who
has gone, and at events behind calls that were made (:mod:`.nccl_trail`). A call that is not over
``timeout`` seconds after it was made, or after the one before it was over, has failed; so has one
of which a rank has gone. Then all communicators of the engine are aborted, which ends their
kernels, and the next call raises. Who waits by :meth:`NcclHealth.wait` learns it there.

The thread may abort at any time, so who calls NCCL says so (:meth:`NcclHealth.calling`): what then
is aborted is aborted a while later, and what has been is not called.

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

from ..driver.api import Driver
from ..errors import ClosedError, DriverError, Error, PeerTimeoutError
from ..group.naming import name_ranks
from ..group.waiting import WARN_AFTER
from .gate import Gate
from .nccl_library import Nccl, NotInTimeError, aside, in_time
from .nccl_trail import Trail

__all__ = ["NcclHealth"]

_log = logging.getLogger("cupy_zc")

#: Seconds between two looks.
LOOK = 0.05
#: Seconds in which what a rank did before it went may still end a call.
SETTLE = 5.0
#: Seconds in which calls of NCCL under way are given to end before it is aborted under them.
COURTESY = 0.2
#: Seconds that a communicator is given to be destroyed in :meth:`NcclHealth.close`.
CLOSING = 10.0
#: Queues of calls that do not wait for each other.
QUEUES = 3
#: Seconds: how long a wait polls without a pause; by how much its pauses grow; the longest one.
SPIN, PAUSE, LONGEST_PAUSE = 100e-6, 20e-6, 1e-3


class NcclHealth:
    """Looks after the communicators of one engine.

    Args:
        rank: This one.
        library: NCCL.
        driver: Of the device.
        device: Of this rank.
        timeout: Seconds that a call of the set-up may take.
        departed: Gives the ranks that are known to have died or closed.
        abandon: Called when the ranks have lost each other, to let the peers know.
        replays: Whether graphs hold calls of the communicators.
        gate: What calls may wait behind in their stream.
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
        replays: Callable[[], bool],
        gate: Gate | None = None,
    ) -> None:
        self._gate = gate
        self._failed_at = 0.0
        self._rank = rank
        self._library = library
        self._driver = driver
        self._device = device
        self._timeout = timeout
        #: Whether the ranks still find out whether all works, and then tell each other.
        self._trying = True
        self._departed = departed
        self._abandon = abandon
        self._replays = replays
        #: What went wrong, and whether somebody was told.
        self.failure: BaseException | None = None
        self._told = False
        #: Since when threads of this rank wait for what was enqueued.
        self._awaited: dict[object, float] = {}
        #: Since when this rank is inside a call of NCCL; 0 where it is not.
        self.inside = 0.0
        self._comms: list[Any] = []
        self._aborted = False
        self._lock = threading.Lock()
        #: Eager calls, and sends that are ahead of them: each queue by itself.
        self._trails = tuple(Trail(driver) for _ in range(QUEUES))
        self._gone_since: float | None = None
        self._stop = threading.Event()

    def watch(self, comms: Collection[Any]) -> None:
        """Look after communicators from now on."""
        self._comms.extend(comms)
        watching = partial(_watch, weakref.ref(self), self._stop, self._driver, self._device)
        threading.Thread(target=watching, name="cupy-zc nccl", daemon=True).start()

    def tried(self, timeout: float) -> None:
        """The set-up is over; a call may take so many seconds from now on."""
        self._timeout = timeout
        self._trying = False

    def made(self, stream: Any, queue: int = 0) -> None:
        """An eager call was enqueued. On its device."""
        self._trails[queue].made(stream)

    @property
    def idle(self) -> bool:
        """Whether every eager call is over, but for sends that are ahead."""
        return self._trails[0].idle

    @contextmanager
    def calling(self) -> Iterator[None]:
        """A block that calls NCCL. One at a time.

        Raises:
            Error: the communicators are aborted.
        """
        self.inside = time.monotonic()  # before the look: who aborts looks the other way round
        try:
            self.refuse()
            yield
        except DriverError as error:
            if self.failure is not None:  # which is why it failed
                raise self.failure from error
            raise
        finally:
            self.inside = 0.0

    def refuse(self) -> None:
        """Raise what went wrong, to who is about to call NCCL."""
        if self.failure is not None:
            raise self.failure

    # What went wrong

    def check(self, call: object) -> None:
        """Raise what went wrong; see :meth:`Engine.check`."""
        if self.failure is not None:
            if not self._told:
                self._tell()
            raise ClosedError(
                f"{call} (rank {self._rank}): this communicator cannot be used since a call "
                f"failed: {self.failure}; close it and make a new one"
            ) from self.failure

    def _tell(self) -> None:
        assert self.failure is not None
        self._told = True
        raise self.failure

    def fail(self, error: BaseException, *, told: bool = True) -> BaseException:
        """Make no further calls, and end those under way.

        Args:
            error: What went wrong.
            told: Whether it is raised now.

        Returns:
            What went wrong first.
        """
        with self._lock:
            if told:  # before the failure is there: from then on others say that they told it
                self._told = True
            if self.failure is None:
                self.failure, self._failed_at = error, time.monotonic()
            comms = [] if self._aborted else list(self._comms)
            self._aborted = self._aborted or bool(comms)
        for comm in comms:
            # Not waited for: it does not return while a graph lives that has calls recorded. Each
            # in a thread of its own: one gives memory back, for which CUDA waits for all kernels.
            aside("nccl abort", partial(self._abort, comm))
        if not self._trying:
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
            if self._gate is not None and time.monotonic() - self._failed_at > 2 * COURTESY:
                self._gate.open()
            return
        if self._gate is not None and self._gate.is_shut:
            words = self._says("a step of the node failed, so nothing goes to other nodes")
            self.fail(Error(words), told=False)
            return
        words = self._errors()
        if words:
            self.fail(PeerTimeoutError(self._says(f"NCCL lost a rank: {words}"), ()), told=False)
            return
        now = time.monotonic()
        gone = self._departed()
        if gone and self._gone_since is None:
            self._gone_since = now
        # A call that a thread is inside connects ranks, which may take until they come.
        begun = [trail.since() for trail in self._trails] + [self.inside or None]
        since = min((each for each in begun if each is not None), default=None)
        replays = self._replays()
        lost = self._gone_since is not None and now - self._gone_since > min(
            SETTLE, self._timeout / 2
        )
        if lost and (since is not None or replays):
            what = "a call waits for it" if since is not None else "a graph may wait for it"
            words = self._says(f"{name_ranks(gone)} gone; {what}")
            self.fail(PeerTimeoutError(words, tuple(gone)), told=False)
            return
        if since is None and replays:
            since = min(list(self._awaited.values()), default=None)
        if since is not None and now - since > self._timeout:
            self.fail(self._late(), told=False)

    def _errors(self) -> str:
        """What NCCL says of errors in the background; a communicator that has ended is not asked.

        It is not ended meanwhile, either: that begins under the lock.
        """
        with self._lock:
            comms = () if self._aborted else self._comms
            return next(filter(None, map(self._library.async_error, comms)), "")

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
            Error: a call failed, and nobody was told yet.
        """
        began = time.monotonic()
        pause, warned = 0.0, False
        told = self._told  # then it is about to be closed
        with self.waiting():
            while not point.done:
                waited = time.monotonic() - began
                if waited > SPIN:
                    time.sleep(pause)
                    pause = min(LONGEST_PAUSE, pause + PAUSE)
                if self.failure is not None:
                    self._wait_for_the_end(point)
                    if told:
                        return
                    self._tell()
                if waited > WARN_AFTER and not warned:
                    warned = True
                    _log.warning("rank %d: has waited %g s for NCCL", self._rank, WARN_AFTER)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block that waits for what was enqueued, replays among it: they have the timeout."""
        me = object()
        self._awaited[me] = time.monotonic()
        try:
            yield
        finally:
            del self._awaited[me]

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
        self._told = True
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
                health.fail(error, told=False)
            del health


def _nothing() -> None:
    """In the place of what must not be called any more."""
