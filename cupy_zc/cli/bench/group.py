"""How the processes of a run talk: through the parent, which answers when all have asked.

Nothing of the package under test, nor of its peers, is needed for it.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["DeadlinePassed", "Group"]

#: Seconds that a rank waits longer than its parent, whose report says where every rank was.
_GRACE = 3.0


class DeadlinePassed(Exception):  # noqa: N818  it is what happened
    """The run may not go on."""


class Group:
    """A rank's end.

    Args:
        connection: The pipe to the parent.
        rank: This process.
        size: All processes.
        deadline: When waits end, on the clock of ``time.monotonic``.
    """

    def __init__(self, connection: Connection, rank: int, size: int, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self.rank = rank
        self.size = size

    def tell(self, kind: str, value: object = None) -> None:
        """Send the parent a message that has no answer."""
        self._connection.send((kind, value))

    def all_gather(self, value: object) -> list[Any]:
        """Give a value, get those of all ranks in order.

        Raises:
            DeadlinePassed: the others did not come. EOFError: the parent has gone.
        """
        self._connection.send(("gather", value))
        if not self._connection.poll(max(self._deadline - time.monotonic(), 0) + _GRACE):
            raise DeadlinePassed(f"rank {self.rank} waited for the other ranks until the deadline")
        values: list[Any] = self._connection.recv()
        return values

    def barrier(self) -> None:
        """Return when all ranks are here."""
        self.all_gather(None)

    def objection(self, reason: str) -> str:
        """The first reason any rank has against going on, with its rank; nothing if none has."""
        reasons = self.all_gather(reason)
        return next((f"{why} (rank {rank})" for rank, why in enumerate(reasons) if why), "")
