"""What travels between the TCP store and its ranks: frames with a length and a bound on it.

A frame is ``magic (4) | kind (1) | length (8) | payload``, big-endian. The magic carries the
version of the protocol. Nothing in a payload is ever executed or unpickled.
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Iterable, Iterator

from .bootstrap import MAX_PAYLOAD

__all__ = [
    "HANDSHAKE_LIMIT",
    "HELLO",
    "NONCE",
    "FrameReader",
    "Kind",
    "WireError",
    "frame",
    "member_limit",
    "pack_items",
    "pack_ranks",
    "proof",
    "unpack_items",
    "unpack_ranks",
]

_HEADER = struct.Struct("!4sBQ")
_MAGIC = b"CZS1"
_LENGTH = struct.Struct("!Q")

#: Bytes of the random numbers that make every handshake another one.
NONCE = 32
#: Bytes of the longest frame that a stranger may send.
HANDSHAKE_LIMIT = 1 << 12
#: Size of the group, rank, nonce: what a rank says first.
HELLO = struct.Struct(f"!II{NONCE}s")


class Kind(enum.IntEnum):
    """Kinds of frames, in the order of a conversation."""

    #: Rank to store: :data:`HELLO`.
    HELLO = 1
    #: Store to rank: a nonce.
    CHALLENGE = 2
    #: Rank to store: that it knows the secret.
    PROOF = 3
    #: Store to rank: that it knows the secret as well; the rank has joined.
    WELCOME = 4
    #: Store to rank: the reason why it may not join.
    REFUSED = 5
    #: Store to rank: this group is ending; whoever comes for the next one shall come again.
    AGAIN = 6
    #: Rank to store: its part of a gather.
    GATHER = 7
    #: Store to rank: the parts of all ranks.
    RESULT = 8
    #: Rank to store: who is missing?
    WHO = 9
    #: Store to rank: the ranks whose part is missing.
    MISSING = 10
    #: Store to rank: the ranks that left, so that the gather cannot be.
    GONE = 11
    #: Store to rank: the ranks for which rank 0 did not want to wait any longer.
    GAVE_UP = 12


class WireError(ValueError):
    """Bytes that no rank and no store of this version sends."""


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """A frame, ready to be sent."""
    return _HEADER.pack(_MAGIC, kind, len(payload)) + payload


class FrameReader:
    """Cuts a stream of bytes into frames. ``limit`` bounds what a length may claim."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Take more bytes and yield the frames that are now complete.

        Raises:
            WireError: not a frame, or one longer than the limit.
        """
        self._buffer += data
        while self._buffer:
            known = min(len(self._buffer), len(_MAGIC))
            if self._buffer[:known] != _MAGIC[:known]:
                raise WireError("the bytes are not those of a cupy-zc store of this version")
            if len(self._buffer) < _HEADER.size:
                return
            _, number, length = _HEADER.unpack_from(self._buffer)
            if length > self.limit:
                raise WireError(f"a frame of {length:,} bytes, where {self.limit:,} are allowed")
            if number not in Kind._value2member_map_:
                raise WireError(f"a frame of the unknown kind {number}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(memoryview(self._buffer)[_HEADER.size : end])
            del self._buffer[:end]
            yield Kind(number), payload


def pack_items(items: Iterable[bytes]) -> bytes:
    """Byte strings, each behind its length."""
    return b"".join(part for item in items for part in (_LENGTH.pack(len(item)), item))


def unpack_items(data: bytes) -> list[bytes]:
    """The inverse of :func:`pack_items`.

    Raises:
        WireError: a length points outside ``data``.
    """
    items: list[bytes] = []
    at = 0
    while at < len(data):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(data, at)[0] if start <= len(data) else start
        if at > len(data):
            raise WireError("a list of items is cut short")
        items.append(data[start:at])
    return items


def pack_ranks(ranks: Iterable[int]) -> bytes:
    """Ranks as 32-bit numbers, ascending."""
    return b"".join(rank.to_bytes(4, "big") for rank in sorted(ranks))


def unpack_ranks(data: bytes) -> list[int]:
    """The inverse of :func:`pack_ranks`."""
    return [int.from_bytes(data[at : at + 4], "big") for at in range(0, len(data), 4)]


def proof(secret: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    """What only a holder of the secret can say; empty where the group has none.

    Args:
        secret: The group's secret.
        side: ``b"rank"`` or ``b"store"``, so that neither can answer with the other's words.
        hello: The rank's first frame: its size, rank and nonce.
        nonce: The store's nonce.
    """
    return hmac.digest(secret, side + b"\0" + hello + nonce, "sha256") if secret else b""


def member_limit(parts: int) -> int:
    """Bytes of the longest frame that holds the payloads of ``parts`` ranks, with their names."""
    return parts * (MAX_PAYLOAD + HANDSHAKE_LIMIT)
