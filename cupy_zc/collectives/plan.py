"""How a collective is carried out: a pure function of what all ranks share.

Each array of a call is seen as a matrix of ``count`` columns and one row, or one row for each rank.
A *chunk* is a range of columns. Which rank touches what:

==============  =======  ========  ==================================================
operation       input    output    algorithm
==============  =======  ========  ==================================================
all_reduce      1 row    1 row     two_shot: a rank reduces its part and stores it to all
reduce          1 row    root 1    two_shot: a rank reduces its part and stores it to the root
reduce_scatter  n rows   1 row     one_shot: a rank reduces its row of all inputs
broadcast       root 1   others 1  pull: a rank reads the root's input
all_gather      1 row    n rows    pull: a rank reads all inputs
scatter         root n   1 row     pull: a rank reads its row of the root's input
all_to_all      n rows   n rows    pull: a rank reads its row of all inputs
gather          1 row    root n    push: a rank stores its row to the root
==============  =======  ========  ==================================================

An input that is read, or an output that is written, by *other* ranks must be where they can reach
it: registered, or copied through scratch (*staged*). What only its own rank touches never is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, TypeAlias

__all__ = [
    "REDUCTIONS",
    "ROLES",
    "SCRATCH_BYTES",
    "Algorithm",
    "Capabilities",
    "Operation",
    "Plan",
    "Role",
    "plan",
]

#: Bytes of scratch of a rank for its input, and as many for its output. A chunk fits into it: large
#: enough to hide two barriers, small enough to stay in a cache of usual size.
SCRATCH_BYTES = 4 << 20

#: Reductions, by their number in a negotiation word.
REDUCTIONS = ("sum", "prod", "min", "max", "avg")

Algorithm: TypeAlias = Literal["none", "two_shot", "one_shot", "pull", "push"]


class Operation(IntEnum):
    """The collectives, by their number in a negotiation word."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE = 2
    BROADCAST = 3
    REDUCE_SCATTER = 4
    ALL_GATHER = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8

    @property
    def call(self) -> str:
        """The name of the method."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Role:
    """What an operation does with its arrays."""

    algorithm: Algorithm
    #: Whether the input, or the output, has a row for each rank, not one.
    input_rows: bool
    output_rows: bool
    #: Whether other ranks touch it.
    input_remote: bool
    output_remote: bool
    reduces: bool
    #: Whether the call names a root.
    rooted: bool


ROLES: dict[Operation, Role] = {
    Operation.BARRIER: Role("none", False, False, False, False, False, False),
    Operation.ALL_REDUCE: Role("two_shot", False, False, True, True, True, False),
    Operation.REDUCE: Role("two_shot", False, False, True, True, True, True),
    Operation.BROADCAST: Role("pull", False, False, True, False, False, True),
    Operation.REDUCE_SCATTER: Role("one_shot", True, False, True, False, True, False),
    Operation.ALL_GATHER: Role("pull", False, True, True, False, False, False),
    Operation.GATHER: Role("push", False, True, False, True, False, True),
    Operation.SCATTER: Role("pull", True, False, True, False, False, True),
    Operation.ALL_TO_ALL: Role("pull", True, True, True, False, False, False),
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the ranks of a call share."""

    #: Bytes of scratch of each rank for its input, and as many for its output.
    scratch: int
    #: Whether any rank copies through it.
    staged: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """How a collective is carried out."""

    algorithm: Algorithm
    #: Columns of a chunk; all of them where nobody stages.
    columns: int


def plan(
    operation: Operation, count: int, itemsize: int, ranks: int, capabilities: Capabilities
) -> Plan:
    """Choose algorithm and chunk. Pure, and so the same on all ranks.

    Args:
        operation: Which collective.
        count: Columns.
        itemsize: Bytes of an element.
        ranks: How many.
        capabilities: Scratch, and whether it is used.
    """
    role = ROLES[operation]
    columns = count
    if capabilities.staged:
        rows = ranks if role.input_rows or (role.output_rows and role.output_remote) else 1
        columns = max(1, min(count, capabilities.scratch // (rows * itemsize)))
    return Plan(role.algorithm, columns)
