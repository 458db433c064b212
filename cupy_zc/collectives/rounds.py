"""What a rank does between two meetings: its share of a chunk, on the memory of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .call import Call
from .memory import matrix
from .plan import REDUCTIONS, ROLES, Operation
from .reductions import Array, reduce_into

__all__ = ["NONE", "OWN", "STAGED", "Reach", "Where", "do_share"]

#: In place of an arena: copied through scratch; touched by its own rank only; not there at all.
STAGED, OWN, NONE = -1, -2, -3


class Where(NamedTuple):
    """Where input and output of one rank are: arena and offset, or one of the constants above."""

    source: int
    source_offset: int
    target: int
    target_offset: int


@dataclass(frozen=True, slots=True)
class Reach:
    """How a rank gets at the arrays of all ranks in one call."""

    call: Call
    rank: int
    #: By rank.
    where: Sequence[Where]
    #: ``address(rank, arena, offset)``
    address: Callable[[int, int, int], int]
    #: Addresses of the scratch for inputs and for outputs, by rank.
    scratch_in: Sequence[int]
    scratch_out: Sequence[int]
    #: This rank's own input and output as matrices; None where it has none.
    given: Array | None
    taken: Array | None

    def source(self, peer: int, start: int, stop: int) -> Array:
        """The columns ``start`` to ``stop`` of a rank's input."""
        arena, offset, _, _ = self.where[peer]
        rows = len(self.where) if ROLES[self.call.operation].input_rows else 1
        scratch = self.scratch_in[peer]
        return self._columns(peer, arena, offset, rows, scratch, self.given, start, stop)

    def target(self, peer: int, start: int, stop: int) -> Array:
        """The same of a rank's output."""
        _, _, arena, offset = self.where[peer]
        rows = len(self.where) if ROLES[self.call.operation].output_rows else 1
        scratch = self.scratch_out[peer]
        return self._columns(peer, arena, offset, rows, scratch, self.taken, start, stop)

    def _columns(
        self,
        peer: int,
        arena: int,
        offset: int,
        rows: int,
        scratch: int,
        own: Array | None,
        start: int,
        stop: int,
    ) -> Array:
        count, dtype = self.call.columns, self.call.dtype
        if arena == STAGED:
            return matrix(scratch, rows, stop - start, dtype)
        if arena == OWN:
            assert own is not None  # only this rank looks there
            return own[:, start:stop]
        whole = matrix(self.address(peer, arena, offset), rows, count, dtype)
        return whole if stop - start == count else whole[:, start:stop]


def do_share(reach: Reach, start: int, stop: int) -> None:
    """Do this rank's part of a chunk, which is the columns ``start`` to ``stop``."""
    call, me = reach.call, reach.rank
    operation, root = call.operation, call.root
    everybody = range(len(reach.where))
    if operation in (Operation.ALL_REDUCE, Operation.REDUCE):
        width = stop - start
        part = slice(width * me // len(everybody), width * (me + 1) // len(everybody))
        sources = [reach.source(peer, start, stop)[0, part] for peer in everybody]
        takers = everybody if operation is Operation.ALL_REDUCE else (root,)
        targets = [reach.target(peer, start, stop)[0, part] for peer in takers]
        reduce_into(REDUCTIONS[call.reduction], sources, targets)
    elif operation is Operation.REDUCE_SCATTER:
        sources = [reach.source(peer, start, stop)[me] for peer in everybody]
        reduce_into(REDUCTIONS[call.reduction], sources, [reach.target(me, start, stop)[0]])
    elif operation is Operation.BROADCAST:
        if me != root:
            np.copyto(reach.target(me, start, stop), reach.source(root, start, stop))
    elif operation is Operation.GATHER:
        # In place the root's row is there already, unless all rows are collected in scratch.
        if not (call.in_place and me == root and reach.where[root].target != STAGED):
            np.copyto(reach.target(root, start, stop)[me], reach.source(me, start, stop)[0])
    elif operation is Operation.SCATTER:
        if not (call.in_place and me == root):
            np.copyto(reach.target(me, start, stop)[0], reach.source(root, start, stop)[me])
    else:
        target = reach.target(me, start, stop)
        row = 0 if operation is Operation.ALL_GATHER else me
        # Each rank begins with itself, so that not all read of the same one at once.
        for peer in (*everybody[me:], *everybody[:me]):
            if not (call.in_place and peer == me):
                np.copyto(target[peer], reach.source(peer, start, stop)[row])
