"""Peers' arenas, mirrored: their registered segments at the same offsets of a range of ours.

Every rank numbers its own arenas: 0 is the communicator's heap, 1, 2, ... the arenas of pools, in
the order of their first registration. ``(rank, arena, offset)`` then names a byte on all ranks, and
an address of it in this process is a base plus the offset. A base does not move while its arena
lives, so what was captured into a graph stays true. Behind the rows of the ranks, in the one of
their number, are the bases of multicast windows (:mod:`.multicast`).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from ..config import settings
from ..driver.api import Driver, round_up
from ..errors import Error

__all__ = ["SegmentName", "SegmentOffer", "Window", "Windows"]


@dataclass(frozen=True, slots=True)
class SegmentName:
    """A segment of a rank, told from all others that ever had this offset there."""

    arena: int
    offset: int
    generation: int


@dataclass(frozen=True, slots=True)
class SegmentOffer:
    """A segment that a rank lets its peers map. Sizes in bytes."""

    name: SegmentName
    size: int
    #: Size of the arena, which is the size of the mirrored range.
    arena_size: int


class Window:
    """One arena of one peer, mirrored.

    Args:
        driver: Where addresses and mappings come from.
        device: The device that reads and writes.
        size: Bytes of the peer's arena.

    Raises:
        DriverError: no addresses are left.
    """

    def __init__(self, driver: Driver, device: int, size: int) -> None:
        self._driver = driver
        self._device = device
        granularity = driver.granularity(device, settings().segment_size)
        # A peer's granule may be another one; only what is mapped must fit this device's.
        self._range = round_up(size, granularity.size)
        self.base = driver.reserve(self._range, max(granularity.alignment, granularity.size))
        #: By offset: size and generation.
        self._mapped: dict[int, tuple[int, int]] = {}

    def map(self, offset: int, size: int, generation: int, fd: int) -> None:
        """Map a peer's segment and open it; all of it or nothing. ``fd`` stays the caller's.

        Raises:
            DriverError: a step failed; what was done before it is undone.
        """
        driver, address = self._driver, self.base + offset
        with ExitStack() as undo:
            handle = driver.import_segment(fd, size, self._device)
            try:
                driver.map(address, handle)
                undo.callback(driver.unmap, address, size)
            finally:
                driver.release(handle)  # the mapping holds the memory
            driver.set_access(address, size, self._device)
            undo.pop_all()
        self._mapped[offset] = (size, generation)

    def unmap(self, offset: int, generation: int) -> None:
        """Take a segment back. One that is not mapped, or another generation, is left alone.

        Raises:
            DriverError: it could not be unmapped, and is still whole.
        """
        size, mapped = self._mapped.get(offset, (0, None))
        if mapped == generation:
            self._driver.unmap(self.base + offset, size)
            del self._mapped[offset]

    def holds(self, offset: int) -> bool:
        """Whether a mapped segment has this byte."""
        return any(at <= offset < at + size for at, (size, _) in self._mapped.items())

    def close(self) -> None:
        """Unmap everything and give the range back.

        Raises:
            DriverError: the first thing that went wrong; everything else was done all the same.
        """
        with ExitStack() as stack:
            stack.callback(self._driver.free_range, self.base, self._range)
            for offset, (_, generation) in list(self._mapped.items()):
                stack.callback(self.unmap, offset, generation)


class Windows:
    """All arenas of all ranks that can be reached from here, the own ones among them."""

    def __init__(self, driver: Driver, device: int, rank: int) -> None:
        self._driver = driver
        self._device = device
        self._rank = rank
        self._windows: dict[tuple[int, int], Window] = {}
        self._bases: dict[tuple[int, int], int] = {}
        #: Changes with the bases.
        self.version = 0

    def bases(self) -> dict[tuple[int, int], int]:
        """Where arenas begin in this process, by rank and arena; see above for multicast."""
        return dict(self._bases)

    def address(self, rank: int, arena: int, offset: int) -> int:
        """Where a byte of a rank is in this process.

        It does not look whether something is mapped there: the word of a rank in the entry barrier
        of a collective names registered bytes only.

        Raises:
            Error: nothing of that arena was ever registered.
        """
        try:
            return self._bases[rank, arena] + offset
        except KeyError:
            raise Error(
                f"rank {self._rank} has nothing mapped of arena {arena} of rank {rank}; "
                "that rank must register an array of it first"
            ) from None

    def own(self, arena: int, base: int) -> None:
        """Make an arena of this rank known."""
        self._bases[self._rank, arena] = base
        self.version += 1

    def disown(self, arena: int) -> None:
        """Forget an arena of this rank that is gone."""
        self._bases.pop((self._rank, arena), None)

    def cast(self, row: int, arena: int, base: int) -> None:
        """Make the multicast window of an arena known; ``row`` is the number of ranks."""
        self._bases[row, arena] = base
        self.version += 1

    def uncast(self, row: int, arena: int) -> None:
        """Forget the multicast window of an arena that is gone."""
        self._bases.pop((row, arena), None)

    def open(self, rank: int, arena: int, size: int) -> bool:
        """Reserve the range for a peer's arena where that is not done yet; whether it was not.

        Raises:
            DriverError: no addresses are left.
        """
        key = (rank, arena)
        if key in self._windows:
            return False
        window = self._windows[key] = Window(self._driver, self._device, size)
        self._bases[key] = window.base
        self.version += 1
        return True

    def shut(self, rank: int, arena: int) -> None:
        """Unmap what is left of a peer's arena and give its range back; none is fine.

        Raises:
            DriverError: as :meth:`Window.close`; the window is still there, for another attempt.
        """
        window = self._windows.get((rank, arena))
        if window is not None:
            window.close()
            del self._windows[rank, arena], self._bases[rank, arena]

    def map(self, rank: int, offer: SegmentOffer, fd: int) -> None:
        """Map a peer's segment into its open window. Errors: see :meth:`Window.map`."""
        name = offer.name
        self._windows[rank, name.arena].map(name.offset, offer.size, name.generation, fd)

    def unmap(self, rank: int, name: SegmentName) -> None:
        """Take a peer's segment back; one that is not mapped is left alone."""
        window = self._windows.get((rank, name.arena))
        if window is not None:
            window.unmap(name.offset, name.generation)

    def holds(self, rank: int, arena: int, offset: int) -> bool:
        """Whether a peer's byte is mapped here."""
        window = self._windows.get((rank, arena))
        return window is not None and window.holds(offset)

    def close(self) -> None:
        """Unmap everything.

        Raises:
            DriverError: the first thing that went wrong; everything else was done all the same.
        """
        with ExitStack() as stack:
            for rank, arena in list(self._windows):
                stack.callback(self.shut, rank, arena)
