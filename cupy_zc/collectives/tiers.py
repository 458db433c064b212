"""What a hierarchical collective uses beside its node: a rail, or all ranks at once.

A tier is an engine with what it takes to use it from another one: its own registrations and lanes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Protocol

from ..memory.blocks import Segment
from ..registration import Choice, Registration, pin
from .call import BARRIER, Call
from .engine import Engine
from .level import Level
from .nccl import NcclEngine

__all__ = ["HostTier", "NcclTier", "Tier"]


class Tier(Protocol):
    """Ranks of several nodes. Everything but what says so is collective among them."""

    engine: Engine

    def enter(self, calls: Iterable[Call]) -> None:
        """Eager calls, or none, are about to be enqueued, by all ranks of the tier."""
        ...

    def register(self, registration: Registration) -> None:
        """As :meth:`Engine.register`, without a word to the node."""
        ...

    def adopt(self, segment: Segment) -> None:
        """As :meth:`Engine.adopt`."""
        ...

    def collect(self) -> None:
        """Carry out what was let go of."""
        ...

    def open_lane(self) -> int:
        """A lane for a graph."""
        ...

    def fit_lane(self, lane: int, call: Call) -> None:
        """Give it what a call needs that is about to be recorded."""
        ...

    def lane_bytes(self, lane: int) -> int:
        """Bytes of a lane on this rank. Local."""
        ...

    def close_lane(self, lane: int) -> None:
        """The graph of a lane is gone on this rank. Local, from any thread."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """A block that waits for what was enqueued. Local."""
        ...

    def part(self) -> None:
        """Let the others know that this rank makes no further calls. Local."""
        ...

    def close(self) -> None:
        """Give everything back. Local; work enqueued has ended before."""
        ...


class HostTier:
    """Ranks on pretend nodes of one machine, which reach each other's memory after all.

    Args:
        level: What they share.
        engine: Theirs.
        automatic: Whether what its calls touch is registered at agreed call numbers.
    """

    def __init__(self, level: Level, engine: Engine, *, automatic: bool) -> None:
        self.engine = engine
        self._level = level
        self._registry = level.registry
        self._automatic = automatic
        self._numbered = 0

    def enter(self, calls: Iterable[Call]) -> None:
        """Count, and register at agreed numbers, as a communicator does."""
        if not self._automatic:
            return
        for call in calls:
            for place in self.engine.places(call):
                if place.segment is not None:
                    self._registry.touched(place.segment)
            if call is not BARRIER:
                self._numbered += 1
                self._registry.at_call(self._numbered)

    def register(self, registration: Registration) -> None:
        """Let the ranks of the tier reach the segments as well."""
        segments = pin(registration.segments)
        try:
            self._registry.agree("register on the tier", lambda: Choice(segments, registration))
        except BaseException:
            self._registry.let_go(registration, segments)
            raise
        registration.at_end(lambda: self._registry.let_go(registration, segments))

    def adopt(self, segment: Segment) -> None:
        """Nothing: what calls touch is registered at agreed numbers."""

    def collect(self) -> None:
        """Carry out what was let go of."""
        self._registry.collect("collect on the tier")

    def open_lane(self) -> int:
        """A lane for a graph, one that was given back if there is one."""
        self._registry.collect("open a lane of the tier")
        return self.engine.open_lane()

    def fit_lane(self, lane: int, call: Call) -> None:
        """Scratch: leases register with the node only."""
        self.engine.fit_lane(lane, call, None)

    def lane_bytes(self, lane: int) -> int:
        """Bytes of a lane."""
        return self.engine.lane_bytes(lane)

    def close_lane(self, lane: int) -> None:
        """To be given again when all ranks of the tier have said so."""
        self.engine.close_lane(lane)

    def waiting(self) -> AbstractContextManager[None]:
        """Nothing is to be known: every wait of the host engine ends by itself."""
        return nullcontext()

    def part(self) -> None:
        """Close the channels."""
        self._level.part()

    def close(self) -> None:
        """In the order of a communicator."""
        with ExitStack() as stack:
            stack.callback(self._level.heap.close)
            stack.callback(self.engine.close)
            stack.callback(self._registry.close)


class NcclTier:
    """Ranks that NCCL connects.

    Args:
        engine: Theirs.
    """

    def __init__(self, engine: NcclEngine) -> None:
        self.engine: Engine = engine
        self._nccl = engine
        self._lanes = itertools.count(1)

    def enter(self, calls: Iterable[Call]) -> None:  # noqa: ARG002
        """Deregister what was let go of. What calls touch is not registered with NCCL."""
        self._nccl.collect()

    def register(self, registration: Registration) -> None:
        """Register with NCCL."""
        self._nccl.register(registration)

    def adopt(self, segment: Segment) -> None:
        """Register with NCCL."""
        self._nccl.adopt(segment)

    def collect(self) -> None:
        """Deregister what was let go of."""
        self._nccl.collect()

    def open_lane(self) -> int:
        """A number for a graph; NCCL needs no memory of ours."""
        lane = next(self._lanes)
        self._nccl.begin(lane)
        return lane

    def fit_lane(self, lane: int, call: Call) -> None:
        """Nothing: NCCL keeps for the graph what its calls need."""

    def lane_bytes(self, lane: int) -> int:
        """Nothing of ours."""
        return self._nccl.lane_bytes(lane)

    def close_lane(self, lane: int) -> None:
        """The graph of a lane is gone on this rank."""
        self._nccl.end(lane)

    def waiting(self) -> AbstractContextManager[None]:
        """Replays that do not end in it are aborted in time."""
        return self._nccl.health.waiting()

    def part(self) -> None:
        """Nobody is told: ranks of other nodes learn it from their own, or by the timeout."""

    def close(self) -> None:
        """Give the communicators of NCCL back."""
        self._nccl.close()
