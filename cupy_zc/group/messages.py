"""One message on one socket: bytes and descriptors, sent and received piece by piece.

On the stream a message is ``header | tag | payload | a byte for each 253 descriptors``, so what it
says can be looked at before its descriptors are taken. The kernel passes at most 253 descriptors
(``SCM_MAX_FD``) with one piece of data, so each such group rides on a byte of its own. A reader
asks for exactly the bytes of the piece it is at: it never reads into the next message, and never
past a byte that carries descriptors.

Ownership: the sender's descriptors stay the sender's. Those received belong to :class:`Inbound`
until :meth:`Inbound.take`, and are closed by :meth:`Inbound.close`.
"""

from __future__ import annotations

import array
import enum
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import Error, MismatchError
from .bootstrap import MAX_PAYLOAD

__all__ = [
    "MAX_FDS",
    "MAX_TAG",
    "Inbound",
    "Kind",
    "Label",
    "Message",
    "Outbound",
    "closing",
    "parse",
]

_HEADER = struct.Struct("!4sBQHQI")
_MAGIC = b"CZC1"
_GROUP = 253
_FD = array.array("i").itemsize
_CHUNK = 1 << 20
#: Bytes of a payload that is sent in one piece with what comes before it.
_SMALL = 1 << 14

#: Most descriptors in a message, and most bytes of a tag.
MAX_FDS = 1 << 14
MAX_TAG = 1 << 10


class Kind(enum.IntEnum):
    """What a message belongs to."""

    EXCHANGE = 1
    BROADCAST = 2
    #: The sender gives up; the payload says why.
    ABORT = 3
    #: From one rank to another; not part of a collective call.
    MAIL = 4


@dataclass(frozen=True, slots=True)
class Label:
    """Where in the program a rank is. All ranks of a call must have the same one."""

    kind: Kind
    step: int
    tag: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.kind.name.lower()}({self.tag!r})"


@dataclass(frozen=True, slots=True)
class Message:
    """What a rank gave. The receiver owns ``fds`` and closes each once; see :func:`closing`."""

    rank: int
    payload: bytes
    fds: tuple[int, ...] = ()


@contextmanager
def closing(messages: Iterable[Message]) -> Iterator[None]:
    """Close the descriptors of received messages at the end of a block, whatever happens in it."""
    try:
        yield
    finally:
        for message in messages:
            for fd in message.fds:
                os.close(fd)


class Outbound:
    """A message being sent. Holds no descriptor of its own."""

    def __init__(self, label: Label, payload: bytes, fds: Sequence[int]) -> None:
        tag = label.tag.encode()
        head = _HEADER.pack(_MAGIC, label.kind, label.step, len(tag), len(payload), len(fds)) + tag
        pieces: list[tuple[bytes, Sequence[int]]] = [(head, ()), (payload, ())]
        if len(payload) <= _SMALL:  # each piece sent can wake the peer
            pieces = [(head + payload, ())]
        pieces += [(b"\0", fds[at : at + _GROUP]) for at in range(0, len(fds), _GROUP)]
        self._pieces = deque((memoryview(data), group) for data, group in pieces if data)
        #: Whether some, and not all, of it was sent: another message must not follow.
        self.torn = False

    @property
    def done(self) -> bool:
        """Whether all of it was sent."""
        return not self._pieces

    def advance(self, connection: socket.socket) -> bool:
        """Send what the socket takes now; whether all is sent.

        Raises:
            ConnectionError: the peer has closed. OSError: the system refused, say for the number
                of descriptors under way.
        """
        while self._pieces:
            data, fds = self._pieces[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = connection.sendmsg([data[:_CHUNK]], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            if sent == len(data):
                self._pieces.popleft()
            else:
                self._pieces[0] = (data[sent:], ())
            self.torn = bool(self._pieces)
        return True


def parse(data: bytes) -> tuple[Label, bytes] | None:
    """What the message says that ``data`` begins with; None where that is not all there."""
    if len(data) < _HEADER.size:
        return None
    magic, kind, step, tag_size, payload_size, _ = _HEADER.unpack_from(data)
    start = _HEADER.size + tag_size
    if magic != _MAGIC or kind not in Kind._value2member_map_:
        return None
    if len(data) < start + payload_size:
        return None
    label = Label(Kind(kind), step, data[_HEADER.size : start].decode(errors="replace"))
    return label, data[start : start + payload_size]


class Inbound:
    """A message being received from ``rank``."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.label: Label | None = None
        self.done = False
        self._head = bytearray()
        self._sizes: tuple[int, int, int] | None = None
        self._payload = memoryview(b"")
        self._filled = 0
        self._fds: list[int] = []

    def advance(self, connection: socket.socket) -> bool:
        """Receive what is there now; whether all is.

        Raises:
            ConnectionError: the peer has closed.
            MismatchError: what came is no message.
            Error: this process may not hold the descriptors that came.
        """
        try:
            self._receive(connection)
        except BlockingIOError:
            return False
        self.done = True
        return True

    @property
    def kind(self) -> Kind | None:
        """Its kind, once known."""
        return None if self.label is None else self.label.kind

    @property
    def payload(self) -> bytes:
        """The bytes, once the message is complete."""
        return bytes(self._payload)

    def take(self) -> Message:
        """The complete message. From here on its descriptors are the caller's."""
        fds, self._fds = tuple(self._fds), []
        return Message(self.rank, self.payload, fds)

    def close(self) -> None:
        """Close the descriptors that were not taken."""
        while self._fds:
            os.close(self._fds.pop())

    def _receive(self, connection: socket.socket) -> None:
        self._fill_head(connection, _HEADER.size)
        if self._sizes is None:
            self._sizes = self._parse()
            self._payload = memoryview(bytearray(self._sizes[1]))
        tag_size, _, fd_count = self._sizes
        self._fill_head(connection, _HEADER.size + tag_size)
        if self.label is None:
            _, kind, step, *_ = _HEADER.unpack_from(self._head)
            tag = self._head[_HEADER.size :].decode(errors="replace")
            self.label = Label(Kind(kind), step, tag)
        while self._filled < len(self._payload):
            count = connection.recv_into(self._payload[self._filled :][:_CHUNK])
            if not count:
                raise ConnectionResetError("closed in the middle of a message")
            self._filled += count
        while len(self._fds) < fd_count:
            self._receive_fds(connection, min(_GROUP, fd_count - len(self._fds)))

    def _fill_head(self, connection: socket.socket, size: int) -> None:
        while len(self._head) < size:
            data = connection.recv(size - len(self._head))
            if not data:
                raise ConnectionResetError("closed")
            self._head += data

    def _parse(self) -> tuple[int, int, int]:
        magic, kind, _, tag_size, payload_size, fd_count = _HEADER.unpack(self._head)
        if (
            magic != _MAGIC
            or kind not in Kind._value2member_map_
            or tag_size > MAX_TAG
            or payload_size > MAX_PAYLOAD
            or fd_count > MAX_FDS
        ):
            raise MismatchError(
                f"rank {self.rank} sent {bytes(self._head)!r}, which is no message of this version"
            )
        return tag_size, payload_size, fd_count

    def _receive_fds(self, connection: socket.socket, count: int) -> None:
        data, control, flags, _ = connection.recvmsg(
            1, socket.CMSG_SPACE(_GROUP * _FD), socket.MSG_CMSG_CLOEXEC
        )
        came = array.array("i")
        for level, kind, rights in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                came.frombytes(rights[: len(rights) - len(rights) % _FD])
        self._fds += came
        if not data:
            raise ConnectionResetError("closed in the middle of a message")
        if flags & socket.MSG_CTRUNC:
            raise Error(
                f"only {len(came)} of {count} descriptors from rank {self.rank} found room in this "
                "process; raise its limit on open files (ulimit -n)"
            )
        if len(came) != count:
            raise MismatchError(
                f"rank {self.rank} sent {len(came)} descriptors where {count} were announced"
            )
