"""Lanes of the host engine: where calls that follow each other meet and stage.

Lane 0 is that of eager calls, and each graph has one of its own. A lane has all that is written in
a call, so calls of different lanes can run at once, in another order on each rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import ClosedError, Error
from ..group import vote
from ..registration import Registry, SymmetricHeap
from .call import Call
from .control import Control
from .engine import Place

__all__ = ["HostLane", "Recorded", "replayed_after_close"]

#: Bytes of the smallest scratch.
_LEAST_ROOM = 1 << 12
#: Seconds that a replay may spend between two of its calls while somebody waits for its end.
_STANDSTILL = 1.0


def replayed_after_close(call: object, rank: int) -> ClosedError:
    """The error of a captured call whose communicator was closed all the same."""
    return ClosedError(
        f"{call} (rank {rank}): a graph was replayed whose communicator is closed; the call did "
        "nothing; capture it anew"
    )


class HostLane:
    """One lane, as one rank has it. Collective to make.

    Args:
        registry: Where the memory of all ranks is.
        heap: Gives the memory, at one offset on all ranks.
        departed: Gives the ranks that have died or closed.
        linger: Told of the ranks that are waited for, now and then in a long wait.
        timeout: Seconds to wait for a peer, and for another thread inside a call.

    Raises:
        AgreementError: a rank has no memory left, or could not set it up; on all of them.
    """

    def __init__(
        self,
        registry: Registry,
        heap: SymmetricHeap,
        departed: Callable[[], Collection[int]],
        linger: Callable[[Collection[int]], None],
        timeout: float,
    ) -> None:
        self._registry = registry
        self._heap = heap
        self._timeout = timeout
        self._lock = threading.Lock()
        rank, size = registry.channel.rank, registry.channel.size
        #: Bytes that it has on this rank.
        self.nbytes = Control.size(size)
        self.control = Control(rank, self._reserve(self.nbytes), departed, linger, timeout)
        vote(registry.channel, "set up a lane")  # nobody posts a semaphore that is not set up yet
        #: Of the calls on it; in step on all ranks.
        self.number = 0
        #: Bytes of scratch for inputs, and as many for outputs; where they are, by rank.
        self.room = 0
        self.scratch_in = [0] * size
        self.scratch_out = [0] * size
        #: Of a graph: how many calls were captured, and the last one that a replay under way did.
        self.recorded = 0
        self._at = 0
        self._closed = False

    def make_room(self, nbytes: int, most: int) -> None:
        """Have scratch for ``nbytes``, or ``most`` if that is less. Collective.

        What was there before stays, for calls that know it.

        Raises:
            AgreementError: a rank has no memory left; on all of them.
        """
        wanted = min(most, max(_LEAST_ROOM, 1 << (nbytes - 1).bit_length()))
        if wanted > self.room:
            self.scratch_in = self._reserve(2 * wanted)
            self.scratch_out = [address + wanted for address in self.scratch_in]
            self.room = wanted
            self.nbytes += 2 * wanted

    def _reserve(self, nbytes: int) -> list[int]:
        offset = self._heap.reserve_private(nbytes)
        return [self._registry.address(peer, 0, offset) for peer in self._registry.channel.ranks]

    @contextmanager
    def entered(self, call: object) -> Iterator[None]:
        """One call at a time."""
        if not self._lock.acquire(timeout=self._timeout):
            raise Error(
                f"{call} (rank {self._registry.channel.rank}): another thread was inside a call of "
                f"this communicator for {self._timeout:g} s"
            )
        try:
            yield
        finally:
            self._lock.release()

    # Graphs

    def begin(self) -> None:
        """Another graph has it from now on."""
        self.recorded = self._at = 0

    @contextmanager
    def replaying(self, call: object, number: int) -> Iterator[None]:
        """One call of a replay, the ``number``-th of its graph.

        Raises:
            ClosedError: the communicator is closed; the call must not be made.
        """
        with self.entered(call):
            if self._closed:
                raise replayed_after_close(call, self._registry.channel.rank)
            self._at = number
            try:
                yield
            except BaseException:
                self._at = 0  # that ends the replay
                raise
            if number == self.recorded:
                self._at = 0

    def invalidate(self) -> None:
        """Make all later replays do nothing. Waits for one that is under way."""
        until = time.monotonic() + self._timeout
        at, since = self._at, time.monotonic()
        while self._at and time.monotonic() < min(until, since + _STANDSTILL):
            time.sleep(0.001)
            if self._at != at or self._lock.locked():
                at, since = self._at, time.monotonic()
        self._closed = True  # also where the lock is not to be had: no call begins any more
        with self.entered("Communicator.close"):
            pass


class Recorded(NamedTuple):
    """A captured call: all that a replay needs. Its lease keeps the memory, so this must not."""

    #: Without its arrays.
    call: Call
    source: Place
    target: Place
    #: Addresses of this rank's arrays; 0 where there is none.
    given: int
    taken: int
    lane: HostLane
    #: Which call of its graph it is, from 1.
    number: int
