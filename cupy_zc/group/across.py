"""How a step went on the other nodes: the ranks of a node know of their own only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from ..errors import AgreementError, Error, MismatchError
from .agreement import vote
from .bootstrap import Bootstrap
from .naming import numbered

__all__ = ["Across"]


class Across:
    """Ranks, one of each node at least, that tell each other how a step of their nodes went.

    The ranks of a node agree among themselves before, so that all of them bring the same outcome.
    Where nodes have as many ranks each, those of equal place in them do: that many small groups.

    Args:
        group: Those ranks; stays the caller's.
        ranks: Their numbers in the communicator, for errors.
        timeout: Seconds to wait for them.
        node: Name of this rank's node.
        node_ranks: The numbers of its ranks in the communicator.
    """

    def __init__(
        self,
        group: Bootstrap,
        ranks: Sequence[int],
        timeout: float,
        node: str,
        node_ranks: Sequence[int],
    ) -> None:
        self.ranks = tuple(ranks)
        self._group = group
        self._timeout = timeout
        self._node, self._node_ranks = node, tuple(node_ranks)

    def named(self) -> AbstractContextManager[None]:
        """A block of what the ranks of the node do, whose errors say which ranks those are."""
        return numbered(self._node, self._node_ranks)

    def all_gather(
        self, payload: bytes, *, tag: str = "", timeout: float | None = None
    ) -> list[bytes]:
        """As :class:`~cupy_zc.group.agreement.Group` says."""
        return self._group.all_gather(payload, tag=tag, timeout=timeout)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A block that the ranks of a node leave alike, and so do those of all nodes. Collective.

        Args:
            name: What is done in it.

        Raises:
            AgreementError: it failed on another node.
            MismatchError: another node does something else, by name, or its ranks do. In either
                case what this one did stands, and is the caller's to undo.
        """
        try:
            with self.named():
                yield
        except Error as error:
            with suppress(Error):  # what is wrong here goes on; this only lets the others know
                vote(self, name, error, timeout=self._timeout)
            raise
        try:
            vote(self, name, timeout=self._timeout)
        except AgreementError as error:
            if f"failed on rank {error.rank}: {MismatchError.__name__}: " in str(error):
                raise MismatchError(str(error)) from error
            raise
