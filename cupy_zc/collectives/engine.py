"""What every engine does for a communicator: the seam between checked calls and their execution."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from ..memory.blocks import Segment
from ..registration import Probe
from .call import Call, Transfer
from .point_to_point import Letter

__all__ = ["Engine", "Place", "Repeat"]


class Place(NamedTuple):
    """Where an array of this rank is, for a call."""

    arena: int
    offset: int
    #: Why it is staged; empty where it is not.
    reason: str
    #: To be registered, so that it need not be staged next time.
    segment: Segment | None


class Repeat(Protocol):
    """A collective that was made, checked and prepared."""

    def launch(self, stream: Any) -> bool:
        """Make it again with the same arrays; False, and nothing done, if that cannot be."""
        ...


class Engine(Protocol):
    """Carries out the calls of one rank, in the order in which they are enqueued.

    Making one is collective. A communicator asks it under its own lock only, but for :meth:`check`.
    """

    #: What ``Communicator.backend`` says.
    name: str
    #: How it tries multicast out; None where it does not use it.
    multicast_probe: Probe | None

    @property
    def last(self) -> Transfer | None:
        """What the last call did that ran, or that was enqueued where that tells enough."""
        ...

    def places(self, work: Call | Letter) -> tuple[Place, ...]:
        """Where the arrays of a call are, as far as other ranks touch them. Local."""
        ...

    def enqueue(self, work: Call | Letter, stream: Any) -> None:
        """Put a call at the end of a stream."""
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

    def fail(self, error: BaseException) -> None:
        """Make no further calls: the ranks have lost each other."""
        ...

    def close(self) -> None:
        """Give back what is not memory of the heap. Local; work enqueued has ended before."""
        ...
