"""A socket between every two ranks of a node, each sure of who is at the other end.

Every rank listens at an abstract AF_UNIX address (no file to clean up, none to attack) that holds a
random nonce, and connects to the ranks below it. Who connects must run as the same user
(``SO_PEERCRED``) and prove, by an HMAC under the token that the ranks shared through the bootstrap,
that it is the rank it claims to be *at this address*; the listener proves the same back. Anybody
else is refused and logged, and the ranks do not notice.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
from collections.abc import Mapping
from functools import partial

from ..errors import MismatchError
from .waiting import Wait, gone

__all__ = ["TOKEN", "connect", "listen"]

_log = logging.getLogger("cupy_zc")

#: Bytes of the token that the ranks of a node share.
TOKEN = 32
_MAC = 32
_MAGIC = b"CZ-UNIX1"
#: Magic, rank, HMAC: what a rank says to the listener. The answer is an HMAC.
_HELLO = struct.Struct(f"!{len(_MAGIC)}sI{_MAC}s")
_CREDENTIALS = struct.Struct("3i")
_MOST_STRANGERS = 256


def listen() -> tuple[socket.socket, bytes]:
    """A non-blocking listener, and its address."""
    address = b"\0cupy-zc-" + secrets.token_hex(16).encode()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    listener.bind(address)
    listener.listen(128)
    return listener, address


def _uid(connection: socket.socket) -> int:
    """The user at the other end, as the kernel says; root, 0, is a user like another."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def _mac(token: bytes, side: bytes, address: bytes, rank: int) -> bytes:
    return hmac.digest(token, side + b"\0" + address + rank.to_bytes(4, "big"), "sha256")


class _Meeting:
    """The set-up under way. A socket is in ``heard`` until its other end is known, then in ``met``.

    The selector holds, for each socket, what to do when it can be read.
    """

    def __init__(
        self,
        listener: socket.socket,
        addresses: Mapping[int, bytes],
        token: bytes,
        rank: int,
        wait: Wait,
    ) -> None:
        self.listener = listener
        self.addresses = addresses
        self.token = token
        self.rank = rank
        self.wait = wait
        self.met: dict[int, socket.socket] = {}
        self.heard: dict[socket.socket, bytearray] = {}
        self.dialled: dict[int, socket.socket] = {}
        self.selector = selectors.PollSelector()
        self.selector.register(listener, selectors.EVENT_READ, self.accept)

    def run(self) -> dict[int, socket.socket]:
        missing = self.addresses.keys() - {self.rank}
        while missing := missing - self.met.keys():
            undialled = [p for p in missing if p < self.rank and p not in self.dialled]
            for peer in undialled:
                self.dial(peer)
            # A full queue of a listener does not wake us up, so look again soon.
            waiting = any(peer not in self.dialled for peer in undialled)
            for key, _ in self.selector.select(self.wait.slice(0.01 if waiting else 1.0)):
                key.data()
            self.wait.check(missing - self.met.keys())
        return self.met

    def dial(self, peer: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(self.addresses[peer])
            if _uid(connection) != os.geteuid():
                raise MismatchError(
                    f"{self.wait.what}: rank {peer} runs as user {_uid(connection)} and this rank "
                    f"as user {os.geteuid()}; start all ranks of a machine as one user"
                )
            mac = _mac(self.token, b"connect", self.addresses[peer], self.rank)
            connection.send(_HELLO.pack(_MAGIC, self.rank, mac))
        except BlockingIOError:  # the queue of the listener is full: again later
            connection.close()
        except ConnectionError as error:
            connection.close()
            raise gone(self.wait.what, [peer], "it refused this rank, or ended") from error
        except BaseException:
            connection.close()
            raise
        else:
            self.dialled[peer] = connection
            self.heard[connection] = bytearray()
            self.selector.register(connection, selectors.EVENT_READ, partial(self.answered, peer))

    def answered(self, peer: int) -> None:
        """The listener's answer: it knows the token too."""
        connection = self.dialled[peer]
        try:
            complete = self.hear(connection, _MAC)
        except ConnectionError as error:
            raise gone(self.wait.what, [peer], "it refused this rank, or ended") from error
        if not complete:
            return
        expected = _mac(self.token, b"accept", self.addresses[peer], self.rank)
        if not hmac.compare_digest(self.heard[connection], expected):
            raise MismatchError(
                f"{self.wait.what}: rank {peer} does not know the token of the group"
            )
        self.meet(peer, connection)

    def meet(self, peer: int, connection: socket.socket) -> None:
        del self.heard[connection]
        self.met[peer] = connection
        self.selector.modify(connection, selectors.EVENT_READ, partial(self.ended, peer))

    def ended(self, peer: int) -> None:
        """Ranks that have met say nothing before all have, so what there is to read is an end."""
        raise gone(self.wait.what, [peer], "it ended its set-up")

    def accept(self) -> None:
        connection = self.listener.accept()[0]
        connection.setblocking(False)
        self.heard[connection] = bytearray()
        greeted = partial(self.greeted, connection)
        self.selector.register(connection, selectors.EVENT_READ, greeted)
        uid = _uid(connection)
        if uid != os.geteuid():
            self.refuse(connection, f"it comes from user {uid}")
        elif len(self.heard) > _MOST_STRANGERS:
            self.refuse(connection, "too many strangers at once")

    def greeted(self, connection: socket.socket) -> None:
        """A stranger's hello: is it a rank?"""
        try:
            if not self.hear(connection, _HELLO.size):
                return
        except ConnectionError:
            self.refuse(connection, "it closed before it said who it is")
            return
        magic, peer, mac = _HELLO.unpack(self.heard[connection])
        own = self.addresses[self.rank]
        if magic != _MAGIC:
            self.refuse(connection, "it does not speak this protocol")
        elif not hmac.compare_digest(mac, _mac(self.token, b"connect", own, peer)):
            self.refuse(connection, f"it claims to be rank {peer} and does not know the token")
        elif peer not in self.addresses or peer <= self.rank or peer in self.met:
            self.refuse(connection, f"rank {peer} is not awaited here")
        else:
            try:
                connection.send(_mac(self.token, b"accept", own, peer))
            except ConnectionError as error:
                raise gone(self.wait.what, [peer], "it ended its set-up") from error
            self.meet(peer, connection)

    def hear(self, connection: socket.socket, size: int) -> bool:
        """Read up to ``size`` bytes in all; whether they are complete."""
        heard = self.heard[connection]
        with contextlib.suppress(BlockingIOError):
            data = connection.recv(size - len(heard))
            if not data:
                raise ConnectionResetError("closed")
            heard += data
        return len(heard) == size

    def refuse(self, connection: socket.socket, why: str) -> None:
        _log.warning("%s: refused a connection to the channel: %s", self.wait.what, why)
        self.selector.unregister(connection)
        del self.heard[connection]
        connection.close()


def connect(
    listener: socket.socket, addresses: Mapping[int, bytes], token: bytes, rank: int, wait: Wait
) -> dict[int, socket.socket]:
    """Meet every other rank of the node.

    Args:
        listener: From :func:`listen`; stays the caller's.
        addresses: For each rank of the node, this one too, where it listens.
        token: :data:`TOKEN` bytes that only these ranks know.
        rank: This one.
        wait: The deadline.

    Returns:
        A connected, non-blocking socket for each other rank. The caller owns them.

    Raises:
        PeerTimeoutError: a rank did not come, or ended.
        MismatchError: a rank runs as another user, or does not know the token.
    """
    meeting = _Meeting(listener, addresses, token, rank, wait)
    try:
        return meeting.run()
    except BaseException:
        for connection in meeting.met.values():
            connection.close()
        raise
    finally:
        for connection in meeting.heard:
            connection.close()
        meeting.selector.close()
