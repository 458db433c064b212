"""Bytes and descriptors between the ranks of a node, with a deadline on every wait.

A memory segment is shared by handing its descriptor to the other process (``SCM_RIGHTS``), which
only an AF_UNIX socket can do. Nothing else is needed of the kernel: no ``pidfd_getfd`` (a right of
debuggers), no file that outlives a killed process, no MPI that understands device memory.

Every call carries a step number and a tag, which must be the same on all ranks. A rank that lost a
message, or is somewhere else in the program, is a :class:`~cupy_zc.errors.MismatchError` with both
sides named, on every rank.

What an error leaves behind: different *tags* in an :meth:`Channel.exchange` leave the ranks in step
and the channel usable, as an argument that is refused does. Any other error closes the channel, and
the peers are told why. A peer that closed its channel, exited or was killed is a
:class:`~cupy_zc.errors.PeerTimeoutError` at once, not at the deadline. Descriptors that had been
received are closed in each case.

A channel is for one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import ClosedError, Error, InvalidTypeError, InvalidValueError, MismatchError
from .agreement import vote
from .bootstrap import MAX_PAYLOAD, Bootstrap
from .identity import Topology
from .mesh import TOKEN, connect, listen
from .messages import MAX_FDS, MAX_TAG, Inbound, Kind, Label, Message, Outbound
from .naming import shorten, sides
from .waiting import Wait, gone

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Channel"]

_LONGEST_REASON = 2000


class Channel:
    """The ranks of a node, able to pass bytes and descriptors. A context manager.

    Ranks are those of the bootstrap it was opened on, in arguments, results and errors.
    """

    def __init__(self, topology: Topology, sockets: Mapping[int, socket.socket]) -> None:
        """For :meth:`open`. ``sockets``: one to each other rank of the node, now the channel's."""
        self.topology = topology
        self.rank = topology.rank
        self.ranks = topology.node_ranks
        self._sockets = dict(sockets)
        self._step = 0
        self._owner = os.getpid()
        self._closed = False

    @classmethod
    def open(
        cls, bootstrap: Bootstrap, topology: Topology, *, timeout: float | None = None
    ) -> Channel:
        """Connect the ranks of each node. Collective over all ranks of the bootstrap.

        Args:
            bootstrap: All ranks; not needed any more afterwards.
            topology: From :func:`~cupy_zc.group.discover`.
            timeout: Seconds for each of the two steps (addresses, connections), and the sum of both
                for the vote; None for ``settings().setup_timeout``.

        Raises:
            AgreementError: it failed on a rank, which the error names; nothing stays open.
            PeerTimeoutError: a rank did not come.
        """
        with contextlib.ExitStack() as stack:
            listener, address = listen()
            stack.callback(listener.close)
            token = secrets.token_bytes(TOKEN)
            offers = bootstrap.all_gather(address + token, tag="open channel", timeout=timeout)
            local = topology.node_ranks
            addresses = {peer: offers[peer][:-TOKEN] for peer in local}
            failure: Exception | None = None
            channel: Channel | None = None
            wait = Wait(f"rank {bootstrap.rank}: open channel", timeout)
            try:
                shared = offers[local[0]][-TOKEN:]
                sockets = connect(listener, addresses, shared, bootstrap.rank, wait)
                channel = stack.enter_context(cls(topology, sockets))
            except Exception as error:  # noqa: BLE001 - the vote raises it on every rank
                failure = error
            # Who failed early waits for those who wait for it.
            vote(bootstrap, "open channel", failure, timeout=2 * wait.timeout)
            assert channel is not None  # else the vote has raised
            stack.pop_all()
            listener.close()
            return channel

    @property
    def size(self) -> int:
        """Number of ranks of the node."""
        return len(self.ranks)

    @property
    def closed(self) -> bool:
        """Whether it can no longer be used."""
        return self._closed

    def exchange(
        self,
        payload: bytes,
        fds: Sequence[int] = (),
        *,
        tag: str = "",
        timeout: float | None = None,
    ) -> list[Message]:
        """Give a payload and descriptors to every rank of the node, get everyone's. Collective.

        Args:
            payload: Up to 1 GiB; ranks may give different lengths.
            fds: Open descriptors, which stay the caller's; the peers get their own for the same
                things.
            tag: What the call is for, up to 1,024 bytes; must be equal on all ranks.
            timeout: Seconds; None for ``settings().setup_timeout``.

        Returns:
            One message a rank, in the order of :attr:`ranks`. Descriptors in them are the caller's
            to close. The own message is there with the payload but without descriptors.

        Raises:
            PeerTimeoutError: a rank did not come in time, or has gone.
            MismatchError: ranks called different things; on every rank.
            InvalidValueError, InvalidTypeError: an argument, before anything is sent.
            ClosedError: the channel is closed, or was made by the parent of this process.
        """
        peers = self._sockets.keys()
        label, received = self._run(Kind.EXCHANGE, tag, payload, fds, peers, peers, timeout)
        labels = {self.rank: label, **{rank: item.label for rank, item in received.items()}}
        if any(other != label for other in labels.values()):
            for item in received.values():
                item.close()
            error = _mismatch(labels)
            if len({(other.kind, other.step) for other in labels.values() if other}) > 1:
                self._abort(error)
            raise error
        own = Message(self.rank, payload)
        return [own if rank == self.rank else received[rank].take() for rank in self.ranks]

    def broadcast(
        self,
        root: int,
        payload: bytes | None = None,
        fds: Sequence[int] = (),
        *,
        tag: str = "",
        timeout: float | None = None,
    ) -> Message:
        """Give a payload and descriptors from one rank to the others. Collective.

        The root returns when its message is on the way, not when it was read.

        Args:
            root: Who gives, one of :attr:`ranks`.
            payload: On the root, as for :meth:`exchange`; elsewhere None.
            fds: On the root, as for :meth:`exchange`; elsewhere none.
            tag: As for :meth:`exchange`.
            timeout: As for :meth:`exchange`.

        Returns:
            The root's message; on the root without descriptors.

        Raises:
            As :meth:`exchange`; a mismatch closes the channel.
        """
        if root not in self.ranks:
            raise InvalidValueError("Channel.broadcast", "root", root, f"one of {self.ranks}")
        if root == self.rank:
            if payload is None:
                raise InvalidTypeError("Channel.broadcast", "payload", payload, "bytes on the root")
            self._run(Kind.BROADCAST, tag, payload, fds, self._sockets.keys(), (), timeout)
            return Message(root, payload)
        label, received = self._run(Kind.BROADCAST, tag, b"", (), (), (root,), timeout)
        if received[root].label != label:
            received[root].close()
            error = _mismatch({self.rank: label, root: received[root].label})
            self._abort(error)
            raise error
        return received[root].take()

    def all_gather(
        self, payload: bytes, *, tag: str = "", timeout: float | None = None
    ) -> list[bytes]:
        """:meth:`exchange` without descriptors, as the votes of ``agreement`` use it."""
        return [message.payload for message in self.exchange(payload, tag=tag, timeout=timeout)]

    def close(self) -> None:
        """Leave. Local, allowed twice, and what a forked child may call as well."""
        self._closed = True
        while self._sockets:
            _, connection = self._sockets.popitem()
            if os.getpid() == self._owner:
                with contextlib.suppress(OSError):
                    # A forked child may hold a copy; shutdown tells the peer all the same.
                    connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        kind: Kind,
        tag: str,
        payload: bytes,
        fds: Sequence[int],
        to: Collection[int],
        of: Collection[int],
        timeout: float | None,
    ) -> tuple[Label, dict[int, Inbound]]:
        """Send a message to some ranks and receive one of others, all at once."""
        call = f"Channel.{kind.name.lower()}"
        _check_arguments(call, tag, payload, fds)
        if self._closed or os.getpid() != self._owner:
            why = "is closed" if self._closed else "belongs to the parent of this process"
            raise ClosedError(f"rank {self.rank}: {call}({tag!r}): this channel {why}")
        label = Label(kind, self._step + 1, tag)
        wait = Wait(f"rank {self.rank}: {label}", timeout)
        self._step += 1
        outgoing = {rank: Outbound(label, payload, fds) for rank in to}
        incoming = {rank: Inbound(rank) for rank in of}
        try:
            self._transfer(outgoing, incoming, wait)
        except BaseException as error:
            for item in incoming.values():
                item.close()
            self._abort(error, [rank for rank, item in outgoing.items() if item.torn])
            raise
        return label, incoming

    def _transfer(
        self, outgoing: Mapping[int, Outbound], incoming: Mapping[int, Inbound], wait: Wait
    ) -> None:
        """Move bytes both ways wherever a socket is ready: no order of ranks can deadlock."""
        with selectors.PollSelector() as selector:
            pending = dict.fromkeys([*outgoing, *incoming], 0)
            ready = list(pending)
            while True:
                for rank in ready:
                    events = self._advance(rank, outgoing.get(rank), incoming.get(rank), wait)
                    if events != pending[rank]:
                        if pending[rank]:
                            selector.unregister(self._sockets[rank])
                        if events:
                            selector.register(self._sockets[rank], events, rank)
                    pending[rank] = events
                missing = [rank for rank, events in pending.items() if events]
                if not missing:
                    return
                wait.check(missing)
                ready = [key.data for key, _ in selector.select(wait.slice())]

    def _advance(
        self, rank: int, outgoing: Outbound | None, incoming: Inbound | None, wait: Wait
    ) -> int:
        """Do what one socket is ready for; what is still to come, as selector events."""
        connection = self._sockets[rank]
        events = 0
        try:
            if outgoing is not None and not outgoing.done and not outgoing.advance(connection):
                events |= selectors.EVENT_WRITE
        except ConnectionError as error:
            raise self._farewell(rank, incoming or Inbound(rank), wait) from error
        except OSError as error:
            raise Error(
                f"{wait.what}: could not send to rank {rank}: {error}; if it speaks of too many "
                "references or files, raise the limit on open files (ulimit -n)"
            ) from error
        try:
            if incoming is not None and not incoming.done and not incoming.advance(connection):
                events |= selectors.EVENT_READ
        except ConnectionError as error:
            raise gone(wait.what, [rank]) from error
        if incoming is not None and incoming.done and incoming.kind is Kind.ABORT:
            raise _aborted(wait.what, incoming)
        return events

    def _farewell(self, rank: int, incoming: Inbound, wait: Wait) -> Error:
        """The error for a peer that takes no more bytes; what it sent last may say why."""
        try:
            while incoming.done or incoming.advance(self._sockets[rank]):
                if incoming.kind is Kind.ABORT:
                    return _aborted(wait.what, incoming)
                incoming.close()
                incoming = Inbound(rank)
        except ConnectionError:
            pass  # the end of what it sent
        finally:
            incoming.close()
        return gone(wait.what, [rank])

    def _abort(self, error: BaseException, torn: Collection[int] = ()) -> None:
        """Close after a failure, telling each peer why if its stream is between two messages."""
        reason = shorten(str(error), _LONGEST_REASON).encode()
        label = Label(Kind.ABORT, self._step, type(error).__name__)
        for rank, connection in self._sockets.items():
            if rank not in torn:
                with contextlib.suppress(OSError):
                    Outbound(label, reason, ()).advance(connection)
        self.close()


def _check_arguments(call: str, tag: str, payload: bytes, fds: Sequence[int]) -> None:
    if not isinstance(payload, bytes):
        raise InvalidTypeError(call, "payload", payload, "bytes")
    if len(payload) > MAX_PAYLOAD:
        raise InvalidValueError(call, "len(payload)", len(payload), f"at most {MAX_PAYLOAD:,}")
    if len(tag.encode()) > MAX_TAG:
        raise InvalidValueError(call, "tag", tag, f"at most {MAX_TAG:,} bytes")
    if len(fds) > MAX_FDS:
        raise InvalidValueError(call, "len(fds)", len(fds), f"at most {MAX_FDS:,}")
    for fd in fds:
        if not _is_open(fd):
            raise InvalidValueError(call, "fds", fd, "open descriptors")


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _mismatch(labels: Mapping[int, Label | None]) -> MismatchError:
    where = sides({rank: str(label) for rank, label in labels.items()}, "is at")
    return MismatchError(
        f"the ranks are not at the same call: {where}; a message was lost, or the ranks do not "
        "make the same calls in the same order"
    )


def _aborted(what: str, incoming: Inbound) -> Error:
    """The error for a peer that gave up: of its own kind where that is known to be shared."""
    label = incoming.label
    assert label is not None
    reason = incoming.payload.decode(errors="replace")
    if label.tag == MismatchError.__name__:
        return MismatchError(f"{what}: rank {incoming.rank} gave up: {reason}")
    return gone(what, [incoming.rank], f"it gave up with {label.tag}: {reason}")
