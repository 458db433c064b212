"""What every engine does for a communicator: the seam between checked calls and their execution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from ..memory.blocks import Segment
from ..registration import Probe, Registration, Rule
from .call import Call, Transfer
from .point_to_point import Letter

__all__ = ["Agreed", "Engine", "Place", "Repeat", "WithinNode"]


class Place(NamedTuple):
    """Where an array of this rank is, for a call."""

    arena: int
    offset: int
    #: Why it is staged; empty where it is not.
    reason: str
    #: To be registered, so that it need not be staged next time.
    segment: Segment | None


class Agreed(NamedTuple):
    """What the ranks of a node know of a captured call in which nobody stages."""

    #: Arena and offset of the inputs that all of them reach, by rank; they stay while the graph
    #: lives.
    inputs: Mapping[int, tuple[int, int]]
    #: To be called where the graph itself reads memory of peers, and not only kernels, which do
    #: nothing once the communicator is closed: it stays mapped then until the graph is gone.
    keep_windows: Callable[[], None]


class Repeat(Protocol):
    """A collective that was made, checked and prepared."""

    def launch(self, stream: Any) -> bool:
        """Make it again with the same arrays; False, and nothing done, if that cannot be."""
        ...


class Engine(Protocol):
    """Carries out the calls of one rank; those of a lane in the order of their streams.

    Making one is collective. A communicator asks it under its own lock only, but for :meth:`check`.
    """

    #: What ``Communicator.backend`` says.
    name: str
    #: How it tries multicast out; None where it does not use it.
    multicast_probe: Probe | None

    def last(self, *, ended: bool) -> Transfer | None:
        """What the last call did that ran, or that was enqueued where that tells enough.

        Args:
            ended: Whether all calls that were enqueued have ended.
        """
        ...

    def prove_multicast(self, bound: Callable[[int, int], bool]) -> str:
        """Use multicast from now on, if what goes through it comes out right. Collective.

        Args:
            bound: Whether a byte of this rank, by arena and offset, is bound on all ranks.

        Returns:
            What is wrong, the same on all ranks, and multicast is not used then; empty: nothing.

        Raises:
            AgreementError: it could not be tried; on all ranks.
        """
        ...

    def connect(self) -> None:
        """Set up what must come after multicast was tried. Collective, once.

        Raises:
            AgreementError: it failed on a rank; on all of them.
        """
        ...

    def register(self, registration: Registration) -> None:
        """Register segments with what else than the node's windows carries data. Collective.

        Args:
            registration: What the ranks of the node have registered just now; what is done here
                ends with it.

        Raises:
            AgreementError: it failed on a rank; on all of them, and nothing is kept.
        """
        ...

    def adopt(self, segment: Segment) -> None:
        """The ranks have a segment at one offset, for as long as the communicator. Collective.

        Args:
            segment: Of the symmetric heap; one that is known already is no matter.

        Raises:
            AgreementError: a rank cannot use it; on all ranks of the node.
        """
        ...

    def collect(self) -> None:
        """Carry out what was let go of outside of the node's windows. Collective.

        Raises:
            AgreementError: it failed on a rank; on all of them.
        """
        ...

    def rules(self, array: Any) -> tuple[Rule, ...]:
        """What decides, besides the registry's rules, how an array is carried. Local."""
        ...

    def preload(self, code: int, reduction: int) -> None:
        """Load what calls of an element type and a reduction may need. Local."""
        ...

    def places(self, work: Call | Letter) -> tuple[Place, ...]:
        """Where the arrays of a call are, as far as other ranks touch them. Local."""
        ...

    def enqueue(self, work: Call | Letter, stream: Any, lane: int = 0) -> None:
        """Put a call at the end of a stream.

        Args:
            work: The call.
            stream: Where. If ``lane`` is not 0 it is capturing: the call is recorded, and made each
                time the graph is replayed. What it keeps of the arrays is their addresses; their
                memory, and that it stays registered, is the matter of the lease.
            lane: 0 for eager calls; collectives of a graph have the one it got by
                :meth:`open_lane`. Calls of different lanes run at once, and in another order on
                each rank. Point-to-point calls have none.
        """
        ...

    def decline(self) -> None:
        """This rank captures, and peers have told it that they wait for it in an eager call.

        They and this rank get a MismatchError and are in step again. Peers tell only where an
        engine asks for it (see ``Communicator``); the others need not do anything here.
        """
        ...

    def open_lane(self) -> int:
        """A lane for a graph, not 0. Collective: the ranks are at the same captured call.

        Its number is that of ``registry.lanes.take()``, the lowest that no rank uses. Lanes are
        kept, so that this needs no new memory where one is used again.

        Raises:
            AgreementError: a rank has no memory left; on all of them, and no lane is taken.
        """
        ...

    def fit_lane(self, lane: int, call: Call, agreed: Agreed | None) -> None:
        """Give a lane what a call needs that is recorded next. Collective, as above.

        Args:
            lane: Of the graph.
            call: The call.
            agreed: What the ranks know of it; None where some rank copies its data through scratch.

        Raises:
            AgreementError: a rank has no memory left; on all of them.
        """
        ...

    def lane_bytes(self, lane: int) -> int:
        """Bytes that a lane takes on this rank."""
        ...

    def close_lane(self, lane: int) -> None:
        """The graph of a lane is gone on this rank. Local, from any thread.

        The lane is given again when that is so on all ranks: ``registry.lanes.drop(lane)``.
        """
        ...

    def invalidate(self) -> None:
        """Make every replay of a graph do nothing from now on, and report that. Local.

        Waits for replays that are under way.
        """
        ...

    def repeat(self) -> Repeat | None:
        """The call that was enqueued last, to be made again; None where it must be made anew."""
        ...

    def check(self, call: object) -> None:
        """Raise what went wrong in a call that ran.

        Raises:
            MismatchError, PeerTimeoutError: a call failed on the device, and nobody was told yet.
            ClosedError: the communicator cannot be used since a call failed, its ``__cause__``.
        """
        ...

    def fail(self, error: BaseException) -> BaseException:
        """Make no further calls: the ranks have lost each other.

        Returns:
            What went wrong first, of which ``error`` may be a consequence.
        """
        ...

    def wait(self, point: Any) -> None:
        """Wait for a stream, or an event of the driver, behind calls of this engine."""
        ...

    def leave(self) -> None:
        """What was enqueued on streams of the user has ended, and this rank is about to close.

        It waits for what goes on behind those, and may wait for the others.
        """
        ...

    def close(self) -> None:
        """Give back what is not memory of the heap. Local; work enqueued has ended before."""
        ...


class WithinNode:
    """What an engine need not do whose ranks reach all memory of each other."""

    def connect(self) -> None:
        """Nothing: all is set up."""

    def register(self, registration: Registration) -> None:
        """Nothing: the windows of the node carry all data."""

    def adopt(self, segment: Segment) -> None:
        """Nothing: as above."""

    def collect(self) -> None:
        """Nothing: the registry does it."""

    def leave(self) -> None:
        """Nothing: what was sent is where the receiver finds it, and peers map what they read."""

    def rules(self, array: Any) -> tuple[Rule, ...]:  # noqa: ARG002
        """None: the registry has them all."""
        return ()
