"""Lanes of the device engine: memory in which calls that follow each other on a stream negotiate.

A lane is a block of the heap, at one offset on all ranks, and a record in memory of the host. The
number of a call on it, the *epoch*, lives in the lane itself and is advanced by kernels alone, so a
replayed graph goes on where the last replay ended.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from ..driver.api import KernelDriver
from ..errors import Error
from ..registration import Registry, SymmetricHeap, SymmetricMemory
from .device_args import MAX_RANKS, STAGED, Args, Record, Sizes, nanoseconds

__all__ = ["DeviceLane", "Records"]

#: What types.cuh says of the fixed part of a lane.
WORD_BYTES, STATE = 64, 33792
SHARE_BITS = 16
#: Six halves of words; the rest is padding.
_WORDS = struct.Struct("<6Q")
FAILURE = STATE + 64


class Records:
    """Where kernels say what went wrong: a page of the host, a record for each lane."""

    #: A record has a cache line of its own.
    BYTES = 64
    COUNT = 1024
    #: The last one of a lane, and that of mail.
    LAST, MAIL = COUNT - 2, COUNT - 1

    def __init__(self, driver: KernelDriver) -> None:
        self._memory = driver.mapped_memory(self.BYTES * self.COUNT)
        self.address: int = self._memory.ptr

    def of(self, lane: int) -> Record:
        """The record of a lane, zeroed.

        Raises:
            Error: there are too many lanes.
        """
        if lane > self.LAST:
            raise Error(
                f"a communicator has {self.LAST} lanes at most, one for each live graph; drop some "
                "graphs"
            )
        return self._zeroed(lane)

    def of_mail(self) -> Record:
        """The record of the point-to-point calls, zeroed."""
        return self._zeroed(self.MAIL)

    def _zeroed(self, number: int) -> Record:
        record = Record.from_address(self.address + number * self.BYTES)
        ctypes.memset(ctypes.addressof(record), 0, self.BYTES)
        return record


class DeviceLane:
    """One lane, as this rank has it.

    Collective to make, but for what follows: zeroing needs no peer, yet all must have done it
    before anyone launches.

    Args:
        number: Of the lane, equal on all ranks.
        registry: Where the memory of peers is.
        heap: Gives the memory.
        ranks: How many.
        sizes: Capacities, equal on all ranks.
        records: Gives the record.
        budget: Seconds that a kernel waits for a peer.
    """

    def __init__(
        self,
        number: int,
        registry: Registry,
        heap: SymmetricHeap,
        ranks: int,
        sizes: Sizes,
        records: Records,
        budget: float,
    ) -> None:
        self.number = number
        self.rank = registry.channel.rank
        #: Bytes that it has on this rank.
        self.size = sizes.lane_bytes(ranks)
        self.record = records.of(number)
        #: Kept for as long as a graph may read it, closed communicator or not.
        self._memory: SymmetricMemory | None = heap.reserve(self.size)
        #: In arena 0, of all ranks.
        self.offset = offset = heap.offset(self._memory)
        self.addresses: Sequence[int] = [registry.address(peer, 0, offset) for peer in range(ranks)]
        self._driver = registry.driver
        self._heap = heap
        self._sizes = sizes
        self._scratch: SymmetricMemory | None = None
        self._template = Args(
            error=records.address + number * Records.BYTES, lane=number,
            budget=nanoseconds(budget), ll128_lines=sizes.ll128_lines, ll_packs=sizes.ll_packs,
            chunk=sizes.chunk, rank=self.rank, size=ranks,
        )  # fmt: skip
        for peer, address in enumerate(self.addresses):
            self._template.lanes[peer] = address

    @property
    def has_scratch(self) -> bool:
        """Whether calls can stage on it, and use rings."""
        return self._scratch is not None

    def add_scratch(self) -> None:
        """Have scratch, for calls that are launched from now on. Collective.

        Raises:
            AgreementError: a rank has no memory left; on all of them.
        """
        self._scratch = self._heap.reserve(self._sizes.scratch_bytes)
        apart = self._heap.offset(self._scratch) - self.offset  # the same on all ranks
        self._template.scratch = apart % (1 << 64)
        self.size += self._sizes.scratch_bytes

    def args(self) -> Args:
        """Arguments with all that is the lane's; the rest is zero."""
        return Args.from_buffer_copy(self._template)

    def shut(self) -> None:
        """Make every kernel on it return at once, from now on: the graph outlives the communicator.

        The number of a failed call that no call will ever have.
        """
        own = self.addresses[self.rank]
        self._driver.write(own + FAILURE, (1 << 63).to_bytes(8, "little"))

    def close(self) -> None:
        """Give the memory back: nothing reads it any more."""
        self._memory = self._scratch = None

    def missing(self) -> list[int]:
        """The ranks that have not come to the call that this rank is in, or was in last."""
        epoch, words = self._words()
        return [
            peer
            for peer in range(len(self.addresses))
            if peer != self.rank and words[peer][0] >> 32 != epoch & 0xFFFFFFFF
        ]

    def staging(self, reach: int) -> list[tuple[bool, bool]]:
        """Whether input and output of each rank were staged in the last call, as peers said.

        Args:
            reach: Number of ranks. The call must have ended.
        """
        epoch, words = self._words()
        return [_staged(words[peer], epoch) for peer in range(reach)]

    def _words(self) -> tuple[int, list[tuple[int, ...]]]:
        """The number of the last call, and the words of all ranks in its place of the ring."""
        own = self.addresses[self.rank]
        epoch = int.from_bytes(self._driver.read(own + STATE, 8), "little") >> SHARE_BITS
        size = MAX_RANKS * WORD_BYTES
        data = self._driver.read(own + (epoch & 1) * size, size)
        return epoch, [_WORDS.unpack_from(data, peer * WORD_BYTES) for peer in range(MAX_RANKS)]


def _staged(halves: tuple[int, ...], epoch: int) -> tuple[bool, bool]:
    """Whether the three words of a rank say that its input, and its output, is staged."""
    if any(half >> 32 != epoch & 0xFFFFFFFF for half in halves):
        return False, False  # the own words, or those of a call in which nobody looked at them
    places = [(halves[i] & 0xFFFFFFFF) | (halves[i + 1] & 0xFFFFFFFF) << 32 for i in (2, 4)]
    return places[0] == STAGED, places[1] == STAGED
