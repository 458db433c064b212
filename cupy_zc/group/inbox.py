"""What the peers of a channel have sent: what is asked for now, and what is kept for later.

A stream holds the messages of collective calls and the mail of point-to-point calls as they were
sent, and a rank may ask for them in another order: it may take part in an exchange before it reads
the mail that arrived first. Messages are therefore queued by the peer and by what they belong to:
the collective calls together, and each tag of the mail by itself.
"""

from __future__ import annotations

import socket
from collections import deque

from .messages import Inbound, Kind

__all__ = ["Inbox"]


class Inbox:
    """Messages by peer and by what they belong to, each in the order of its sender."""

    def __init__(self) -> None:
        self._begun: dict[int, Inbound] = {}
        self._kept: dict[tuple[int, str | None], deque[Inbound]] = {}
        self._farewells: dict[int, Inbound] = {}

    def take(self, rank: int, connection: socket.socket, tag: str | None) -> Inbound | None:
        """The next complete message of a peer, read from its socket as far as that is needed.

        Args:
            rank: The peer.
            connection: Its socket.
            tag: Of the mail that is asked for; None asks for that of a collective call.

        Returns:
            It, or the message by which the peer gave up; None where neither has arrived.

        Raises:
            ConnectionError: the peer has closed. Others: as :meth:`Inbound.advance`.
        """
        kept = self._kept.get((rank, tag))
        if kept:
            found = kept.popleft()
            if not kept:
                del self._kept[rank, tag]
            return found
        if rank in self._farewells:
            return self._farewells[rank]
        while (inbound := self._read(rank, connection)) is not None:
            if inbound.kind is Kind.ABORT or _belonging(inbound) == tag:
                return inbound
            self._keep(inbound)
        return None

    def drain(self, rank: int, connection: socket.socket) -> None:
        """Read and keep what has arrived. Raises as :meth:`take`."""
        while (inbound := self._read(rank, connection)) is not None:
            if inbound.kind is Kind.ABORT:
                self._farewells[rank] = inbound
            else:
                self._keep(inbound)

    def close(self) -> None:
        """Close the descriptors of everything that nobody asked for."""
        kept = [inbound for queue in self._kept.values() for inbound in queue]
        for inbound in (*kept, *self._begun.values(), *self._farewells.values()):
            inbound.close()
        self._kept.clear()
        self._begun.clear()

    def _keep(self, inbound: Inbound) -> None:
        self._kept.setdefault((inbound.rank, _belonging(inbound)), deque()).append(inbound)

    def _read(self, rank: int, connection: socket.socket) -> Inbound | None:
        """The next message on the socket, if it is complete."""
        inbound = self._begun.setdefault(rank, Inbound(rank))
        if not inbound.advance(connection):
            return None
        return self._begun.pop(rank)


def _belonging(inbound: Inbound) -> str | None:
    assert inbound.label is not None  # the message is complete
    return inbound.label.tag if inbound.kind is Kind.MAIL else None
