"""The sockets of a channel: bytes and descriptors both ways, wherever a socket is ready."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
from collections.abc import Collection, Mapping

from ..errors import Error, MismatchError
from .inbox import Inbox
from .messages import Inbound, Kind, Label, Outbound, parse
from .waiting import Wait, gone

__all__ = ["Streams"]

#: Bytes of a message that can be looked at before it is read.
_PEEKED = 1 << 16


class Streams:
    """One connected, non-blocking socket to each peer, and what came over them.

    Args:
        sockets: By rank; owned from here on, and closed by :meth:`close`.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        self._inbox = Inbox()

    @property
    def peers(self) -> Collection[int]:
        """The ranks at the other ends."""
        return self._sockets.keys()

    def transfer(
        self,
        outgoing: Mapping[int, Outbound],
        wanted: Mapping[int, str | None],
        wait: Wait,
    ) -> dict[int, Inbound]:
        """Move bytes both ways wherever a socket is ready: no order of ranks can deadlock.

        Args:
            outgoing: What to send, by rank.
            wanted: Whom to receive a message of, with the tag that :meth:`Inbox.take` is asked for.
            wait: The deadline.
        """
        received: dict[int, Inbound] = {}
        pending = dict.fromkeys([*outgoing, *wanted], 0)
        ready = list(pending)
        try:
            with selectors.PollSelector() as selector:
                while True:
                    for rank in ready:
                        events = 0
                        if rank in outgoing:
                            events |= self._advance_out(rank, outgoing[rank], wait)
                        if rank in wanted and rank not in received:
                            events |= self._advance_in(rank, wanted[rank], received, wait)
                        if events != pending[rank]:
                            if pending[rank]:
                                selector.unregister(self._sockets[rank])
                            if events:
                                selector.register(self._sockets[rank], events, rank)
                        pending[rank] = events
                    missing = [rank for rank, events in pending.items() if events]
                    if not missing:
                        return received
                    wait.check(missing)
                    ready = [key.data for key, _ in selector.select(wait.slice())]
        except BaseException:
            for item in received.values():
                item.close()
            raise

    def _advance_out(self, rank: int, outgoing: Outbound, wait: Wait) -> int:
        """Send what one socket takes; what is still to come, as selector events."""
        try:
            done = outgoing.done or outgoing.advance(self._sockets[rank])
            return 0 if done else selectors.EVENT_WRITE
        except ConnectionError as error:
            raise self._ended(rank, wait) from error
        except OSError as error:
            raise Error(
                f"{wait.what}: could not send to rank {rank}: {error}; if it speaks of too many "
                "references or files, raise the limit on open files (ulimit -n)"
            ) from error

    def _advance_in(
        self, rank: int, tag: str | None, received: dict[int, Inbound], wait: Wait
    ) -> int:
        """Receive what one socket holds; what is still to come, as selector events."""
        try:
            inbound = self._inbox.take(rank, self._sockets[rank], tag)
        except ConnectionError as error:
            raise gone(wait.what, [rank]) from error
        if inbound is None:
            return selectors.EVENT_READ
        if inbound.kind is Kind.ABORT:
            raise _aborted(wait.what, inbound, self.peers)
        received[rank] = inbound
        return 0

    def _ended(self, rank: int, wait: Wait) -> Error:
        """The error for a peer that takes no more bytes; what it sent last may say why."""
        try:
            while (inbound := self._inbox.take(rank, self._sockets[rank], None)) is not None:
                if inbound.kind is Kind.ABORT:
                    return _aborted(wait.what, inbound, self.peers)
                inbound.close()
        except ConnectionError:
            pass  # the end of what it sent
        return gone(wait.what, [rank])

    def post(self, rank: int, outbound: Outbound, wait: Wait) -> None:
        """Send, and while the socket takes no more, read what everybody sends."""
        with selectors.PollSelector() as selector:
            for peer, connection in self._sockets.items():
                both = selectors.EVENT_READ | selectors.EVENT_WRITE
                selector.register(connection, both if peer == rank else selectors.EVENT_READ, peer)
            while self._advance_out(rank, outbound, wait):
                wait.check([rank])
                for key, events in selector.select(wait.slice()):
                    if events & selectors.EVENT_READ:
                        try:
                            self._inbox.drain(key.data, self._sockets[key.data])
                        except ConnectionError:  # whether that matters, the next call to it says
                            selector.unregister(key.fileobj)
                            if key.data == rank:
                                raise gone(wait.what, [rank]) from None

    def gone(self) -> tuple[int, ...]:
        """The ranks whose end is closed, as the kernel says."""
        poll = select.poll()
        ranks: dict[int, int] = {}
        for rank, connection in list(self._sockets.items()):
            descriptor = connection.fileno()
            if descriptor >= 0:
                ranks[descriptor] = rank
                poll.register(descriptor, select.POLLRDHUP)
        return tuple(sorted(ranks[descriptor] for descriptor, _ in poll.poll(0)))

    def peek(self) -> dict[int, tuple[Label, bytes]]:
        """The short messages that have arrived and that nobody has begun to read, by rank."""
        found: dict[int, tuple[Label, bytes]] = {}
        for rank, connection in list(self._sockets.items()):
            with contextlib.suppress(OSError):  # nothing is there, or the peer has closed
                flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
                message = parse(connection.recv(_PEEKED, flags))
                if message is not None:
                    found[rank] = message
        return found

    def farewell(self, label: Label, reason: str, torn: Collection[int] = ()) -> None:
        """Tell each peer why this rank gives up, if its stream is between two messages."""
        for rank, connection in self._sockets.items():
            if rank not in torn:
                with contextlib.suppress(OSError):
                    Outbound(label, reason.encode(), ()).advance(connection)

    def close(self, *, owner: bool) -> None:
        """Close everything; ``owner`` is false in a forked child, whose parent goes on."""
        self._inbox.close()
        while self._sockets:
            _, connection = self._sockets.popitem()
            if owner:
                with contextlib.suppress(OSError):
                    # A forked child may hold a copy; shutdown tells the peer all the same.
                    connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _aborted(what: str, incoming: Inbound, peers: Collection[int]) -> Error:
    """The error for a peer that gave up: of its own kind where that is known to be shared.

    A peer that gave up because it missed other ranks is not the cause; those ranks are named then.
    """
    label = incoming.label
    assert label is not None
    reason = incoming.payload.decode(errors="replace")
    kind, *missed = label.tag.split()
    if kind == MismatchError.__name__:
        return MismatchError(f"{what}: rank {incoming.rank} gave up: {reason}")
    error = gone(what, [incoming.rank], f"it gave up with {kind}: {reason}")
    causes = tuple(rank for rank in map(int, missed) if rank in peers)
    error.ranks = causes or error.ranks
    return error
