"""The TCP store: a thread of rank 0 that gathers bytes from all ranks and gives all to each.

It is no general key-value store. A group makes the same gathers in the same order, so the store
needs to hold one payload for each rank and nothing else: no names to clean up, no stale values.

It trusts nobody who has not joined. A stranger gets :data:`_PATIENCE` seconds, small frames and, on
any error, a reason and a closed connection; ranks do not notice. With a secret, rank and store
prove to each other that they know it (HMAC-SHA256 over both nonces) before anything else is read.
That says *who* joins; the bytes that follow are neither encrypted nor signed.

The store ends when rank 0 leaves, or when every rank has left.
"""

from __future__ import annotations

import hmac
import logging
import resource
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import InvalidValueError
from .bootstrap import Offer
from .naming import name_ranks
from .wire import (
    HANDSHAKE_LIMIT,
    HELLO,
    NONCE,
    FrameReader,
    Kind,
    WireError,
    frame,
    member_limit,
    pack_offers,
    pack_ranks,
    proof,
    unpack_offer,
)

__all__ = ["Store"]

_log = logging.getLogger("cupy_zc")

#: Seconds in which a stranger must have joined.
_PATIENCE = 10.0
#: Seconds in which the last answers must have left when the store ends.
_LINGER = 5.0
#: Strangers beyond this number, or that of the ranks, are sent away at once.
_MOST_STRANGERS = 256
#: Descriptors that a process may need besides those for the ranks.
_SPARE = 64
_CHUNK = 1 << 20


@dataclass(slots=True, eq=False)
class _Visitor:
    """One connection: a stranger, and once ``rank`` is set a member."""

    connection: socket.socket
    address: str
    since: float
    reader: FrameReader = field(default_factory=lambda: FrameReader(HANDSHAKE_LIMIT))
    #: Frames that have not left yet; those that all ranks get are there once for all of them.
    outbox: deque[memoryview] = field(default_factory=deque)
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE))
    hello: bytes = b""
    rank: int | None = None
    #: Closed as soon as the outbox is empty.
    leaving: bool = False

    def __str__(self) -> str:
        return self.address if self.rank is None else f"rank {self.rank} ({self.address})"


def _make_room(size: int) -> None:
    """Let this process have a connection to each rank: the usual limit is 1,024 descriptors.

    Raises:
        InvalidValueError: it may not have so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = sum(1 for _ in Path("/proc/self/fd").iterdir()) + size + _SPARE
    if resource.RLIM_INFINITY != soft < needed:
        if resource.RLIM_INFINITY != hard < needed:
            raise InvalidValueError(
                "from_tcp", "size", size,
                f"{hard - needed + size} ranks at most, as this process may have {hard} "
                "descriptors; raise ulimit -n on rank 0, or use MPI",
            )  # fmt: skip
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Store:
    """Serves one group until :meth:`close`, or until rank 0 or all ranks have left.

    Args:
        host: Name or address to listen at.
        port: Port to listen at; 0 for any free one.
        size: Number of ranks.
        secret: What ranks must know; empty for none.

    Raises:
        InvalidValueError: the address cannot be listened at, or there are more ranks than this
            process may have connections.
    """

    def __init__(self, host: str, port: int, size: int, secret: bytes) -> None:
        self._size = size
        self._secret = secret
        self._visitors: set[_Visitor] = set()
        self._strangers: set[_Visitor] = set()
        self._members: dict[int, _Visitor] = {}
        self._gone: set[int] = set()
        #: What ranks gave to the gather under way; that of a rank that has left since stays good.
        self._offers: dict[int, Offer] = {}
        #: Members whose part is in, and who have no answer yet.
        self._waiting: set[_Visitor] = set()
        #: The answer to who is missing, until it is another one.
        self._absent = b""
        self._stopped = False
        _make_room(size)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(found[4][:2], family=found[0], backlog=size + 16)
        except OSError as error:
            raise InvalidValueError(
                "from_tcp", "host:port", f"{host}:{port}",
                f"an address of rank 0's machine with a free port ({error}); "
                "set CUPYX_DISTRIBUTED_HOST and CUPYX_DISTRIBUTED_PORT on all ranks",
            ) from error  # fmt: skip
        self.port: int = self._listener.getsockname()[1]
        self._listener.setblocking(False)
        self._bell, self._rope = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        # A daemon: a program that ends without close() must end.
        self._thread = threading.Thread(target=self._serve, name="cupy-zc-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Deliver the last answers, then close every connection. Bounded in time."""
        self._rope.close()
        self._thread.join(_LINGER + 2 * _PATIENCE)
        if self._thread.is_alive():
            _log.error("the store at port %d did not end; its thread is left behind", self.port)

    def abandon(self) -> None:
        """Close a forked child's copies of the descriptors; the thread is its parent's."""
        for visitor in self._visitors:
            visitor.connection.close()
        for item in (self._listener, self._bell, self._rope, self._selector):
            item.close()

    # Everything below runs in the thread of the store.

    def _serve(self) -> None:
        try:
            while not self._over():
                self._turn()
            self._deliver()
        except Exception:  # noqa: BLE001 - the end of a thread
            _log.exception("the store at port %d failed; its ranks find it closed", self.port)
        finally:
            for visitor in self._visitors:
                visitor.connection.close()
            # A forked child may hold a copy of the listener; shutdown frees the port all the same.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._bell.close()
            self._selector.close()

    def _over(self) -> bool:
        return self._stopped or 0 in self._gone or len(self._gone) == self._size

    def _turn(self) -> None:
        for key, events in self._selector.select(1.0):
            visitor = key.data
            if key.fileobj is self._listener:
                self._accept()
            elif visitor is None:
                self._stopped = True
            else:
                if events & selectors.EVENT_READ and visitor in self._visitors:
                    self._read(visitor)
                if events & selectors.EVENT_WRITE and visitor in self._visitors:
                    self._write(visitor)
        latest = time.monotonic() - _PATIENCE
        for visitor in [each for each in self._strangers if each.since < latest]:
            _log.warning("the store sends %s away: it did not join in time", visitor)
            self._part(visitor)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:  # it went away in the queue, or descriptors have run out
            _log.warning("the store could not accept a connection: %s", error)
            time.sleep(0.1)
            return
        if len(self._strangers) >= max(_MOST_STRANGERS, self._size):
            _log.warning("the store sends %s away: too many strangers at once", address)
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        visitor = _Visitor(connection, f"{address[0]}:{address[1]}", time.monotonic())
        self._visitors.add(visitor)
        self._strangers.add(visitor)
        self._selector.register(connection, selectors.EVENT_READ, visitor)

    def _read(self, visitor: _Visitor) -> None:
        try:
            data = visitor.connection.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._part(visitor)
            return
        try:
            for kind, payload in visitor.reader.feed(data):
                if visitor.leaving:
                    return
                self._handle(visitor, kind, payload)
        except WireError as error:
            self._refuse(visitor, str(error))

    def _handle(self, visitor: _Visitor, kind: Kind, payload: bytes) -> None:
        if visitor.rank is not None:
            if kind is Kind.GATHER and visitor.rank not in self._offers:
                self._gather(visitor, payload)
            elif kind is Kind.WHO:
                if not self._absent:
                    self._absent = frame(Kind.MISSING, pack_ranks(self._missing()))
                self._post(visitor, self._absent)
            else:
                self._refuse(visitor, f"a frame {kind.name} out of turn")
        elif kind is Kind.HELLO and not visitor.hello and len(payload) == HELLO.size:
            self._greet(visitor, payload)
        elif kind is Kind.PROOF and visitor.hello:
            self._admit(visitor, payload)
        else:
            self._refuse(visitor, f"a frame {kind.name} out of turn")

    def _greet(self, visitor: _Visitor, hello: bytes) -> None:
        size, rank, _ = HELLO.unpack(hello)
        if size != self._size:
            self._refuse(
                visitor, f"this group has {self._size} ranks and rank {rank} was told {size}"
            )
        elif rank >= size:
            self._refuse(visitor, f"there is no rank {rank} among {size}")
        else:
            visitor.hello = hello
            self._send(visitor, Kind.CHALLENGE, visitor.nonce)

    def _admit(self, visitor: _Visitor, given: bytes) -> None:
        rank = HELLO.unpack(visitor.hello)[1]
        if not hmac.compare_digest(
            given, proof(self._secret, b"rank", visitor.hello, visitor.nonce)
        ):
            self._refuse(
                visitor, f"rank {rank} has another secret; set CUPY_ZC_SECRET on all ranks"
            )
            return
        if rank in self._members:
            # The one who was here may have left just now: then this is a rank of the next group.
            self._read(self._members[rank])
        if self._gone:
            self._send(visitor, Kind.AGAIN)
            visitor.leaving = True
        elif rank in self._members:
            self._refuse(
                visitor, f"rank {rank} is already here, from {self._members[rank].address}"
            )
        else:
            visitor.rank = rank
            self._strangers.discard(visitor)
            visitor.reader.limit = member_limit(1)
            self._members[rank] = visitor
            welcome = proof(self._secret, b"store", visitor.hello, visitor.nonce)
            self._send(visitor, Kind.WELCOME, welcome)

    def _missing(self) -> set[int]:
        return set(range(self._size)) - self._offers.keys()

    def _gather(self, visitor: _Visitor, payload: bytes) -> None:
        assert visitor.rank is not None
        self._offers[visitor.rank] = unpack_offer(payload)
        self._waiting.add(visitor)
        self._absent = b""
        if self._gone and self._lost():
            self._tell_who_is_gone()
        elif len(self._offers) == self._size:
            offers = [self._offers[rank] for rank in range(self._size)]
            self._offers.clear()
            self._answer(Kind.RESULT, pack_offers(offers))

    def _lost(self) -> set[int]:
        """Who has left without a part in the gather under way."""
        return self._gone - self._offers.keys()

    def _tell_who_is_gone(self) -> None:
        if self._waiting:
            self._answer(Kind.GONE, pack_ranks(self._lost()))

    def _answer(self, kind: Kind, payload: bytes) -> None:
        """To all who wait. Ranks that are told of others that have gone or gave up, leave too."""
        told = frame(kind, payload)
        for member in self._waiting:
            self._post(member, told)
        self._waiting.clear()

    def _refuse(self, visitor: _Visitor, reason: str) -> None:
        if not visitor.leaving:
            _log.warning("the store refuses %s: %s", visitor, reason)
            visitor.leaving = True
            self._send(visitor, Kind.REFUSED, reason.encode())

    def _send(self, visitor: _Visitor, kind: Kind, payload: bytes = b"") -> None:
        self._post(visitor, frame(kind, payload))

    def _post(self, visitor: _Visitor, told: bytes) -> None:
        visitor.outbox.append(memoryview(told))
        self._selector.modify(
            visitor.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, visitor
        )

    def _write(self, visitor: _Visitor) -> None:
        try:
            sent = visitor.connection.send(visitor.outbox[0][:_CHUNK])
        except BlockingIOError:
            return
        except OSError:
            self._part(visitor)
            return
        visitor.outbox[0] = visitor.outbox[0][sent:]
        if not visitor.outbox[0]:
            visitor.outbox.popleft()
        if not visitor.outbox:
            self._selector.modify(visitor.connection, selectors.EVENT_READ, visitor)
            if visitor.leaving:
                self._part(visitor)

    def _part(self, visitor: _Visitor) -> None:
        """Close a connection; where it was a member's, tell those who wait for it."""
        self._visitors.discard(visitor)
        self._strangers.discard(visitor)
        self._waiting.discard(visitor)
        self._selector.unregister(visitor.connection)
        visitor.connection.close()
        if visitor.rank is not None:
            del self._members[visitor.rank]
            self._gone.add(visitor.rank)
            if visitor.rank not in self._offers:
                self._tell_who_is_gone()

    def _deliver(self) -> None:
        """Send what is still in the outboxes, for at most :data:`_LINGER` seconds."""
        self._selector.unregister(self._bell)
        self._selector.unregister(self._listener)
        self._gone.add(0)
        if 0 in self._offers:
            self._answer(Kind.GAVE_UP, pack_ranks(self._missing()))
        else:
            self._tell_who_is_gone()
        self._offers.clear()
        for visitor in list(self._visitors):
            if visitor.outbox:
                visitor.leaving = True
                self._selector.modify(visitor.connection, selectors.EVENT_WRITE, visitor)
            else:
                self._part(visitor)
        until = time.monotonic() + _LINGER
        while self._visitors and time.monotonic() < until:
            for key, _ in self._selector.select(0.1):
                self._write(key.data)
        unserved = [visitor.rank for visitor in self._visitors if visitor.rank is not None]
        if unserved:
            _log.warning("the store ended before %s read the last answer", name_ranks(unserved))
