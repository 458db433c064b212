"""Where the arrays of a call on the device are, for its peers and for its kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..registration import Registry
from .call import Call
from .device_args import STAGED, location
from .device_multimem import nothing_is_bound
from .device_plan import Launch
from .engine import Place
from .plan import Operation

__all__ = ["Places"]


class Places:
    """Finds arrays of this rank.

    Args:
        registry: Knows what is registered.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        #: Whether a byte, by arena and offset, is bound to the multicast object on all ranks.
        self.bound: Callable[[int, int], bool] = nothing_is_bound

    def of(self, call: Call, plan: Launch) -> tuple[Place, ...]:
        """Where the arrays of a call are, as far as peers touch them."""
        places: list[Place] = []
        if call.clash:
            places.append(Place(-1, 0, call.clash, None))
        elif plan.input_remote:
            places.append(self._place(call.input, "the input"))
        output = call.written
        if plan.output_remote and output is not None:
            if call.operation is Operation.ALL_TO_ALL and call.in_place:
                places.append(Place(-1, 0, "all_to_all in place stages the output", None))
            else:
                places.append(self._place(output, "the output", any_memory=plan.output_any))
        return tuple(places)

    def _place(self, array: Any, name: str, *, any_memory: bool = False) -> Place:
        arena, offset, registered, reason, segment = self._registry.locate(array)
        if registered:
            return Place(arena, offset, "", None)
        return Place(-1, 0, "" if any_memory else f"{name} is staged: {reason}", segment)

    def location(self, array: Any) -> int:
        """Where peers find an array, for a kernel; None is none."""
        if array is None:
            return STAGED
        arena, offset, registered, _, _ = self._registry.locate(array)
        if not registered:
            return STAGED
        return location(arena, offset, bound=self.bound(arena, offset))
