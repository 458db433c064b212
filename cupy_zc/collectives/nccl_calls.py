"""How a collective is said to NCCL: function, element type, reduction. Pure.

What is only moved goes as bytes, so every type can be moved. Of reductions NCCL has no integers of
16 bits, and no complex numbers: sums and averages of those are sums of their parts, their product
is refused. A bool is a byte that is 0 or 1: sum and max are the larger one, prod and min the
smaller.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .call import Call
from .dtypes import DTYPES, refuse_reduction
from .plan import REDUCTIONS, ROLES, Operation

__all__ = ["BYTES", "NcclCall", "nccl_call", "refuse_nccl_reduction"]

#: ``ncclUint8``.
BYTES = 1
#: Bytes of a 16-bit float.
_HALF = 2
#: ``ncclDataType_t`` of what NCCL reduces, and how many of it an element is.
_TYPES: dict[str, tuple[int, int]] = {
    "bool": (BYTES, 1), "int8": (0, 1), "uint8": (BYTES, 1),
    "int32": (2, 1), "uint32": (3, 1), "int64": (4, 1), "uint64": (5, 1),
    "float16": (6, 1), "bfloat16": (9, 1), "float32": (7, 1), "float64": (8, 1),
    "complex64": (7, 2), "complex128": (8, 2),
}  # fmt: skip
#: ``ncclRedOp_t``.
_SUM, _PROD, _MAX, _MIN, _AVG = range(5)
_REDUCTIONS = {"sum": _SUM, "prod": _PROD, "min": _MIN, "max": _MAX, "avg": _AVG}
_OF_BOOLS = {"sum": _MAX, "prod": _MIN, "min": _MIN, "max": _MAX}

#: By operation: the function of :class:`~.nccl_library.Nccl`, whether it takes a root.
_FUNCTIONS = {
    Operation.ALL_REDUCE: "all_reduce",
    Operation.REDUCE: "reduce",
    Operation.BROADCAST: "broadcast",
    Operation.REDUCE_SCATTER: "reduce_scatter",
    Operation.ALL_GATHER: "all_gather",
    Operation.GATHER: "gather",
    Operation.SCATTER: "scatter",
    Operation.ALL_TO_ALL: "all_to_all",
}


def refuse_nccl_reduction(dtype: np.dtype[Any], reduction: str) -> str | None:
    """What NCCL allows instead of a reduction; None where it can do that one."""
    refused = refuse_reduction(dtype, reduction)
    if refused is not None:
        return refused
    if dtype.name not in _TYPES:
        kinds = ", ".join(_TYPES)
        return f"an array that NCCL can reduce, of {kinds}; it has no {dtype.name}"
    if dtype.kind == "c" and reduction == "prod":
        return "'sum' or 'avg' for complex arrays between nodes: NCCL sums their parts"
    return None


class NcclCall(NamedTuple):
    """One call of NCCL."""

    #: Of :class:`~.nccl_library.Nccl`.
    function: str
    #: All but the communicator and the stream.
    arguments: tuple[int, ...]
    #: By how much each element of the output is divided afterwards; 1: not at all.
    divisor: int


def nccl_call(call: Call, size: int, source: int, target: int, *, sharp: bool) -> NcclCall:
    """A collective as NCCL's.

    Args:
        call: It; no barrier, and not without elements.
        size: Number of ranks.
        source: Address of the input; where this rank has none, of any memory.
        target: As ``source``.
        sharp: Whether IB SHARP may carry it, which knows no average. Those of 16-bit floats stay
            averages all the same, as their sums would overflow.
    """
    role = ROLES[call.operation]
    if not role.reduces:
        if call.operation is Operation.BROADCAST and call.output is None:
            target = source  # NCCL writes the root's output too
        moved = (call.columns * call.dtype.itemsize, BYTES)
        rest = (*moved, call.root) if role.rooted else moved
        return NcclCall(_FUNCTIONS[call.operation], (source, target, *rest), 1)
    name = REDUCTIONS[call.reduction]
    kind, parts = _TYPES[DTYPES[call.code]]
    operation = _OF_BOOLS[name] if call.dtype.kind == "b" else _REDUCTIONS[name]
    divisor = 1
    if operation == _AVG and (call.dtype.kind in "iu" or (sharp and call.dtype.itemsize > _HALF)):
        operation, divisor = _SUM, size
    arguments: tuple[int, ...] = (source, target, call.columns * parts, kind, operation)
    if role.rooted:
        arguments = (*arguments, call.root)
        divisor = divisor if call.output is not None else 1
    return NcclCall(_FUNCTIONS[call.operation], arguments, divisor)
