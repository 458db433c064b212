"""Why an array is zero-copy, or is not: each rule with what was found and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cupy

from ..errors import InvalidTypeError
from ..group.naming import name_ranks
from ..memory.blocks import Segment
from .targets import refusal

if TYPE_CHECKING:
    from .published import Location
    from .registry import Registry

__all__ = ["Rule", "judge"]

_ALLOCATE = (
    "call cupy_zc.install() before the array is made, or make it with the communicator's empty()"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, as it is for one array on this rank."""

    name: str
    #: None where this rank cannot know, as it depends on arrays of peers not named yet.
    passed: bool | None
    #: What was found.
    detail: str
    #: What to do; empty where nothing needs to be done.
    remedy: str


def judge(registry: Registry, array: Any) -> tuple[Rule, ...]:
    """All rules for an array, in the order in which they matter. Local.

    Args:
        registry: Of the communicator that would transfer the array.
        array: A ``cupy.ndarray``.

    Returns:
        The rules about memory, layout, registration and multicast; for an array without bytes one
        rule that says so.

    Raises:
        InvalidTypeError: it is not a ``cupy.ndarray``.
    """
    if not isinstance(array, cupy.ndarray):
        raise InvalidTypeError("Communicator.explain", "array", array, "a cupy.ndarray")
    if not array.nbytes:
        return (Rule("bytes", True, "the array has none, so nothing is transferred", ""),)
    location = registry.locate(array)
    rules = [
        *_memory(registry, array),
        _contiguous(array),
        _registered(location),
        *_everywhere(registry, location),
        _multicast(registry, location),
    ]
    return tuple(rules)


def _rule(name: str, passed: bool | None, detail: str, remedy: str) -> Rule:
    return Rule(name, passed, detail, "" if passed else remedy)


def _memory(registry: Registry, array: Any) -> Iterator[Rule]:
    memory = array.data.mem
    segment = getattr(memory, "segment", None)
    if isinstance(segment, Segment):
        granularity = registry.driver.granularity(registry.device, segment.size)
        ours = segment.home.pool.driver is registry.driver
        detail = f"it is in the segment at offset {segment.offset:#x}"
        yield _rule(
            "memory of a pool", ours, detail if ours else refusal(registry, memory), _ALLOCATE
        )
        kinds = segment.handle.handle_types
        yield _rule(
            "can be shared",
            "posix_fd" in kinds,
            f"its segment can be exported as {', '.join(kinds) or 'nothing'}",
            _ALLOCATE,
        )
        granule, alignment = granularity.size, granularity.alignment
        yield _rule(
            "size of the segment",
            segment.size % granule == 0,
            f"{segment.size:,} bytes; the granule is {granule:,}",
            _ALLOCATE,
        )
        yield _rule(
            "address of the segment",
            segment.address % alignment == 0,
            f"{segment.address:#x}; it must be a multiple of {alignment:#x}",
            _ALLOCATE,
        )
    else:
        detail = f"its memory is a {type(memory).__name__}"
        yield _rule("memory of a pool", False, detail, _ALLOCATE)
        for name in ("can be shared", "size of the segment", "address of the segment"):
            yield _rule(name, False, "only memory of a pool has a segment", _ALLOCATE)
    here, rank = array.data.device_id, registry.channel.rank
    yield _rule(
        "device",
        here == registry.device,
        f"the array is on device {here}; rank {rank} has device {registry.device}",
        f"make the array on device {registry.device}",
    )


def _contiguous(array: Any) -> Rule:
    flags = array.flags
    order = "C" if flags.c_contiguous else "F" if flags.f_contiguous else ""
    detail = f"in {order} order" if order else f"shape {array.shape}, strides {array.strides}"
    return _rule("contiguous", bool(order), detail, "pass cupy.ascontiguousarray(...) of it")


def _registered(location: Location) -> Rule:
    detail = location.reason or f"in arena {location.arena} at offset {location.offset:#x}"
    remedy = (
        "call register(array) on every rank, or go on: what collectives use is registered at "
        "agreed call numbers"
        if location.segment is not None
        else _ALLOCATE
    )
    return _rule("registered on this rank", location.registered, detail, remedy)


def _everywhere(registry: Registry, location: Location) -> Iterator[Rule]:
    every, same = "registered on every rank", "same offset on every rank"
    peers = [rank for rank in registry.channel.ranks if rank != registry.channel.rank]
    place = (location.arena, location.offset)
    if location.registered and location.arena == 0:  # made by all ranks, at one offset
        places = {rank: place if registry.windows.holds(rank, *place) else None for rank in peers}
    else:
        known = registry.counterparts(*place) if location.registered else None
        if known is None:
            detail = "not known: the array was not registered by register(array)"
            remedy = "register the arrays of all ranks in one call"
            yield _rule(every, None, detail, remedy)
            yield _rule(same, None, detail, remedy)
            return
        places = {rank: known[rank] for rank in peers}
    missing = [
        rank for rank, at in places.items() if at is None or not registry.windows.holds(rank, *at)
    ]
    yield _rule(
        every,
        not missing,
        f"not on {name_ranks(missing)}" if missing else "as last agreed",
        "call register(array) on every rank, with an array of a pool",
    )
    others = [rank for rank, at in places.items() if at != place]
    yield _rule(
        same,
        not others,
        f"another place on {name_ranks(others)}" if others else f"at offset {location.offset:#x}",
        "make it with the communicator's empty(); only multicast needs this",
    )


def _multicast(registry: Registry, location: Location) -> Rule:
    reason = location.reason or registry.multicast.refusal(location.arena, location.offset)
    detail = reason or "it is in a multicast window"
    remedy = "nothing: the data of peers is read and written directly instead"
    return _rule("multicast", not reason, detail, remedy)
