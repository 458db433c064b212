"""What a rank says in the negotiation of the host engine: a word of what it calls, and where."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ..errors import MismatchError
from ..group.naming import sides
from .call import Call, describe
from .control import Control
from .dtypes import DTYPES
from .engine import Place
from .rounds import Where

__all__ = ["CAPTURES", "compare", "write"]

#: What must be equal: call number, operation, dtype, reduction, order, root, count.
_PRINT = struct.Struct("<QBBBBiq")
#: Arena and offset of input and output.
_PLACES = struct.Struct("<iqiq")
_WORD = struct.Struct(_PRINT.format + _PLACES.format[1:])

#: In place of a dtype: the rank makes no call, it captures one.
CAPTURES = 255


def _print_of(call: Call) -> tuple[int, ...]:
    """What must be equal, but for the number."""
    return call.operation, call.code, call.reduction, call.fortran, call.root, call.columns


def _said(operation: int, code: int, reduction: int, fortran: int, root: int, count: int) -> str:
    """A print in words."""
    if code == CAPTURES:
        return "a call in a capture"
    return describe(operation, DTYPES[code], reduction, root, count, fortran)


def write(control: Control, number: int, call: Call, source: Place, target: Place) -> None:
    """Write this rank's word of the ``number``-th call of a lane."""
    control.write(
        number & 1, _WORD, number, *_print_of(call),
        source.arena, source.offset, target.arena, target.offset,
    )  # fmt: skip


def compare(control: Control, number: int, rank: int) -> list[Where]:
    """After the meeting: where everybody's arrays are.

    Raises:
        MismatchError: the ranks do not call the same.
    """
    words = control.read(number & 1, _WORD.size)
    mine = words[rank][: _PRINT.size]
    if any(word[: _PRINT.size] != mine for word in words):
        raise _mismatch([_PRINT.unpack(word[: _PRINT.size]) for word in words])
    return [Where(*_PLACES.unpack(word[_PRINT.size :])) for word in words]


def _mismatch(prints: Sequence[tuple[int, ...]]) -> MismatchError:
    calls = {peer: _said(*rest) for peer, (_, *rest) in enumerate(prints)}
    return MismatchError(
        f"the ranks do not make the same call: {sides(calls, 'is at')}; nothing was written, "
        "and all ranks can go on with the next call"
    )
