"""What travels between the TCP store and its ranks: frames with a length and a bound on it.

A frame is ``magic (4) | kind (1) | length (8) | payload``, big-endian. The magic carries the
version of the protocol. Nothing in a payload is ever executed or unpickled.
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Iterable, Iterator, Sequence

from .bootstrap import MAX_PAYLOAD, Offer

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
    "pack_offer",
    "pack_offers",
    "pack_ranks",
    "proof",
    "unpack_items",
    "unpack_offer",
    "unpack_offers",
    "unpack_ranks",
]

_HEADER = struct.Struct("!4sBQ")
_MAGIC = b"CZS2"
_LENGTH = struct.Struct("!Q")
_NAME = struct.Struct("!H")
#: Number of an item, and how many ranks in a row have it.
_RUN = struct.Struct("!II")

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


def pack_offer(offer: Offer) -> bytes:
    """What one rank gives."""
    return _NAME.pack(len(offer.call)) + offer.call + offer.payload


def unpack_offer(data: bytes) -> Offer:
    """The inverse of :func:`pack_offer`.

    Raises:
        WireError: the name of the call is longer than ``data``.
    """
    end = _NAME.size + _NAME.unpack_from(data)[0] if len(data) >= _NAME.size else _NAME.size
    if end > len(data):
        raise WireError("the name of a call is cut short")
    return Offer(data[_NAME.size : end], data[end:])


def pack_offers(offers: Sequence[Offer]) -> bytes:
    """What all ranks give, in their order.

    It goes to every rank, and mostly the ranks give the same: the same call, the same value, the
    same machine as the rank before. So a value is there once, and then who has it. A gather in
    which all ranks agree has a few bytes, however many they are.
    """
    calls, payloads = [offer.call for offer in offers], [offer.payload for offer in offers]
    return pack_items([*_pack_runs(calls), *_pack_runs(payloads)])


def unpack_offers(data: bytes, size: int) -> list[Offer]:
    """The inverse of :func:`pack_offers`.

    Args:
        data: Bytes.
        size: How many ranks there are.

    Raises:
        WireError: it is not what so many ranks gave.
    """
    parts = unpack_items(data)
    if len(parts) != 4:
        raise WireError(f"what the ranks gave has {len(parts)} parts, not 4")
    columns = [_unpack_runs(items, runs, size) for items, runs in (parts[:2], parts[2:])]
    return list(map(Offer, *columns))


def _pack_runs(items: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The values among items, and runs of equal ones."""
    numbers: dict[bytes, int] = {}
    runs: list[tuple[int, int]] = []
    for item in items:
        number = numbers.setdefault(item, len(numbers))
        count = runs.pop()[1] + 1 if runs and runs[-1][0] == number else 1
        runs.append((number, count))
    return pack_items(numbers), b"".join(_RUN.pack(*run) for run in runs)


def _unpack_runs(values: bytes, runs: bytes, size: int) -> list[bytes]:
    known = unpack_items(values)
    pairs = list(_RUN.iter_unpack(runs[: len(runs) - len(runs) % _RUN.size]))
    if sum(count for _, count in pairs) != size or any(at >= len(known) for at, _ in pairs):
        raise WireError(f"what the ranks gave is not of {size} ranks")
    return [item for at, count in pairs for item in [known[at]] * count]


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
