"""Memory that every rank has at the same offset: what ``Communicator.empty`` hands out.

The heap is arena 0 of a communicator. All ranks run the same allocator (:mod:`.allocator`); an
allocation is one exchange that carries its size and which blocks a rank has dropped since the last
one. Dropping is local and can happen anywhere: in a finalizer, in the garbage collector, on one
rank long before another.

The memory itself comes from a device pool of the heap's own, one block for each segment, so that
pins, limits of the device, arrays that outlive the communicator, and forks are handled as there.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from cupy.cuda import MemoryPointer

from ..base_memory import BaseMemory
from ..config import settings
from ..driver.api import round_up
from ..errors import ClosedError, InvalidValueError, MismatchError
from ..group import Transaction, vote
from ..group.naming import sides
from ..memory.blocks import Segment
from ..memory.device import DevicePool
from ..memory.pool import UNIT, abandon
from ..memory.pooled import NoMemory, PooledMemory, hand_over
from .agreed import News
from .allocator import SymmetricAllocator, SymmetricBlock
from .registry import Choice, Registry

__all__ = ["SymmetricHeap", "SymmetricMemory"]


class SymmetricMemory(BaseMemory):
    """One symmetric block in the user's hands: ``array.data.mem``. Made by the heap only.

    Dropping it appends a number to a list and does nothing else.
    """

    __slots__ = ("_backing", "_dropped", "_number", "driver_name")

    if TYPE_CHECKING:
        _backing: PooledMemory
        _dropped: Callable[[int], None]
        _number: int
        driver_name: str

    @property
    def segment(self) -> Segment:
        """The segment the block lies in."""
        return self._backing.segment

    def __del__(self) -> None:
        self._dropped(self._number)


class SymmetricHeap:
    """Arena 0: blocks at the same offsets on every rank.

    Making one is collective, as are :meth:`allocate` and :meth:`reserve_private`.

    Args:
        registry: Of the communicator; it has one heap.
        timeout: Seconds to wait for the peers here; None for ``settings().setup_timeout``.

    Raises:
        AgreementError: a rank has no addresses left; on all ranks.
        PeerTimeoutError, MismatchError, ClosedError: as for :meth:`allocate`.
    """

    def __init__(self, registry: Registry, *, timeout: float | None = None) -> None:
        self._registry = registry
        self._channel = registry.channel
        #: Numbers of blocks that this rank dropped and has not told the others about.
        self._dropped: list[int] = []
        self._allocator = SymmetricAllocator(self._channel.ranks)
        self._private: list[SymmetricMemory] = []
        #: The memory of each segment, by offset.
        self._backing: dict[int, PooledMemory] = {}
        self.closed = False
        wanted = settings().segment_size
        granule = registry.driver.granularity(registry.device, wanted).size
        wish = json.dumps([granule, wanted]).encode()
        wishes = self._channel.all_gather(wish, tag="symmetric heap", timeout=timeout)
        granules, sizes = zip(*map(json.loads, wishes), strict=True)
        self._granule = max(granules)
        self._segment_size = min(sizes)
        with Transaction(self._channel, timeout=timeout) as transaction:
            # The segment size of one byte makes it ask for what is needed and not more.
            self._pool = transaction.step(
                "reserve the symmetric heap",
                lambda: DevicePool(registry.driver, registry.device, 1, 0),
                DevicePool.close,
            )
            transaction.commit()
        self._home = self._pool.homes[0]
        self.arena = self._pool.arena
        registry.claim_heap(self.arena)

    def allocate(
        self, nbytes: int, call: str = "Communicator.empty", timeout: float | None = None
    ) -> Any:
        """Memory at the same offset of arena 0 on every rank. Collective.

        Args:
            nbytes: Bytes, equal on all ranks; rounded up to 512.
            call: The public name, for errors.
            timeout: Seconds to wait for the peers to come here; None for what the registry has.

        Returns:
            A ``cupy.cuda.MemoryPointer``. The bytes are whatever they were. For 0 bytes there is no
            memory, and no offset.

        Raises:
            MismatchError: different sizes; on all ranks, and nothing is allocated.
            AgreementError: a rank has no memory left, or passed no size; on all ranks, as above.
            PeerTimeoutError: a rank did not come. ClosedError: the communicator is closed.
        """
        size = round_up(self._meet(nbytes, call, timeout), UNIT)
        device, name = self._registry.device, self._registry.driver.name
        if not size:
            return MemoryPointer(NoMemory(device, name), 0)
        block = self._allocator.allocate(size)
        if block is None:
            self._grow(size, call)
            block = self._allocator.allocate(size)
            assert block is not None  # it fits what was added
        return MemoryPointer(self._memory(block), 0)

    def reserve_private(self, nbytes: int, call: str = "Communicator") -> int:
        """As :meth:`reserve`, kept until :meth:`close`: its offset."""
        memory = self.reserve(nbytes, call)
        self._private.append(memory)
        return self.offset(memory)

    def offset(self, memory: SymmetricMemory) -> int:
        """Where a block is in arena 0."""
        return int(memory.ptr - self.arena.base)

    def reserve(self, nbytes: int, call: str = "Communicator") -> SymmetricMemory:
        """A block for the communicator's own use. Collective.

        Returns:
            The block, at an offset in arena 0 that is equal on all ranks and a multiple of 512. Who
            has it can outlive the heap, as arrays do.

        Raises:
            As :meth:`allocate`; also InvalidValueError for 0 bytes.
        """
        if not nbytes:
            raise InvalidValueError(call, "nbytes", nbytes, "more than 0 bytes")
        memory: SymmetricMemory = self.allocate(nbytes, call).mem
        return memory

    def used_bytes(self) -> int:
        """Bytes of blocks that some rank is not known to have dropped."""
        return sum(block.size for block in self._allocator.blocks())

    def total_bytes(self) -> int:
        """Bytes of all segments. They stay until the heap is closed."""
        return sum(memory.size for memory in self._backing.values())

    def close(self) -> None:
        """End the heap. Local; again does nothing.

        Arrays that are still alive keep their memory; it goes back when the last one is dropped and
        a pool or a heap of the process is next at work.
        """
        if not self.closed:
            self.closed = True
            self._private.clear()
            self._backing.clear()
            abandon(self._pool)

    def _meet(self, nbytes: int, call: str, timeout: float | None) -> int:
        """Tell the others what is asked for and what was dropped; the size all ranks agree on."""
        if self.closed:
            raise ClosedError(f"rank {self._channel.rank}: {call}: the communicator is closed")
        dropped = self._dropped.copy()
        error: Exception | None = None
        wanted: int | None
        try:
            wanted = operator.index(nbytes)
            if wanted < 0:
                raise InvalidValueError(call, "nbytes", nbytes, "at least 0 bytes")
            if dropped:  # who gets the memory next must not meet work that still uses it
                self._registry.driver.synchronize(self._registry.device)
        except Exception as failure:  # noqa: BLE001 - the vote raises it on every rank
            error, wanted, dropped = failure, None, []
        said = self._channel.all_gather(
            json.dumps([wanted, dropped]).encode(),
            tag=call,
            timeout=self._registry.timeout if timeout is None else timeout,
        )
        del self._dropped[: len(dropped)]
        sizes: dict[int, int | None] = {}
        for rank, item in zip(self._channel.ranks, said, strict=True):
            sizes[rank], numbers = json.loads(item)
            self._allocator.drop(rank, numbers)
        if None in sizes.values():
            vote(self._channel, call, error)
        if len(set(sizes.values())) > 1:
            raise MismatchError(
                f"{call}: the size must be equal on all ranks: "
                + sides({rank: f"{size:,} bytes" for rank, size in sizes.items()})
            )
        size = sizes[self._channel.rank]
        assert size is not None  # else the vote has raised
        return size

    def _grow(self, size: int, call: str) -> None:
        """Add one segment on all ranks, at the same offset, or on none."""
        wanted = round_up(max(size, self._segment_size), self._granule)
        with ExitStack() as undo:
            made: list[PooledMemory] = []

            def choose() -> Choice:
                block = self._pool.allocate(self._home, wanted)
                memory: PooledMemory = hand_over(block, self._pool.device).mem
                undo.callback(self._pool.supply.release_free)
                undo.callback(memory.free)
                made.append(memory)
                return Choice([memory.segment], self)

            self._registry.agree(f"{call}: grow", choose, _check_symmetric)
            undo.pop_all()
        offset = made[0].segment.offset
        self._backing[offset] = made[0]
        self._allocator.grow(offset, wanted)

    def _memory(self, block: SymmetricBlock) -> SymmetricMemory:
        memory = SymmetricMemory()
        memory._number = block.number
        memory._dropped = self._dropped.append
        memory.ptr = self.arena.base + block.offset
        memory.size = block.size
        memory.device_id = self._registry.device
        memory.driver_name = self._registry.driver.name
        memory._backing = self._backing[block.segment]
        return memory


def _check_symmetric(said: Mapping[int, News]) -> None:
    """All ranks must have made the same segment; a failed release may have kept an old one."""
    places = {
        rank: ", ".join(f"{offer.size:,} bytes at {offer.name.offset:#x}" for offer in news.offers)
        for rank, news in said.items()
    }
    if len(set(places.values())) > 1:
        raise MismatchError(f"the symmetric heap grew differently: {sides(places)}")
