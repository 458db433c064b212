"""What the kernels of ``cuda/`` are given, and what they leave: ``cuda/types.cuh``, for the host.

All of it is little-endian and laid out as the C++ compiler does, which both sides assert.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from ..errors import Error
from .call import Call, describe
from .dtypes import DTYPES

__all__ = [
    "EVERY_RANK",
    "MAX_RANKS",
    "MISMATCH",
    "MULTICAST",
    "STAGED",
    "TIMEOUT",
    "Args",
    "Record",
    "Sizes",
    "described",
    "fingerprint",
    "location",
    "mix",
    "nanoseconds",
    "unmix",
]

MAX_RANKS = 8
#: ``Args.root`` where there is no root.
EVERY_RANK = 0xFFFFFFFF
#: A location that peers cannot reach.
STAGED = 0xFFFFFFFFFFFFFFFF
#: A bit of a location that is bound to the multicast object of its arena.
MULTICAST = 1 << 63
#: What a record can say.
TIMEOUT, MISMATCH = 1, 2

_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64


class Args(ctypes.Structure):
    """The argument of every kernel; see ``cuda/types.cuh``."""

    #: The values that say where the arrays are, where the same ones may come again.
    filled_with: tuple[int, ...] | None = None

    _fields_ = (
        ("input", _u64), ("output", _u64), ("input_location", _u64), ("output_location", _u64),
        ("count", _u64), ("fingerprint", _u64), ("windows", _u64), ("error", _u64),
        ("lane", _u64), ("budget", _u64), ("ll128_lines", _u64), ("ll_packs", _u64),
        ("chunk", _u64), ("scratch", _u64), ("lanes", _u64 * MAX_RANKS),
        ("rank", _u32), ("size", _u32), ("arenas", _u32), ("root", _u32),
        ("element", _u32), ("two_step", _u32),
    )  # fmt: skip


class Record(ctypes.Structure):
    """What went wrong first on a lane; memory that kernels write and the host reads.

    But for ``abort``, which the host writes: 0, or 1 + a rank that cannot come any more, for which
    no kernel waits longer.
    """

    _fields_ = (
        ("code", _u32), ("rank", _u32), ("lane", _u64), ("epoch", _u64), ("detail", _u64),
        ("mine", _u64), ("abort", _u64),
    )  # fmt: skip


class Sizes(NamedTuple):
    """Capacities of a lane, equal on all ranks."""

    #: Lines of 128 bytes, and packs of 16, for each peer and parity.
    ll128_lines: int
    ll_packs: int
    #: Bytes of a scratch buffer, of which there are four.
    chunk: int

    def lane_bytes(self, ranks: int) -> int:
        """Bytes of a lane: the fixed part, and the low-latency buffers."""
        peers = ranks - 1
        return 40960 + 2 * peers * (self.ll128_lines * 128 + self.ll_packs * 32)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch of a lane, which only some calls need."""
        return 4 * self.chunk


def location(arena: int, offset: int, *, bound: bool = False) -> int:
    """Where an array is, in one word; ``bound``: to the multicast object of its arena, whole.

    Raises:
        Error: there were more arenas than a word can tell.
    """
    if arena >= 1 << 15:
        raise Error(
            f"arena {arena} of this communicator cannot be named any more: {1 << 15} pools were "
            "registered in its life; make a new communicator"
        )
    return arena << 48 | offset | (MULTICAST if bound else 0)


def nanoseconds(seconds: float) -> int:
    """A time-out for a kernel; one that is longer than 290 years is that long."""
    return min(int(seconds * 1e9), (1 << 63) - 1)


# A fingerprint is what a call is, in 64 bits, mixed so that any part of it differs where calls do.
# It can be unmixed: so a rank can say what another one called.

_MASK = (1 << 64) - 1
#: The finaliser of MurmurHash3; odd factors have an inverse modulo 2 ** 64.
_FACTORS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
#: Bits of operation, dtype, reduction, root, order; the count has the rest.
_FIELDS = (4, 4, 3, 3, 1)


def mix(word: int) -> int:
    """64 bits, each of which depends on all of the word; :func:`unmix` is the way back."""
    word ^= word >> 33
    for factor in _FACTORS:
        word = word * factor & _MASK
        word ^= word >> 33
    return word


def unmix(word: int) -> int:
    """The word that was mixed."""
    word ^= word >> 33
    for factor in reversed(_FACTORS):
        word = word * pow(factor, -1, 1 << 64) & _MASK
        word ^= word >> 33
    return word


def fingerprint(call: Call) -> int:
    """What ranks must agree on: operation, dtype, reduction, root, order and count."""
    word = call.columns & (_MASK >> sum(_FIELDS))
    values = (call.operation, call.code, call.reduction, call.root, call.fortran)
    for value, bits in zip(values, _FIELDS, strict=True):
        word = word << bits | value
    return mix(word)


def described(word: int) -> str:
    """A call as its fingerprint tells it: ``all_reduce(count=3, dtype=int8, op='sum')``."""
    word = unmix(word)
    values: list[int] = []
    for bits in reversed(_FIELDS):
        values.append(word & ((1 << bits) - 1))
        word >>= bits
    fortran, root, reduction, code, operation = values
    try:
        return describe(operation, DTYPES[code], reduction, root, word, fortran)
    except (IndexError, ValueError):
        return "something that is no call of this version"


def _check(kind: Any, size: int) -> None:
    if ctypes.sizeof(kind) != size:
        raise AssertionError(f"{kind.__name__} has {ctypes.sizeof(kind)} bytes and not {size}")


_check(Args, 200)
_check(Record, 48)
