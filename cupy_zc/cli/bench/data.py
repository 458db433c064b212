"""What the buffers hold and what must come out, as pure functions of rank and index.

The values are small whole numbers, so every sum and product over at most eight ranks is exact in
every type but 8-bit integers, which wrap alike everywhere: results are compared bit by bit.

A reduction in place that is repeated would grow without bound; it is timed on zeros, which stay.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .api import Case

__all__ = ["clear", "expected", "fill", "given", "mistake", "poison"]

#: Elements worked on at a time, so that 1 GiB needs little scratch memory.
_CHUNK = 1 << 24
#: Every byte of an output before the call: a NaN in floats, and a number no case produces else.
_POISON = 0xFF


def given(case: Case, rank: int, index: Any) -> Any:
    """The input of a rank as int64; ``index`` is an int64 array of positions."""
    value = (index * 7 + (index >> 12) * 3 + rank * 13) % 31
    return 1 + (value % 2 if case.op == "prod" else value)


def expected(case: Case, rank: int, index: Any) -> Any:
    """The output of a rank that has one, not yet rounded to the type of the case."""
    if case.collective in ("all_reduce", "reduce"):
        return _reduced(case, index)
    if case.collective == "reduce_scatter":
        return _reduced(case, index + rank * case.part)
    if case.collective == "broadcast":
        return given(case, case.root, index)
    if case.collective == "scatter":
        return given(case, case.root, index + rank * case.part)
    if case.collective == "send_recv":
        return given(case, rank ^ 1, index)
    source, offset = index // case.part, index % case.part
    return given(case, source, offset + rank * case.part * (case.collective == "all_to_all"))


def _reduced(case: Case, index: Any) -> Any:
    total = given(case, 0, index)
    for rank in range(1, case.ranks):
        value = given(case, rank, index)
        if case.op == "sum":
            total = total + value
        elif case.op == "prod":
            total = total * value
        else:
            smaller = (value < total) == (case.op == "min")
            total = total * ~smaller + value * smaller
    return total


def _chunks(size: int) -> list[tuple[int, int]]:
    return [(start, min(start + _CHUNK, size)) for start in range(0, size, _CHUNK)]


def fill(xp: ModuleType, case: Case, rank: int, array: Any) -> None:
    """Write the input of a rank."""
    for start, stop in _chunks(array.size):
        index = xp.arange(start, stop, dtype=xp.int64)
        array[start:stop] = given(case, rank, index).astype(array.dtype)


def clear(array: Any) -> None:
    """Write zeros, which every operation leaves as they are."""
    array[...] = 0


def poison(xp: ModuleType, array: Any) -> None:
    """Overwrite an output with what no call leaves there."""
    array.view(xp.uint8)[...] = _POISON


def _number(xp: ModuleType, element: Any) -> float:
    return float(element.astype(xp.float64))


def mistake(xp: ModuleType, case: Case, rank: int, array: Any) -> tuple[int, str]:
    """How many elements of the output of a rank are wrong, and the first of them in words."""
    count, words = 0, ""
    if not case.gets(rank):
        return count, words
    bits = xp.dtype(f"u{array.dtype.itemsize}")
    for start, stop in _chunks(array.size):
        index = xp.arange(start, stop, dtype=xp.int64)
        right = expected(case, rank, index).astype(array.dtype)
        differs = array[start:stop].view(bits) != right.view(bits)
        wrong = int(differs.sum())
        if wrong and not count:
            at = int(differs.argmax())
            words = (
                f"the first at {start + at:,}: "
                f"{_number(xp, array[start + at])} instead of {_number(xp, right[at])}"
            )
        count += wrong
    return count, words and f"{count:,} wrong elements, {words}"
