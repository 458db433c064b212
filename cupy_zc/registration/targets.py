"""What can be registered with a communicator, and why the rest cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cupy

from ..errors import InvalidTypeError, InvalidValueError
from ..memory import MemoryPool
from ..memory.blocks import Segment

if TYPE_CHECKING:
    from .registry import Registry

__all__ = ["pin", "pin_target", "refusal"]


def refusal(registry: Registry, memory: Any) -> str:
    """Why memory (``array.data.mem``, or a segment) can never be registered; empty where it can."""
    if registry.closed:
        return "the communicator is closed"
    segment = memory if isinstance(memory, Segment) else getattr(memory, "segment", None)
    if not isinstance(segment, Segment):
        return (
            f"its memory is a {type(memory).__name__}, not of a cupy_zc.MemoryPool; call "
            "cupy_zc.install() before the array is made, or make it with the communicator's empty()"
        )
    pool = segment.home.pool
    if pool.driver is not registry.driver:
        return (
            f"its memory comes from another driver ({pool.driver.name}) than the one of the "
            f"communicator ({registry.driver.name}); make pool and communicator with one driver"
        )
    if pool.device != registry.device:
        return (
            f"its memory is on device {pool.device}, and rank {registry.channel.rank} has device "
            f"{registry.device}"
        )
    return ""


def pin(segments: Sequence[Segment]) -> list[Segment]:
    """Pin segments of any pools; those that the pool still has."""
    return [kept for segment in segments for kept in segment.home.pool.supply.pin([segment])]


def pin_target(registry: Registry, target: Any, call: str) -> list[Segment]:
    """The segments of an array or a pool, pinned.

    Raises:
        InvalidTypeError, InvalidValueError: it cannot be registered.
    """
    if isinstance(target, MemoryPool):
        if target.driver is not registry.driver:
            allowed = "a pool made with the driver of the communicator"
            raise InvalidValueError(call, "target", target, allowed)
        return target.device_pool(registry.device).supply.pin()
    if not isinstance(target, cupy.ndarray):
        allowed = "a cupy.ndarray or a cupy_zc.MemoryPool"
        raise InvalidTypeError(call, "target", target, allowed)
    if not target.nbytes:
        return []
    reason = refusal(registry, target.data.mem)
    if reason:
        allowed = f"an array that can be registered, but {reason}"
        raise InvalidValueError(call, "target", target, allowed)
    return pin([target.data.mem.segment])
