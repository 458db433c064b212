"""Blocks, segments, and the free lists ("homes") they return to.

A *segment* is one physical allocation; it is cut into *blocks*, which are linked in address order
and never reach into another segment. Every segment belongs to one *home*: the free blocks of one
queue of work (a stream, or a stream inside a capture), so memory that a stream gave back is handed
to that stream again and needs no synchronisation.

A block comes back in three steps, each cheaper to undo than the next:

1. *returned*: dropping an array does one ``list.append``, from any thread, from the garbage
   collector, without a lock. Sizes that are asked for again and again have a bin of their own, from
   which a request takes the newest block straight back; all others share one.
2. *parked*: sorted by exact size, still cut as it was.
3. *free*: merged with its free neighbours and indexed by size for best fit.

Appending to a bin and popping from it are atomic. Everything else here is guarded by the region of
the device pool that owns the home.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Container, Iterator
from typing import TYPE_CHECKING, TypeAlias

from ..driver.api import Event, SegmentHandle

if TYPE_CHECKING:
    from .device import DevicePool

__all__ = ["FREE", "PARKED", "USED", "Block", "Home", "Run", "Segment"]

USED, PARKED, FREE = range(3)

#: How many sizes of a home can have a bin of their own.
HOT_SIZES = 128
#: How many other sizes are remembered, to find out which deserve one.
SEEN_SIZES = 4096

#: A maximal run of bytes in one state: (segment, offset, size, block or None where free).
Run: TypeAlias = "tuple[Segment, int, int, Block | None]"


class Segment:
    """One physical allocation at an offset of the arena. All sizes in bytes."""

    __slots__ = (
        "address",
        "cast_by",
        "created",
        "first",
        "generation",
        "handle",
        "held_by",
        "home",
        "offset",
        "pins",
        "settled",
    )

    def __init__(
        self, handle: SegmentHandle, offset: int, address: int, generation: int, created: float
    ) -> None:
        self.handle = handle
        self.offset = offset
        self.address = address
        #: Distinguishes this segment from every other one that ever had this offset.
        self.generation = generation
        self.created = created
        #: How many registrations forbid to release it to the driver.
        self.pins = 0
        #: Where it was a graph's that is gone: a point behind all work that may use it, for as long
        #: as nobody is given a block of it. Arrays may have outlived the capture.
        self.settled: Event | None = None
        #: Who has it registered, for each communicator: a set, which may be empty.
        self.held_by: list[Collection[object]] = []
        #: By whom it is bound to a multicast object, for each communicator.
        self.cast_by: set[object] = set()
        self.home: Home
        self.first: Block

    @property
    def size(self) -> int:
        """Bytes, a multiple of the granule."""
        return self.handle.size

    @property
    def registered(self) -> bool:
        """Whether a communicator has it registered, asked to or by itself."""
        return self.pins > 0 or any(tuple(self.held_by))

    @property
    def multicast(self) -> bool:
        """Whether a communicator has it bound to a multicast object."""
        return bool(self.cast_by)

    @property
    def staying(self) -> bool:
        """Whether it was not taken out of its home, as one whole free block, in order to leave."""
        first = self.first
        return first.state != FREE or self.home.index.get(first.offset) is first

    @property
    def whole(self) -> bool:
        """Whether it is one free block."""
        return self.first.state == FREE and self.first.next is None

    def blocks(self) -> Iterator[Block]:
        """All blocks in address order."""
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.next

    def runs(self, back: Container[Block]) -> Iterator[Run]:
        """Used blocks, and the free bytes between them in one piece; ``back`` counts as free."""
        start, size = self.offset, 0
        for block in self.blocks():
            if block.state != USED or block in back:
                size += block.size
                continue
            if size:
                yield self, start, size, None
            yield self, block.offset, block.size, block
            start, size = block.offset + block.size, 0
        if size:
            yield self, start, size, None


class Block:
    """A run of bytes inside one segment."""

    __slots__ = (
        "bin",
        "next",
        "offset",
        "prev",
        "ptr",
        "segment",
        "since",
        "size",
        "state",
        "uses",
    )

    def __init__(self, segment: Segment, offset: int, size: int) -> None:
        self.segment = segment
        self.offset = offset
        self.ptr = segment.address + offset - segment.offset
        self.size = size
        self.prev: Block | None = None
        self.next: Block | None = None
        self.state = USED
        #: How often it was handed out since it was cut; written only by whoever holds it.
        self.uses = 0
        #: ``time.monotonic()`` of when it was last taken from the parked or free blocks.
        self.since = 0.0
        #: Where it goes when it is dropped: to its home, or to ``record_stream``.
        self.bin: Bin


class Bin(list[Block]):
    """Where dropped arrays leave their blocks."""

    __slots__ = ("device", "members")

    def __init__(self, device: int = 0) -> None:
        super().__init__()
        self.device = device
        #: Blocks that are in it, or in the user's hands and will come back to it.
        self.members = 0


class Home:
    """The free blocks of one queue of work."""

    __slots__ = (
        "capture",
        "free_bytes",
        "heir",
        "hot",
        "index",
        "key",
        "parked",
        "pool",
        "returned",
        "seen",
        "sizes",
    )

    def __init__(self, pool: DevicePool, key: int, capture: int | None = None) -> None:
        self.pool = pool
        #: The driver's stream key.
        self.key = key
        #: The capture that owns this home, or None.
        self.capture = capture
        #: Who has its segments now, if the graph of its capture is gone.
        self.heir: Home | None = None
        #: The bins of single sizes, and the one of all others.
        self.hot: dict[int, Bin] = {}
        self.returned = Bin()
        self.seen: set[int] = set()
        self.parked: dict[int, list[Block]] = {}
        self.index: dict[int, Block] = {}
        self.sizes: list[tuple[int, int]] = []
        #: Bytes parked and free, without the returned ones.
        self.free_bytes = 0

    def latest(self) -> Home:
        """The home that has its segments."""
        return self if self.heir is None else self.heir.latest()

    # Returned blocks

    def bins(self) -> list[Bin]:
        """All bins."""
        return [self.returned, *self.hot.values()]

    def bin_for(self, size: int) -> Bin:
        """The bin that a block handed out for a request the fast path missed will come back to."""
        found = self.hot.get(size)
        if found is None:
            if size not in self.seen:
                if len(self.seen) >= SEEN_SIZES:
                    self.seen.clear()
                self.seen.add(size)
                return self.returned
            if len(self.hot) >= HOT_SIZES:
                for idle in [s for s, kept in self.hot.items() if not kept.members]:
                    del self.hot[idle]
                if len(self.hot) >= HOT_SIZES:
                    return self.returned
            found = self.hot[size] = Bin(self.pool.device)
        return found

    def reuse(self, size: int) -> Block | None:
        """The newest block in the bin of a size. Also for outside the region."""
        found = self.hot.get(size)
        try:
            return found.pop() if found else None
        except IndexError:  # another thread was faster
            return None

    # Parked blocks

    def park(self, block: Block) -> None:
        """Keep a returned block as it is cut."""
        block.state = PARKED
        self.free_bytes += block.size
        self.parked.setdefault(block.size, []).append(block)

    def unpark(self, size: int) -> Block | None:
        """A parked block of exactly ``size`` bytes."""
        blocks = self.parked.get(size)
        if not blocks:
            return None
        block = blocks.pop()
        block.state = USED
        self.free_bytes -= size
        return block

    def merge_parked(self) -> None:
        """Merge everything parked into the free blocks."""
        if not self.parked:
            return
        parked, self.parked = self.parked, {}
        for blocks in parked.values():
            for block in blocks:
                self.free_bytes -= block.size
                self.insert(block)

    # Free blocks

    def insert(self, block: Block) -> Block:
        """Add a block to the free ones, merged with free neighbours; returns what it became."""
        self.free_bytes += block.size
        after, before = block.next, block.prev
        if after is not None and after.state == FREE:
            self._forget(after)
            self._absorb(block, after)
        if before is not None and before.state == FREE:
            self._forget(before)
            self._absorb(before, block)
            block = before
        block.state = FREE
        self.index[block.offset] = block
        bisect.insort(self.sizes, (block.size, block.offset))
        return block

    def take(self, size: int) -> Block | None:
        """The smallest free block of at least ``size`` bytes (the lowest of equals), cut."""
        at = bisect.bisect_left(self.sizes, (size, 0))
        if at == len(self.sizes):
            return None
        _, offset = self.sizes.pop(at)
        block = self.index.pop(offset)
        if block.size > size:
            rest = Block(block.segment, offset + size, block.size - size)
            rest.prev, rest.next = block, block.next
            if rest.next is not None:
                rest.next.prev = rest
            block.next = rest
            self.pool.accounts.retire(block)
            block.size = size
            rest.state = FREE
            self.index[rest.offset] = rest
            bisect.insort(self.sizes, (rest.size, rest.offset))
        block.state = USED
        self.free_bytes -= size
        return block

    def remove(self, block: Block) -> None:
        """Take a free block out for good, because its segment leaves."""
        self._forget(block)
        self.pool.accounts.retire(block)
        self.free_bytes -= block.size

    def whole_segments(self) -> list[Segment]:
        """Segments that are one free block and that nothing holds, by offset."""
        return [
            block.segment
            for _, block in sorted(self.index.items())
            if block.prev is None and block.next is None and block.segment.pins == 0
        ]

    def largest(self) -> int:
        """Bytes of the largest free block, 0 where there is none."""
        return self.sizes[-1][0] if self.sizes else 0

    def _forget(self, block: Block) -> None:
        del self.index[block.offset]
        del self.sizes[bisect.bisect_left(self.sizes, (block.size, block.offset))]

    def _absorb(self, block: Block, after: Block) -> None:
        self.pool.accounts.retire(block)
        self.pool.accounts.retire(after)
        block.size += after.size
        block.next = after.next
        if after.next is not None:
            after.next.prev = block
