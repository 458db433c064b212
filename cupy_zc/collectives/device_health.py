"""What can go wrong in calls on the device, how the host learns of it, and waiting for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from ..errors import ClosedError, Error, PeerTimeoutError
from ..group.naming import name_ranks
from ..group.waiting import WARN_AFTER
from .device_args import Record
from .device_failures import Describe, failure_in_words

__all__ = ["Health"]

_log = logging.getLogger("cupy_zc")

#: Seconds that kernels are given to find out why a peer has gone, or to end without it: what it did
#: before it went may be all that they need.
SETTLE = 0.5
#: Seconds between two looks at who has gone.
LOOK = 0.05
#: Seconds: how long a wait polls without a pause; by how much its pauses grow; the longest one.
SPIN, PAUSE, LONGEST_PAUSE = 100e-6, 20e-6, 1e-3


class Health:
    """Whether the calls of one rank went well so far.

    Args:
        rank: This one.
        timeout: Seconds that a kernel waits for a peer.
        departed: Gives the ranks that have died or closed.
        abandon: Called when the ranks have lost each other, to let the peers know.
    """

    def __init__(
        self,
        rank: int,
        timeout: float,
        departed: Callable[[], Collection[int]],
        abandon: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._timeout = timeout
        self._departed = departed
        self._abandon = abandon
        self._failure: BaseException | None = None
        self._watched: list[tuple[Record, Describe | None]] = []
        #: The same records, for who asks in every call.
        self._records: list[Record] = []
        #: What was in a record before it was cleared.
        self._released: Error | None = None

    def watch(self, record: Record, describe: Describe | None) -> None:
        """Look at a record from now on; ``describe`` is as in :func:`failure_in_words`."""
        self._watched.append((record, describe))
        self._records.append(record)

    def is_well(self) -> bool:
        """Whether no call has failed."""
        for record in self._records:
            if record.code:
                return False
        return self._failure is None and self._released is None

    def release(self) -> None:
        """Clear the records, for which streams may wait. From any thread; what they said is kept.

        Kernels do not look at them: calls of a lane that has failed go on to do nothing.
        """
        self._released = self._found("Communicator")
        if self._released is not None:
            for record in self._records:
                record.code = 0

    def check(self, call: object) -> None:
        """Raise what went wrong in a call that ran; see :meth:`Engine.check`."""
        if self._failure is None:
            failure = self._found(call)
            if failure is None:
                return
            self.fail(failure, None)
            raise failure
        raise ClosedError(
            f"{call} (rank {self._rank}): this communicator cannot be used since a call failed: "
            f"{self._failure}; close it and make a new one"
        ) from self._failure

    def fail(self, error: BaseException, stream: Any) -> BaseException:
        """Make no further calls.

        Args:
            error: What went wrong.
            stream: Of the last call; None where there is none that can be asked.

        Returns:
            What went wrong first.
        """
        if self._failure is None:
            found = None
            if isinstance(error, PeerTimeoutError):  # the peer may have gone because of a mismatch
                found = self._found_within(SETTLE, error, stream)
            self._failure = found or error
        self._abandon()
        return self._failure

    def wait(self, point: Any, missing: Callable[[], Collection[int]]) -> None:
        """Wait for a stream or an event.

        It takes as long as what the caller enqueued before; kernels of this package end in time.

        Args:
            point: It.
            missing: Gives the ranks that have not come to the call that this one is in.
        """
        began = time.monotonic()
        pause, warned, look = 0.0, False, LOOK
        first: Collection[int] = ()
        gone_since = 0.0
        while not point.done:
            waited = time.monotonic() - began
            if waited > SPIN:
                time.sleep(pause)
                pause = min(LONGEST_PAUSE, pause + PAUSE)
            if waited > look:
                look = waited + LOOK
                gone = self._departed()
                if not (gone and first):
                    first, gone_since = gone, waited
                if first and waited - gone_since > SETTLE:
                    # The others may have gone because of the one that did not come.
                    self._give_up(min(set(gone).intersection(missing()) or first))
            if waited > WARN_AFTER and not warned:
                warned = True
                ranks = missing()
                _log.warning(
                    "rank %d: has waited %g s for %s; a kernel waits %g s at most",
                    self._rank, WARN_AFTER, name_ranks(ranks) if ranks else "work on its stream",
                    self._timeout,
                )  # fmt: skip

    def _give_up(self, rank: int) -> None:
        """Let kernels that wait end now: a rank cannot come any more."""
        for record in self._records:
            record.abort = 1 + rank

    def close(self) -> None:
        """Nobody is to be told anything any more."""
        self._abandon = _nothing  # it belongs to the communicator, which the collector would have

    def _found(self, call: object) -> Error | None:
        """What kernels have left."""
        if self._released is not None:
            return self._released
        for record, describe in self._watched:
            if record.code:
                return failure_in_words(record, call, self._rank, self._timeout, describe)
        return None

    def _found_within(self, seconds: float, call: object, stream: Any) -> Error | None:
        """What kernels that still run find out, in a little while."""
        until = time.monotonic() + seconds
        while not (found := self._found(call)) and time.monotonic() < until:
            if stream is not None and stream.done:
                return self._found(call)
            time.sleep(0.001)
        return found


def _nothing() -> None:
    """In the place of what must not be called any more."""
