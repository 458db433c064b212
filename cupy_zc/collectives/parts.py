"""The collectives that a schedule makes of a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import cupy

from .acts import Schedule, Span, Step
from .call import Call

__all__ = ["steps_of", "view_of"]


def steps_of(plan: Schedule, call: Call, arrays: Mapping[str, Any]) -> Iterator[tuple[Step, Call]]:
    """The steps of a schedule, each with the call that it is for its engine.

    Args:
        plan: The schedule.
        call: What it carries out.
        arrays: By name of a buffer.
    """
    for act in plan.acts:
        if isinstance(act, Step):
            given = None if act.source is None else view_of(arrays, act.source, call)
            taken = None if act.target is None else view_of(arrays, act.target, call)
            yield act, call._replace(
                operation=act.operation, reduction=act.reduction, root=act.root,
                columns=act.columns, fortran=0, input=given, output=taken,
                in_place=act.in_place, clash="",
            )  # fmt: skip


def view_of(arrays: Mapping[str, Any], span: Span, call: Call) -> cupy.ndarray:
    """Elements of a buffer as an array of the type of a call."""
    at = arrays[span.buffer].data + span.start * call.dtype.itemsize
    return cupy.ndarray((span.length,), call.dtype, at)
