"""What a pool looks like: values for programs, a JSON-able snapshot, and a map for a terminal."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..driver import Driver
from .blocks import Block, Run, Segment
from .owners import find_arrays

if TYPE_CHECKING:
    from .device import DevicePool

__all__ = [
    "VERSION",
    "PoolStatistics",
    "SegmentInfo",
    "render",
    "segment_info",
    "show_bytes",
    "statistics",
    "take_snapshot",
]

#: Of the layout of snapshots and recordings; another one where a reader must know.
VERSION = 1


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One physical allocation of a pool. Sizes, offsets and addresses in bytes."""

    #: From the base of the device's arena; the name of the segment for every rank.
    offset: int
    size: int
    #: Tells this segment from others that had the same offset before.
    generation: int
    #: What it can be exported as, ``"posix_fd"`` always among them.
    handle_types: tuple[str, ...]
    #: Whether a communicator has it registered.
    registered: bool
    #: Whether a communicator has it bound to a multicast object.
    multicast: bool
    address: int
    device: int


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Figures of one device; all bytes are of whole blocks.

    "Peak" is since the pool was made. The peaks of what is used are taken when a request needs more
    than the fast path, which every new maximum does but one that is made of nothing but blocks that
    were in use before, at other times; and when figures are asked for.
    """

    used_bytes: int
    free_bytes: int
    #: Held from the driver, used and free.
    total_bytes: int
    peak_used_bytes: int
    peak_total_bytes: int
    #: Bytes of all blocks ever handed out.
    allocated_bytes: int
    used_blocks: int
    #: Runs of free bytes.
    free_blocks: int
    peak_used_blocks: int
    #: Blocks ever handed out.
    allocated_blocks: int
    segments: int
    #: Segments ever asked of the driver.
    growths: int
    largest_hole: int
    #: 0 when all free bytes are in one hole, towards 1 the more they are scattered.
    fragmentation: float
    #: Bytes of segments that belong to CUDA graphs.
    leased_bytes: int
    #: Bytes of dropped arrays that a recorded stream still uses; part of the used ones.
    deferred_bytes: int


def segment_info(segment: Segment) -> SegmentInfo:
    """The public value of a segment."""
    return SegmentInfo(
        offset=segment.offset,
        size=segment.size,
        generation=segment.generation,
        handle_types=segment.handle.handle_types,
        registered=segment.registered,
        multicast=segment.multicast,
        address=segment.address,
        device=segment.handle.device,
    )


def statistics(pool: DevicePool, runs: list[Run] | None = None) -> PoolStatistics:
    """The figures of one device pool, from one look at its blocks: that of ``runs``, or one now."""
    pool.used_bytes()  # brings the peaks up to date
    runs = pool.runs() if runs is None else runs
    segments = pool.segments()
    used = [size for _, _, size, block in runs if block is not None]
    free = [size for _, _, size, block in runs if block is None]
    largest = max(free, default=0)
    blocks, allocated = pool.handed_out()
    return PoolStatistics(
        used_bytes=sum(used),
        free_bytes=sum(free),
        total_bytes=sum(used) + sum(free),
        peak_used_bytes=pool.accounts.peak_used_bytes,
        peak_total_bytes=pool.accounts.peak_total_bytes,
        allocated_bytes=allocated,
        used_blocks=len(used),
        free_blocks=len(free),
        peak_used_blocks=pool.accounts.peak_used_blocks,
        allocated_blocks=blocks,
        segments=len(segments),
        growths=pool.accounts.growths,
        largest_hole=largest,
        fragmentation=1 - largest / sum(free) if free else 0.0,
        leased_bytes=pool.captures.leased(segments),
        deferred_bytes=pool.deferred.waiting_bytes(),
    )


def take_snapshot(
    driver: Driver, pools: list[DevicePool], *, arrays: bool = False
) -> dict[str, Any]:
    """Segments and blocks of all devices as plain dicts, lists, numbers and strings.

    Ages are in seconds: of a segment since the driver made it, of a block since it was taken from
    free memory, which the array in it cannot be older than. A segment belongs to a ``stream`` (the
    driver's key, 0 for the default stream) or, while its graph lives, to a ``capture`` (its id);
    the other is None. With ``arrays``, a used block has the list of those in it.
    """
    looks = [(pool, pool.runs()) for pool in pools]
    found: dict[Block, list[dict[str, Any]]] | None = None
    if arrays:
        used = {block for _, runs in looks for _, _, _, block in runs if block is not None}
        found = find_arrays(used)
    return {
        "version": VERSION,
        "kind": "snapshot",
        "time": time.time(),
        "driver": driver.name,
        "devices": [_device(pool, runs, found) for pool, runs in looks],
    }


def _device(
    pool: DevicePool, runs: list[Run], arrays: dict[Block, list[dict[str, Any]]] | None
) -> dict[str, Any]:
    now = time.monotonic()
    segments: dict[int, dict[str, Any]] = {}
    for segment, offset, size, block in runs:
        entry = segments.get(segment.offset)
        if entry is None:
            entry = segments[segment.offset] = {
                **asdict(segment_info(segment)),
                "handle_types": list(segment.handle.handle_types),
                "stream": segment.home.key if segment.home.capture is None else None,
                "capture": segment.home.capture,
                "age": now - segment.created,
                "blocks": [],
            }
        state = "free" if block is None else "used"
        age = None if block is None else now - block.since
        about = {"offset": offset, "size": size, "state": state, "age": age}
        if arrays is not None and block is not None:
            about["arrays"] = arrays.get(block, [])
        entry["blocks"].append(about)
    return {
        "device": pool.device,
        "base": pool.arena.base,
        "arena_size": pool.arena.size,
        "granule": pool.arena.granule,
        "limit": pool.limit,
        "segments": list(segments.values()),
        "statistics": asdict(statistics(pool, runs)),
    }


def render(snapshot: dict[str, Any], width: int = 64) -> str:
    """A snapshot as text: a line for each segment, ``#`` used, ``+`` partly used, ``.`` free."""
    lines = []
    for device in snapshot["devices"]:
        figures = device["statistics"]
        lines.append(
            f"device {device['device']} ({snapshot['driver']} driver): "
            f"{show_bytes(figures['used_bytes'])} used of {show_bytes(figures['total_bytes'])} in "
            f"{figures['segments']} segments, fragmentation {figures['fragmentation']:.0%}"
        )
        lines += [_segment_line(segment, width) for segment in device["segments"]]
    return "\n".join(lines)


def _segment_line(segment: dict[str, Any], width: int) -> str:
    used = [0.0] * width
    cell = segment["size"] / width
    for block in segment["blocks"]:
        if block["state"] != "used":
            continue
        start = block["offset"] - segment["offset"]
        end = start + block["size"]
        for at in range(int(start / cell), min(width, int((end - 1) / cell) + 1)):
            used[at] += min(end, (at + 1) * cell) - max(start, at * cell)
    marks = "".join("." if u == 0 else "#" if u > cell * 0.999 else "+" for u in used)
    captured = segment["capture"] is not None
    owner = f"capture {segment['capture']}" if captured else f"stream {segment['stream']}"
    states = [state for state in ("registered", "multicast") if segment.get(state)]
    about = ", ".join([owner, *states])
    return f"  {segment['offset']:#012x} {show_bytes(segment['size']):>9} |{marks}| {about}"


def show_bytes(count: float) -> str:
    """A number of bytes as people read it: ``1.5 MiB``."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if size == int(size) else f"{size:.1f} {units[0]}"
