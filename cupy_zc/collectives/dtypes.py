"""The element types of collectives: which there are, and which reductions each one knows."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["DTYPES", "ITEMSIZES", "code_of", "refuse_reduction"]

#: Names of the types; the place of a name is its number in a negotiation word.
DTYPES: tuple[str, ...] = (
    "bool",
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip

#: Bytes of an element, by number.
ITEMSIZES: tuple[int, ...] = (1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16)

_codes: dict[np.dtype[Any], int] = {}


def code_of(dtype: np.dtype[Any]) -> int | None:
    """The number of a type; None for one that collectives do not know."""
    code = _codes.get(dtype)
    if code is None and dtype.name in DTYPES and dtype.isnative:
        code = _codes[dtype] = DTYPES.index(dtype.name)
    return code


def refuse_reduction(dtype: np.dtype[Any], reduction: str) -> str | None:
    """What is allowed instead, where a reduction has no meaning for a type; else None."""
    if dtype.kind == "c" and reduction in ("min", "max"):
        return "'sum', 'prod' or 'avg' for complex arrays, which have no order"
    if dtype.kind == "b" and reduction == "avg":
        return "'sum', 'prod', 'min' or 'max' for bool arrays (sum: any, prod: all)"
    return None
