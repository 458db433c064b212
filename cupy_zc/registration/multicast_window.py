"""One arena behind multicast objects, as one rank has it. Local; the ranks agree elsewhere.

A range of this process mirrors the arena once more: at the same offsets, but what is stored there
goes to all ranks, and what is loaded is reduced over all of them. It is filled with *objects*, one
for each piece of ``Team.piece`` bytes, made when a segment in that piece is first bound.

How large an object may be is not documented. Known is that NCCL, from 2.27, makes one as large as a
GPU's memory rounded up and binds windows to it at their offsets, so that is what a piece is; that
an object costs no memory but only a slot of the NVSwitch and page tables is assumed. Arenas are
filled from the bottom and are at most a few times as large as the memory, so one object is the
rule. A segment across the end of a piece is not bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from ..driver.api import Driver, MulticastHandle
from ..memory.blocks import Segment
from .multicast_team import Team

__all__ = ["MulticastWindow"]


class MulticastWindow:
    """The objects and bindings of one arena.

    Args:
        driver: What makes and binds.
        device: The device of this rank.
        team: Of the communicator.
        room: Bytes that the arena has on every rank.

    Raises:
        DriverError: no addresses are left.
    """

    def __init__(self, driver: Driver, device: int, team: Team, room: int) -> None:
        self._driver = driver
        self._device = device
        self._team = team
        self.size = room // team.granule * team.granule
        granularity = driver.granularity(device, self.size)
        self._range = -(-self.size // granularity.size) * granularity.size
        self.base = driver.reserve(
            self._range, max(granularity.alignment, granularity.size, team.granule)
        )
        #: Those that all ranks have an object for.
        self.pieces: set[int] = set()
        self._objects: dict[int, MulticastHandle] = {}
        self._mapped: set[int] = set()
        #: Sizes by offset.
        self._bound: dict[int, int] = {}

    @staticmethod
    def fits(team: Team, room: int, offset: int, size: int) -> bool:
        """Whether a segment lies within one object."""
        whole = not offset % team.granule and not size % team.granule
        last = offset + size - 1
        return whole and last < room and offset // team.piece == last // team.piece

    def missing(self, segments: Iterable[Segment]) -> list[int]:
        """Pieces that have no object yet, of those in which the segments lie."""
        return sorted({each.offset // self._team.piece for each in segments} - self.pieces)

    def object_at(self, offset: int) -> tuple[MulticastHandle, int]:
        """The object that covers a byte, and the offset of the byte in it."""
        piece, inside = divmod(offset, self._team.piece)
        return self._objects[piece], inside

    # Objects

    def create(self, piece: int) -> int:
        """Make the object of a piece; returns a descriptor for the peers, owned by the caller.

        Raises:
            DriverError: it could not be made or exported, and there is none.
        """
        driver = self._driver
        self.release(piece)  # what an attempt before this one could not
        handle = driver.multicast_create(self._team.devices, self._bytes(piece))
        try:
            fd = driver.multicast_export(handle)
        except BaseException:
            driver.release(handle)
            raise
        self._objects[piece] = handle
        return fd

    def join(self, piece: int, fds: Sequence[int]) -> None:
        """Import the object, unless it was made here, and add the device of this rank.

        The handle stays until the end: to unbind needs it.

        Raises:
            DriverError: a step failed; an object that was imported is released.
        """
        driver = self._driver
        with ExitStack() as undo:
            if fds:
                self.release(piece)
                size = self._bytes(piece)
                handle = driver.multicast_import(fds[0], self._team.devices, size)
                undo.callback(driver.release, handle)
            else:
                handle = self._objects[piece]
            driver.multicast_add_device(handle, self._device)
            undo.pop_all()
        self._objects[piece] = handle

    def release(self, piece: int) -> None:
        """Let go of the object of a piece, in which nothing is bound or mapped any more."""
        if piece in self._objects:
            self._driver.release(self._objects[piece])
            del self._objects[piece]

    def map(self, pieces: Sequence[int]) -> None:
        """Map objects, of which every device is part by now; all of them or none.

        CUDA waits in it until every device was added, which the ranks must have agreed on before.
        """
        with ExitStack() as undo:
            for piece in pieces:
                address, size = self.base + piece * self._team.piece, self._bytes(piece)
                self._driver.map(address, self._objects[piece])
                self._mapped.add(piece)
                undo.callback(self._unmap, piece)
                self._driver.set_access(address, size, self._device)
            undo.pop_all()

    def unmap(self, pieces: Sequence[int]) -> None:
        """Take mappings back; all of them, whatever one of them raises."""
        with ExitStack() as stack:
            for piece in pieces:
                stack.callback(self._unmap, piece)

    def _unmap(self, piece: int) -> None:
        if piece in self._mapped:
            self._driver.unmap(self.base + piece * self._team.piece, self._bytes(piece))
            self._mapped.remove(piece)

    def _bytes(self, piece: int) -> int:
        return min(self._team.piece, self.size - piece * self._team.piece)

    # Bindings

    def bind(self, segments: Sequence[Segment]) -> None:
        """Bind segments of this rank at their offsets; all of them or none."""
        with ExitStack() as undo:
            for segment in segments:
                handle, inside = self.object_at(segment.offset)
                self._driver.multicast_bind(handle, inside, segment.handle, segment.size)
                self._bound[segment.offset] = segment.size
                undo.callback(self._unbind, segment.offset)
            undo.pop_all()

    def unbind(self, offsets: Iterable[int]) -> None:
        """Take bindings back; what is not bound is left alone.

        Raises:
            DriverError: one could not be taken back, and is still there; the others are gone.
        """
        with ExitStack() as stack:
            for offset in offsets:
                stack.callback(self._unbind, offset)

    def _unbind(self, offset: int) -> None:
        if offset in self._bound:
            handle, inside = self.object_at(offset)
            self._driver.multicast_unbind(handle, self._device, inside, self._bound[offset])
            del self._bound[offset]

    def close(self) -> None:
        """Unmap, unbind, release, and give the range back. It can be repeated after an error.

        Raises:
            DriverError: something went wrong; everything else was done all the same.
        """
        with ExitStack() as stack:
            stack.callback(self._free_range)
            for piece in tuple(self._objects):
                stack.callback(self.release, piece)
            stack.callback(self.unbind, tuple(self._bound))
            stack.callback(self.unmap, tuple(self._mapped))

    def _free_range(self) -> None:
        if self._range and not self._mapped:  # else the error was told by who did not unmap
            self._driver.free_range(self.base, self._range)
            self._range = 0
