"""What a registry hands out and keeps: places of arrays, registrations, published segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..memory.blocks import Segment
from .window import SegmentName, SegmentOffer

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Entry", "Location", "Registration"]


class Location(NamedTuple):
    """Where an array is, for the ranks. A tuple because one is made in every collective call."""

    #: Number of the arena on this rank; -1 where the array is not registered.
    arena: int
    #: Of the array's first byte from the base of the arena, in bytes.
    offset: int
    #: Whether the peers can reach it. An array without bytes counts as registered, at (0, 0).
    registered: bool
    #: Why it is not registered, in a sentence; empty where it is.
    reason: str
    #: For ``Registry.touched``; None where the memory can never be registered.
    segment: Segment | None


class Registration:
    """An array or a pool that the peers can reach. A context manager that deregisters at its end.

    Made by :meth:`~cupy_zc.Communicator.register`. It keeps the array, or the pool, alive;
    nobody need keep the registration itself.
    """

    __slots__ = ("_endings", "_let_go", "_segments", "_target", "arrays", "nbytes")

    def __init__(
        self, target: Any, let_go: Callable[[Registration, Sequence[Segment]], None]
    ) -> None:
        self._target = target
        self._let_go = let_go
        self._segments: Sequence[Segment] = ()
        #: Called at the end, while the memory is still held.
        self._endings: list[Callable[[], None]] = []
        #: Bytes of the segments it holds on this rank.
        self.nbytes = 0
        #: What each rank registered in that call, as (arena, offset); None where not one array.
        self.arrays: Mapping[int, tuple[int, int] | None] = {}

    @property
    def active(self) -> bool:
        """Whether it was not deregistered yet."""
        return hasattr(self, "_target")

    def hold(self, segments: Sequence[Segment]) -> None:
        """For the registry: the segments, pinned already."""
        self._segments = segments
        self.nbytes = sum(segment.size for segment in segments)

    @property
    def segments(self) -> Sequence[Segment]:
        """What it holds on this rank."""
        return self._segments

    def at_end(self, ending: Callable[[], None]) -> None:
        """For engines: have something called when it ends, in any thread; it must not raise."""
        self._endings.append(ending)

    def deregister(self) -> None:
        """Let go. Local, from any thread and in any order; again does nothing.

        The peers unmap the segments, unless something else holds them, at the next point where the
        ranks talk anyway: ``register``, ``empty``, ``collect`` or an agreed call number.
        """
        try:
            del self._target  # of two threads, one gets past this
        except AttributeError:
            return
        for ending in reversed(self._endings):
            ending()
        segments, self._segments = self._segments, ()
        self._let_go(self, segments)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.deregister()

    def __repr__(self) -> str:
        state = "" if self.active else ", deregistered"
        return f"<Registration of {self.nbytes:,} bytes{state}>"


class Entry:
    """A published segment. Holders come and go by single operations on a set: no lock is needed."""

    __slots__ = ("holders", "name", "segment")

    def __init__(self, segment: Segment, name: SegmentName) -> None:
        self.segment = segment
        self.name = name
        self.holders: set[object] = set()

    @property
    def wanted(self) -> bool:
        """Whether somebody holds it and the pool still has it."""
        segment = self.segment
        live = segment.home.pool.arena.segments.get(segment.offset)
        return bool(self.holders) and live is segment

    def tell(self) -> None:
        """Let the pool show who has the segment registered: it is published now."""
        with self.segment.home.pool.region:
            self.segment.held_by.append(self.holders)

    def forget(self) -> None:
        """Take that back: it is not published any more."""
        segment, mine = self.segment, self.holders
        with segment.home.pool.region:
            segment.held_by = [each for each in segment.held_by if each is not mine]

    @property
    def offer(self) -> SegmentOffer:
        """What peers need to know in order to map it."""
        return SegmentOffer(self.name, self.segment.size, self.segment.home.pool.arena.size)
