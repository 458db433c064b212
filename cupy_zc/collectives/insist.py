"""Calls of a communicator that requires multicast, with ``strict``: what they must fulfil."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import NotZeroCopyError
from ..group.naming import sides
from ..registration import Registry
from .call import Call
from .plan import Operation
from .rounds import Where

__all__ = ["insist_on_multicast", "needs_multicast"]

#: Whether input and output are reached by multicast: those that are reduced over all ranks, and
#: those that are stored to all. The other operations move each byte to one rank.
_ROLES = {
    Operation.ALL_REDUCE: (True, True),
    Operation.REDUCE_SCATTER: (True, False),
    Operation.ALL_GATHER: (False, True),
    Operation.BROADCAST: (False, True),
}


def needs_multicast(registry: Registry, operation: Operation) -> tuple[bool, bool]:
    """Whether input and output of an operation must be in multicast windows."""
    return _ROLES.get(operation, (False, False)) if registry.multicast.insists else (False, False)


def insist_on_multicast(registry: Registry, call: Call, where: Sequence[Where]) -> None:
    """Refuse a call that multicast cannot carry. Every rank does, for they all know the same.

    Args:
        registry: Of the communicator.
        call: What is called.
        where: Where the arrays of each rank are.

    Raises:
        NotZeroCopyError: arrays are at different offsets, or not in a multicast window.
    """
    source, target = needs_multicast(registry, call.operation)
    sources, targets = [each[:2] for each in where], [each[2:] for each in where]
    if call.operation is Operation.BROADCAST:  # the root has an input only, and it is the same one
        targets[call.root] = sources[call.root]
    for name, needed, places in (("input", source, sources), ("output", target, targets)):
        if not needed or not call.columns:
            continue
        if len(set(places)) > 1:
            named = [f"arena {arena}, offset {offset:#x}" for arena, offset in places]
            reason = f"is at different places: {sides(dict(enumerate(named)))}"
        else:
            reason = registry.multicast.refusal(*places[0])
        if reason:
            raise NotZeroCopyError(
                f"{call}: multicast is required, and the {name} cannot be reached by it: {reason}; "
                "take the arrays from empty() of the communicator, in the same order on all ranks"
            )
