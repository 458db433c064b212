"""What an engine is asked to do, and what it says it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .plan import REDUCTIONS, ROLES, Operation

__all__ = ["BARRIER", "Call", "Transfer", "describe", "transfer_of"]


class Call(NamedTuple):
    """One collective on one rank, checked. A tuple because one is made in every call."""

    operation: Operation
    dtype: np.dtype[Any]
    #: Number of the dtype.
    code: int
    #: Number of the reduction; 0 where the operation does not reduce.
    reduction: int
    #: 0 where there is none.
    root: int
    #: Columns: elements of a row.
    columns: int
    #: 1 where the elements follow each other in Fortran order.
    fortran: int
    #: What this rank gives and gets; None where the operation has none on this rank.
    input: Any
    output: Any
    #: Whether the input is the part of the output that it would be copied to, or the reverse.
    in_place: bool
    #: Why the input must be copied before anything is written; empty where it need not.
    clash: str

    def __str__(self) -> str:
        return f"Communicator.{self.operation.call}"

    @property
    def written(self) -> Any:
        """The output; of the root of a broadcast its array, which has all that it would get."""
        spreads = self.operation is Operation.BROADCAST and self.output is None
        return self.input if spreads else self.output


#: A barrier.
BARRIER = Call(Operation.BARRIER, np.dtype(bool), 0, 0, 0, 0, 0, None, None, False, "")


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a call did."""

    #: Name of the method.
    operation: str
    #: Who reads and writes what; see ``cupy_zc.collectives.plan``. "copy" of a send.
    algorithm: str
    #: Whether no rank copied its data through scratch.
    zero_copy: bool
    #: Why data was copied, on this rank or which other ranks; empty where it was not.
    reason: str
    #: Bytes of the larger of the two arrays, as far as the call uses them.
    bytes: int
    #: How NCCL has the arrays; registered by ``register()`` as "local" or "window", by itself in a
    #: capture as "graph", or "none"; empty where NCCL did not carry the call.
    registration: str = ""


def transfer_of(
    call: Call,
    algorithm: str,
    ranks: int,
    reasons: Sequence[str] = (),
    *,
    staged: bool = False,
    registration: str = "",
) -> Transfer:
    """What a collective did.

    Args:
        call: It.
        algorithm: How.
        ranks: Of the communicator.
        reasons: Why data was copied.
        staged: Whether it was, on any rank.
        registration: How NCCL has the arrays.
    """
    role = ROLES[call.operation]
    rows = ranks if role.input_rows or role.output_rows else 1
    nbytes = rows * call.columns * call.dtype.itemsize
    return Transfer(
        call.operation.call, algorithm, not staged, "; ".join(reasons), nbytes, registration
    )


def describe(
    operation: int, dtype: str, reduction: int, root: int, count: int, fortran: int
) -> str:
    """A call as it reads in a mismatch: ``all_reduce(count=3, dtype=int8, op='sum')``."""
    kind = Operation(operation)
    role = ROLES[kind]
    if kind is Operation.BARRIER:
        return "barrier()"
    parts = [f"count={count}", f"dtype={dtype}"]
    if role.reduces:
        parts.append(f"op={REDUCTIONS[reduction]!r}")
    if role.rooted:
        parts.append(f"root={root}")
    if fortran:
        parts.append("order='F'")
    return f"{kind.call}({', '.join(parts)})"
