"""Lanes of the device engine: memory in which calls that follow each other on a stream negotiate.

A lane is a block of the heap, at one offset on all ranks, and a record in memory of the host. The
number of a call on it, the *epoch*, lives in the lane itself and is advanced by kernels alone, so a
replayed graph goes on where the last replay ended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ..driver.cuda import CudaDriver
from ..errors import Error
from ..registration import Registry, SymmetricHeap
from .device_args import STAGED, Args, Record, Sizes

__all__ = ["DeviceLane", "Records"]

#: What types.cuh says of the fixed part of a lane.
MAX_RANKS, WORD_BYTES, STATE = 8, 64, 33792
TICKET_BITS = 16


class Records:
    """Where kernels say what went wrong: a page of the host, a record for each lane."""

    #: A record has a cache line of its own.
    BYTES = 64
    COUNT = 1024

    def __init__(self, driver: CudaDriver) -> None:
        self._memory = driver.mapped_memory(self.BYTES * self.COUNT)
        self.address: int = self._memory.ptr

    def of(self, lane: int) -> Record:
        """The record of a lane, zeroed.

        Raises:
            Error: there are too many lanes.
        """
        if lane >= self.COUNT:
            raise Error(
                f"a communicator has {self.COUNT} lanes at most, one for each live graph; drop "
                "some of them"
            )
        record = Record.from_address(self.address + lane * self.BYTES)
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
        self.size = sizes.lane_bytes(ranks)
        self.record = records.of(number)
        #: In arena 0, of all ranks.
        self.offset = offset = heap.reserve_private(self.size)
        self.addresses: Sequence[int] = [registry.address(peer, 0, offset) for peer in range(ranks)]
        self._driver = registry.driver
        self._template = Args(
            error=records.address + number * Records.BYTES, lane=number,
            budget=int(budget * 1e9), ll128_lines=sizes.ll128_lines, ll_packs=sizes.ll_packs,
            chunk=sizes.chunk, rank=self.rank, size=ranks,
        )  # fmt: skip
        for peer, address in enumerate(self.addresses):
            self._template.lanes[peer] = address

    def args(self) -> Args:
        """Arguments with all that is the lane's; the rest is zero."""
        return Args.from_buffer_copy(self._template)

    def staging(self, reach: int) -> list[tuple[bool, bool]]:
        """Whether input and output of each rank were staged in the last call, as peers said.

        Args:
            reach: Number of ranks. The call must have ended.
        """
        own = self.addresses[self.rank]
        state = int.from_bytes(self._driver.read(own + STATE, 8), "little")
        epoch = state >> TICKET_BITS
        words = self._driver.read(
            own + (epoch & 1) * MAX_RANKS * WORD_BYTES, MAX_RANKS * WORD_BYTES
        )
        return [
            _staged(words[peer * WORD_BYTES : (peer + 1) * WORD_BYTES], epoch)
            for peer in range(reach)
        ]


def _staged(words: bytes, epoch: int) -> tuple[bool, bool]:
    """Whether the three words of a rank say that its input, and its output, is staged."""
    halves = [int.from_bytes(words[8 * i : 8 * i + 8], "little") for i in range(6)]
    if any(half >> 32 != epoch & 0xFFFFFFFF for half in halves):
        return False, False  # the own words, or those of a call in which nobody looked at them
    places = [(halves[i] & 0xFFFFFFFF) | (halves[i + 1] & 0xFFFFFFFF) << 32 for i in (2, 4)]
    return places[0] == STAGED, places[1] == STAGED
