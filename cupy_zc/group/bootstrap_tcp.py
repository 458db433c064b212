"""Ranks that find each other at a TCP address, as ``cupyx.distributed`` does.

Rank 0 keeps a :class:`~cupy_zc.group.tcp_store.Store` in a thread; no helper process, so it works
under fork, spawn and forkserver, and nothing is left behind when a rank is killed.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import socket
import time
from collections.abc import Sequence

from ..config import settings
from ..errors import Error, MismatchError, PeerTimeoutError
from .agreement import vote
from .bootstrap import Bootstrap, Offer, check_member
from .bootstrap_threads import in_process
from .naming import name_ranks
from .tcp_store import Store
from .waiting import Wait, gone
from .wire import (
    HANDSHAKE_LIMIT,
    HELLO,
    NONCE,
    FrameReader,
    Kind,
    WireError,
    frame,
    member_limit,
    pack_items,
    pack_offer,
    proof,
    unpack_items,
    unpack_offers,
    unpack_ranks,
)

__all__ = ["from_tcp"]

_CHUNK = 1 << 20
_LONGEST_PAUSE = 0.25


class _Connection:
    """A rank's connection to the store."""

    def __init__(self, raw: socket.socket) -> None:
        self.raw = raw
        self.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = FrameReader(HANDSHAKE_LIMIT)

    def send(self, kind: Kind, payload: bytes, seconds: float) -> None:
        """Send a frame within so many seconds; TimeoutError when the store does not read it."""
        self.raw.settimeout(max(seconds, 0.001))
        self.raw.sendall(frame(kind, payload))

    def receive(self, seconds: float) -> tuple[Kind, bytes] | None:
        """The next frame, or None when none is complete after so many seconds.

        Raises:
            ConnectionError: the store has closed the connection.
            WireError: the other side is no store.
        """
        until = time.monotonic() + seconds
        data = b""
        while True:
            # What follows the first frame stays with the reader, for the next call.
            for item in self.reader.feed(data):
                return item
            left = until - time.monotonic()
            if left <= 0:
                return None
            self.raw.settimeout(left)
            try:
                data = self.raw.recv(_CHUNK)
            except TimeoutError:
                return None
            if not data:
                raise ConnectionResetError("the store closed the connection")


def _shake_hands(connection: _Connection, rank: int, size: int, secret: bytes, wait: Wait) -> None:
    """Join, or raise: ConnectionError where another try may help, MismatchError where not."""
    hello = HELLO.pack(size, rank, secrets.token_bytes(NONCE))
    nonce = b""
    connection.send(Kind.HELLO, hello, wait.remaining())
    while True:
        answer = connection.receive(wait.slice())
        if answer is None:
            wait.check([0], "its port takes connections and does not answer")
            continue
        kind, payload = answer
        if kind is Kind.CHALLENGE:
            nonce = payload
            connection.send(Kind.PROOF, proof(secret, b"rank", hello, nonce), wait.remaining())
        elif kind is Kind.WELCOME:
            if not hmac.compare_digest(payload, proof(secret, b"store", hello, nonce)):
                raise MismatchError(f"{wait.what}: the store does not know the secret of this rank")
            return
        elif kind is Kind.AGAIN:
            raise ConnectionResetError("the group at this address is ending")
        else:
            reason = payload.decode(errors="replace")
            raise MismatchError(f"{wait.what}: the store refused this rank: {reason}")


def _connect(host: str, port: int, rank: int, size: int, secret: bytes, wait: Wait) -> _Connection:
    """Connect and join, again and again until it works: rank 0 may come later than this rank."""
    pause = 0.005
    reason = ""
    while True:
        with contextlib.ExitStack() as stack:
            try:
                raw = socket.create_connection((host, port), timeout=max(wait.slice(5.0), 0.001))
                stack.callback(raw.close)
                if raw.getsockname() == raw.getpeername():
                    # Where nobody listens, TCP can connect a port of the ephemeral range to itself.
                    raise ConnectionRefusedError("nobody listens there")
                connection = _Connection(raw)
                _shake_hands(connection, rank, size, secret, wait)
            except WireError as error:
                raise MismatchError(f"{wait.what}: {error}; another program is there") from error
            except PeerTimeoutError as error:
                if not reason:
                    raise
                # The last try had no time to fail; an earlier one knows more.
                raise wait.expired([0], reason) from error
            except OSError as error:
                reason = f"{type(error).__name__}: {error}"
                wait.check([0], reason)
            else:
                connection.reader.limit = member_limit(size)
                stack.pop_all()
                return connection
        time.sleep(min(pause, wait.slice()))
        pause = min(2 * pause, _LONGEST_PAUSE)


class _TcpBootstrap(Bootstrap):
    def __init__(self, connection: _Connection, store: Store | None, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._connection = connection
        self._store = store

    def _gather(self, offer: Offer, wait: Wait) -> list[Offer]:
        try:
            return self._talk(pack_offer(offer), wait)
        except PeerTimeoutError:  # a TimeoutError too, and complete already
            raise
        except ConnectionError as error:
            raise gone(wait.what, [0], "it keeps the store, and the store is closed") from error
        except WireError as error:
            raise MismatchError(f"{wait.what}: the store does not make sense: {error}") from error
        except TimeoutError as error:
            raise wait.expired([0], "its store does not read") from error

    def _talk(self, payload: bytes, wait: Wait) -> list[Offer]:
        self._connection.send(Kind.GATHER, payload, wait.remaining())
        # Until the store says who is missing, rank 0 is: it keeps the store.
        missing = [0]
        while True:
            # Half the time that is left: the names must be here before the moment at which they are
            # needed. And seldom before that: where many ranks wait, all of them ask.
            answer = self._connection.receive(max(wait.slice(math.inf) / 2, 0.01))
            if answer is None:
                wait.check(missing)
                self._connection.send(Kind.WHO, b"", wait.remaining())
                continue
            kind, data = answer
            if kind is Kind.RESULT:
                return unpack_offers(data, self.size)
            if kind is Kind.GONE:
                raise gone(wait.what, unpack_ranks(data))
            if kind is Kind.GAVE_UP:
                ranks = unpack_ranks(data)
                raise PeerTimeoutError(
                    f"{wait.what}: rank 0 gave up waiting for {name_ranks(ranks)}", ranks
                )
            if kind is Kind.MISSING:
                missing = [peer for peer in unpack_ranks(data) if peer != self.rank] or [0]

    def _join(self, members: Sequence[int], timeout: float | None) -> Bootstrap | None:
        """The first member keeps a store of its own, so that the groups live independently."""
        store, failure, offer = None, None, b""
        if members and members[0] == self.rank and len(members) > 1:
            host = self._connection.raw.getsockname()[0]
            secret = secrets.token_bytes(NONCE)
            try:
                store = Store(host, 0, len(members), secret)
                offer = pack_items([host.encode(), str(store.port).encode(), secret])
            except Error as error:
                failure = error
        with contextlib.ExitStack() as stack:
            if store is not None:
                stack.callback(store.close)
            vote(self, "open the store of a split group", failure, timeout=timeout)
            offers = self._call("split(), addresses", offer, timeout)
            stack.pop_all()
        if not members:
            return None
        if len(members) == 1:
            return in_process(1)[0]
        address, port, secret = unpack_items(offers[members[0]])
        rank, size = members.index(self.rank), len(members)
        return _open(store, address.decode(), int(port), rank, size, secret, timeout)

    def _leave(self, *, owner: bool) -> None:
        if owner:
            with contextlib.suppress(OSError):
                # A forked child may hold a copy; shutdown tells the store all the same.
                self._connection.raw.shutdown(socket.SHUT_RDWR)
        self._connection.raw.close()
        if self._store is not None:
            if owner:
                self._store.close()
            else:
                self._store.abandon()


def _open(
    store: Store | None,
    host: str,
    port: int,
    rank: int,
    size: int,
    secret: bytes,
    timeout: float | None,
) -> Bootstrap:
    """Join the store at an address and wait until everybody has."""
    wait = Wait(f"rank {rank} of {size}: from_tcp({host}:{port})", timeout)
    with contextlib.ExitStack() as stack:
        if store is not None:
            stack.callback(store.close)
        connection = _connect(host, port, rank, size, secret, wait)
        stack.pop_all()
    with contextlib.ExitStack() as stack:
        bootstrap = stack.enter_context(_TcpBootstrap(connection, store, rank, size))
        bootstrap.barrier(timeout=max(wait.remaining(), 0.001))
        stack.pop_all()
    return bootstrap


def from_tcp(
    size: int,
    rank: int,
    host: str | None = None,
    port: int | None = None,
    secret: str | bytes | None = None,
    *,
    timeout: float | None = None,
) -> Bootstrap:
    """Join ``size`` ranks at a TCP address; returns when all have joined. The order is free.

    Args:
        size: Number of ranks.
        rank: This one, ``0 .. size - 1``. Rank 0 listens at the address.
        host: Name or address of rank 0's machine; None for ``CUPYX_DISTRIBUTED_HOST``.
        port: None for ``CUPYX_DISTRIBUTED_PORT``.
        secret: What every rank must know; None for ``CUPY_ZC_SECRET``. With none, whoever reaches
            the port may join: choose one on a network shared with others.
        timeout: Seconds; None for ``settings().setup_timeout``.

    Raises:
        InvalidValueError: a rank out of range, or an address that cannot be listened at.
        MismatchError: the store refused this rank (another size or secret, or the rank is already
            there), or what answers at the address is no store.
        PeerTimeoutError: a rank did not come in time.
    """
    check_member("from_tcp", rank, size)
    if size == 1:
        return in_process(1)[0]
    host = settings().host if host is None else host
    port = settings().port if port is None else port
    known = settings().secret if secret is None else secret
    key = known.encode() if isinstance(known, str) else known
    store = Store(host, port, size, key) if rank == 0 else None
    return _open(store, host, port, rank, size, key, timeout)
