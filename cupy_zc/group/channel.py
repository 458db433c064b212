"""Bytes and descriptors between the ranks of a node, with a deadline on every wait.

A memory segment is shared by handing its descriptor to the other process (``SCM_RIGHTS``), which
only an AF_UNIX socket can do. Nothing else is needed of the kernel: no ``pidfd_getfd`` (a right of
debuggers), no file that outlives a killed process, no MPI that understands device memory.

Every call carries a step number and a tag, which must be the same on all ranks. A rank that lost a
message, or is somewhere else in the program, is a :class:`~cupy_zc.errors.MismatchError` with both
sides named, on every rank. Besides these calls, two ranks can pass mail (:meth:`Channel.send`,
:meth:`Channel.recv`), in order for each sender, receiver and tag; it disturbs no other call.

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
import socket
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import (
    ClosedError,
    InvalidTypeError,
    InvalidValueError,
    MismatchError,
    PeerTimeoutError,
)
from .agreement import vote
from .bootstrap import MAX_PAYLOAD, Bootstrap
from .identity import Topology
from .mesh import TOKEN, connect, listen
from .messages import MAX_FDS, MAX_TAG, Inbound, Kind, Label, Message, Outbound
from .naming import shorten, sides
from .streams import Streams
from .waiting import Wait

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
        self._streams = Streams(sockets)
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
        peers = self._streams.peers
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
            self._run(Kind.BROADCAST, tag, payload, fds, self._streams.peers, (), timeout)
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

    def send(
        self,
        rank: int,
        payload: bytes,
        fds: Sequence[int] = (),
        *,
        tag: str = "",
        timeout: float | None = None,
    ) -> None:
        """Give a payload and descriptors to one other rank; returns when they are on the way.

        It waits for the receiver only while the socket between the two is full, and reads what
        other ranks send meanwhile, so that ranks which send to each other do not wait for ever.

        Args:
            rank: Who gets it, another one of :attr:`ranks`.
            payload: As for :meth:`exchange`.
            fds: As for :meth:`exchange`.
            tag: What it is; :meth:`recv` asks for it by that.
            timeout: As for :meth:`exchange`.

        Raises:
            PeerTimeoutError: the rank has gone, or did not read in time.
            InvalidValueError, InvalidTypeError, ClosedError: as for :meth:`exchange`.
        """
        wait = self._begin_mail("send", rank, tag, payload, fds, timeout)
        outbound = Outbound(Label(Kind.MAIL, 0, tag), payload, fds)
        try:
            self._streams.post(rank, outbound, wait)
        except BaseException as error:
            self._abort(error, [rank] if outbound.torn else ())
            raise

    def recv(self, rank: int, *, tag: str = "", timeout: float | None = None) -> Message:
        """The next message that one other rank sent under a tag.

        Args:
            rank: Who sends, another one of :attr:`ranks`.
            tag: Mail of other tags, and messages of collective calls, are kept for who asks.
            timeout: As for :meth:`exchange`.

        Returns:
            The message; its descriptors are the caller's to close.

        Raises:
            PeerTimeoutError: it did not come in time, or the rank has gone.
            InvalidValueError, ClosedError: as for :meth:`exchange`.
        """
        wait = self._begin_mail("recv", rank, tag, b"", (), timeout)
        try:
            return self._streams.transfer({}, {rank: tag}, wait)[rank].take()
        except BaseException as error:
            self._abort(error)
            raise

    def waiting(self, tag: str) -> dict[int, bytes]:
        """What peers say that wait for this rank in an :meth:`exchange`. Local, at once.

        Args:
            tag: Of that exchange.

        Returns:
            Payloads by rank, without what is longer than 64 KiB. Allowed in any thread.
        """
        return {
            rank: payload
            for rank, (label, payload) in self._streams.peek().items()
            if label.kind is Kind.EXCHANGE and label.tag == tag
        }

    def gone(self) -> tuple[int, ...]:
        """The ranks that have closed their channel, exited or were killed. Local, at once.

        What they sent before may still be there to be received. Allowed in any thread.
        """
        return self._streams.gone()

    def close(self) -> None:
        """Leave. Local, allowed twice, and what a forked child may call as well."""
        self._closed = True
        self._streams.close(owner=os.getpid() == self._owner)

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
        self._check_usable(call, tag)
        label = Label(kind, self._step + 1, tag)
        wait = Wait(f"rank {self.rank}: {label}", timeout)
        self._step += 1
        outgoing = {rank: Outbound(label, payload, fds) for rank in to}
        try:
            return label, self._streams.transfer(outgoing, dict.fromkeys(of), wait)
        except BaseException as error:
            self._abort(error, [rank for rank, item in outgoing.items() if item.torn])
            raise

    def _begin_mail(
        self,
        name: str,
        rank: int,
        tag: str,
        payload: bytes,
        fds: Sequence[int],
        timeout: float | None,
    ) -> Wait:
        call = f"Channel.{name}"
        _check_arguments(call, tag, payload, fds)
        if rank == self.rank or rank not in self.ranks:
            others = tuple(other for other in self.ranks if other != self.rank)
            raise InvalidValueError(call, "rank", rank, f"one of {others}")
        self._check_usable(call, tag)
        return Wait(f"rank {self.rank}: {call}({rank}, {tag!r})", timeout)

    def _check_usable(self, call: str, tag: str) -> None:
        if self._closed or os.getpid() != self._owner:
            why = "is closed" if self._closed else "belongs to the parent of this process"
            raise ClosedError(f"rank {self.rank}: {call}({tag!r}): this channel {why}")

    def _abort(self, error: BaseException, torn: Collection[int] = ()) -> None:
        """Close after a failure, telling each peer why if its stream is between two messages."""
        missed = error.ranks if isinstance(error, PeerTimeoutError) else ()
        label = Label(Kind.ABORT, self._step, " ".join([type(error).__name__, *map(str, missed)]))
        self._streams.farewell(label, shorten(str(error), _LONGEST_REASON), torn)
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
