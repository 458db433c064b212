"""What calls of NCCL do to memory, by NumPy, and what of them NCCL does not allow."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

__all__ = [
    "P2P",
    "TYPES",
    "Part",
    "Span",
    "carry_out",
    "mismatch",
    "overlapping",
    "refusal",
    "spans",
    "wrong",
]

Array = np.ndarray[Any, Any]

#: By ``ncclDataType_t``.
TYPES = tuple(
    np.dtype(name)
    for name in ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ml_dtypes.bfloat16)
)
#: By ``ncclRedOp_t``.
SUM, PROD, MAX, MIN, AVG = range(5)
_UFUNCS: tuple[Callable[..., Any], ...] = (np.add, np.multiply, np.maximum, np.minimum, np.add)
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
P2P = ("send", "recv")


class Part(NamedTuple):
    """One call of NCCL on one rank."""

    function: str
    source: int
    target: int
    elements: int
    #: ``ncclDataType_t``.
    kind: int
    #: ``ncclRedOp_t``; -1 where there is none.
    op: int = -1
    #: The root, or the peer; -1 where there is none.
    root: int = -1


class Span(NamedTuple):
    """Memory of a call."""

    address: int
    size: int

    def overlaps(self, other: Span) -> bool:
        """Whether both have a byte in common."""
        first, last = sorted((self, other))
        return bool(self.size and other.size) and first.address + first.size > last.address


def _row(part: Part) -> int:
    return part.elements * TYPES[part.kind].itemsize


def spans(part: Part, rank: int, size: int) -> tuple[Span, Span]:
    """What a rank gives and gets, in bytes; without size where it does not."""
    name, row, root = part.function, _row(part), rank == part.root
    gives = name != "recv" and (root or name not in ("broadcast", "scatter"))
    gets = name != "send" and (root or name not in ("reduce", "gather"))
    many_in = size if name in ("reduce_scatter", "scatter", "all_to_all") else 1
    many_out = size if name in ("all_gather", "gather", "all_to_all") else 1
    return Span(part.source, gives * many_in * row), Span(part.target, gets * many_out * row)


def refusal(part: Part, size: int) -> str:
    """Why NCCL refuses a call; empty where it does not."""
    if not 0 <= part.kind < len(TYPES):
        return f"there is no type {part.kind}"
    if part.function in REDUCING and not SUM <= part.op <= AVG:
        return f"there is no reduction {part.op}"
    rooted = part.function in ("reduce", "broadcast", "gather", "scatter", *P2P)
    return f"there is no rank {part.root}" if rooted and not 0 <= part.root < size else ""


def wrong(part: Part, rank: int, size: int, *, sharp: bool) -> str:
    """Why a call does something else than it should, without a word; empty where it does not."""
    if part.op == AVG and TYPES[part.kind].kind in "iu":
        return "it averages integers"
    if part.op == AVG and sharp and part.kind not in (6, 9):  # 16-bit floats
        return "SHARP has no average"
    given, taken = spans(part, rank, size)
    in_place = {
        "all_gather": taken.address + rank * _row(part),
        "gather": taken.address + part.root * _row(part),
        "reduce_scatter": taken.address - rank * _row(part),
        "scatter": taken.address - part.root * _row(part),
        "all_to_all": None,
    }.get(part.function, taken.address)
    if given.overlaps(taken) and given.address != in_place:
        return "its input and its output overlap"
    return ""


def overlapping(parts: Sequence[Part], rank: int, size: int) -> bool:
    """Whether a group receives into what it sends, or receives there as well."""
    both = [spans(part, rank, size) for part in parts]
    for index, (_, taken) in enumerate(both):
        others = [span for place, pair in enumerate(both) if place != index for span in pair]
        if any(taken.overlaps(span) for span in others):
            return True
    return False


def mismatch(parts: Sequence[Part]) -> str:
    """In what calls differ that belong together; empty where they fit."""
    if parts[0].function in P2P:
        differing = len({_row(part) for part in parts}) > 1
    else:
        differing = len({part._replace(source=0, target=0) for part in parts}) > 1
    return f"ranks called different things: {', '.join(map(str, parts))}" if differing else ""


def carry_out(parts: Sequence[Part]) -> None:
    """Do what calls do that belong together: of all ranks in order, or a send and its receive."""
    if parts[0].function in P2P:
        given, taken = sorted(parts, key=lambda part: part.function, reverse=True)
        ctypes.memmove(taken.target, given.source, _row(given))
        return
    first, size = parts[0], len(parts)
    both = [spans(part, rank, size) for rank, part in enumerate(parts)]
    inputs = [_array(source, first.kind).copy() for source, _ in both]
    for rank, (_, target) in enumerate(both):
        if target.size:
            _array(target, first.kind)[...] = _result(first, rank, inputs)


def _array(span: Span, kind: int) -> Array:
    if not span.size:
        return np.empty(0, TYPES[kind])
    memory = (ctypes.c_ubyte * span.size).from_address(span.address)
    return np.ctypeslib.as_array(memory).view(TYPES[kind])


def _result(part: Part, rank: int, inputs: Sequence[Array]) -> Array:
    mine = slice(rank * part.elements, (rank + 1) * part.elements)
    match part.function:
        case "all_reduce" | "reduce":
            return _reduced(part.op, inputs)
        case "reduce_scatter":
            return _reduced(part.op, [each[mine] for each in inputs])
        case "broadcast":
            return inputs[part.root]
        case "scatter":
            return inputs[part.root][mine]
        case "all_gather" | "gather":
            return np.concatenate(inputs)
        case _:
            return np.concatenate([each[mine] for each in inputs])


def _reduced(op: int, inputs: Sequence[Array]) -> Array:
    dtype = inputs[0].dtype
    with np.errstate(all="ignore"):
        wide = [each.astype("f4") for each in inputs] if dtype.itemsize == 2 else list(inputs)
        total = functools.reduce(_UFUNCS[op], wide)
        return np.asarray(total / len(inputs) if op == AVG else total).astype(dtype)
