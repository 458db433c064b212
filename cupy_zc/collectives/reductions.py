"""Sums and their like over the arrays of all ranks, in blocks that stay in the cache.

The order is that of the ranks, element by element, so the result is bitwise the same however the
work is cut: on all ranks, staged or not, from run to run. float16 and bfloat16 are summed (and
multiplied) in float32 and rounded once. Integers wrap around. The average of integers is their sum,
in their own type, divided and truncated towards zero. bool: sum is "any", prod is "all".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Array", "divide", "reduce_into"]

Array: TypeAlias = "np.ndarray[Any, Any]"

#: Elements of a block. 256 KiB of float32 stay in the cache from the first addition to the stores.
BLOCK = 1 << 16


def _multiply_complex(one: Array, other: Array, out: Array) -> Array:
    """Multiply by the parts: NumPy's own product of two numbers depends on where they stand.

    (Its vector loop rounds otherwise than the loop for what is left over at the end.)
    """
    real = one.real * other.real - one.imag * other.imag
    out.imag[...] = one.real * other.imag + one.imag * other.real
    out.real[...] = real
    return out


_UFUNCS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "avg": np.add,
}
#: What the parts of a complex number are, by its bytes.
_PARTS = {8: np.float32, 16: np.float64}
_HALVES = ("float16", "bfloat16")


def reduce_into(reduction: str, sources: Sequence[Array], targets: Sequence[Array]) -> None:
    """Reduce arrays of equal length, in their order, into one or more others.

    Args:
        reduction: One of ``REDUCTIONS``.
        sources: One-dimensional arrays of one type.
        targets: Arrays of that length and type, each a source or apart from all of them.
    """
    length, dtype = len(sources[0]), sources[0].dtype
    if len(sources) == 1:
        for target in targets:
            np.copyto(target, sources[0])
        return
    wide = dtype.name in _HALVES and reduction in ("sum", "prod", "avg")
    ufunc = _UFUNCS[reduction]
    if dtype.kind == "c" and reduction == "prod":
        ufunc = _multiply_complex
    result = np.empty(min(BLOCK, length), dtype)
    total = np.empty(len(result), np.float32) if wide else result
    other = np.empty_like(total) if wide else None
    # Overflow and NaN are results like others, as they are on a GPU.
    with np.errstate(all="ignore"):
        for start in range(0, length, BLOCK):
            part = slice(start, start + BLOCK)
            parts = [source[part] for source in sources]
            size = len(parts[0])
            into = total[:size]
            if other is None:
                ufunc(parts[0], parts[1], out=into)
                for each in parts[2:]:
                    ufunc(into, each, out=into)
            else:
                np.copyto(into, parts[0])
                for each in parts[1:]:
                    np.copyto(other[:size], each)
                    ufunc(into, other[:size], out=into)
            if reduction == "avg":
                _divide(into, len(sources))
            done = result[:size]
            if wide:
                np.copyto(done, into, casting="same_kind")
            for target in targets:
                target[part] = done


def divide(array: Array, by: int) -> None:
    """Divide in place: an average, where the sum is there already.

    Args:
        array: One-dimensional, of a type that has an average: any but bool.
        by: 1 or more.
    """
    with np.errstate(all="ignore"):
        for start in range(0, len(array), BLOCK):
            block = array[start : start + BLOCK]
            if block.dtype.name in _HALVES:
                wide = block.astype(np.float32)
                _divide(wide, by)
                np.copyto(block, wide, casting="same_kind")
            else:
                _divide(block, by)


def _divide(block: Array, by: int) -> None:
    """Divide in place; integers are truncated towards zero."""
    if block.dtype.kind in "iu":
        wide = block.astype(np.int64 if block.dtype.kind == "i" else np.uint64)
        quotient = wide // by
        if block.dtype.kind == "i":
            quotient += (wide < 0) & (quotient * by != wide)
        np.copyto(block, quotient, casting="same_kind")
    else:
        # A complex number is divided part by part: NaN in one must not reach the other.
        parts = block.view(_PARTS[block.dtype.itemsize]) if block.dtype.kind == "c" else block
        np.divide(parts, by, out=parts)
