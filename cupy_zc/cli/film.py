"""A pool over time, read from a file: what a snapshot and a recording have in common.

A *film* has frames, each with figures for each device, and segments and blocks with the times
``from`` and ``to`` between which they were there. A snapshot is a film of one frame.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..memory.snapshot import VERSION
from .output import CannotError

__all__ = ["film_of", "load"]


def load(path: Path) -> dict[str, Any]:
    """Read what ``pool.snapshot()`` or ``Recording.save()`` gave, saved as JSON.

    Raises:
        CannotError: it is no such file, or one of another version.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no text at all
        raise CannotError(f"{path} is no JSON file: {error}") from error
    if not isinstance(data, dict) or data.get("kind") not in ("snapshot", "recording"):
        raise CannotError(
            f"{path} is neither a snapshot nor a recording of a pool; save one with "
            "pool.record(path=...) or json.dump(pool.snapshot(arrays=True), file)"
        )
    if data.get("version") != VERSION:
        raise CannotError(
            f"{path} has version {data.get('version')!r}, and this cupy-zc reads {VERSION}; use "
            "the cupy-zc that wrote it"
        )
    return data


def film_of(data: dict[str, Any], title: str) -> dict[str, Any]:
    """The film of a file that was loaded.

    Raises:
        CannotError: something that must be in the file is not.
    """
    try:
        film = _snapshot(data) if data["kind"] == "snapshot" else _recording(data)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CannotError(f"{title} is damaged or incomplete ({reason})") from error
    return {"title": title, "kind": data["kind"], "driver": data["driver"], **film}


def _devices(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    names = ("device", "base", "arena_size", "granule", "limit")
    return [{name: device[name] for name in names} for device in snapshot["devices"]]


def _snapshot(data: dict[str, Any]) -> dict[str, Any]:
    segments, blocks, figures = [], [], []
    for device in data["devices"]:
        figures.append({"device": device["device"], **device["statistics"]})
        for segment in device["segments"]:
            names = ("device", "offset", "size", "generation", "capture", "stream", "registered")
            about = {name: segment[name] for name in names}
            about["multicast"] = segment.get("multicast", False)  # not in older files
            segments.append({**about, "from": -segment["age"], "to": None})
            blocks += [
                {
                    "device": device["device"],
                    "offset": block["offset"],
                    "size": block["size"],
                    "from": -block["age"],
                    "to": None,
                    "site": None,
                    "arrays": block.get("arrays", []),
                }
                for block in segment["blocks"]
                if block["state"] == "used"
            ]
    return {
        "time": data["time"],
        "seconds": 0.0,
        "forgotten": 0,
        "frames": [{"at": 0.0, "label": None, "devices": figures}],
        "devices": _devices(data),
        "segments": segments,
        "blocks": blocks,
        "sites": [],
    }


def _recording(data: dict[str, Any]) -> dict[str, Any]:
    last = data["last"]
    arrays = {
        (device["device"], block["offset"], block["size"]): block.get("arrays", [])
        for device in last["devices"]
        for segment in device["segments"]
        for block in segment["blocks"]
    }
    blocks = []
    for block in data["blocks"]:
        place = (block["device"], block["offset"], block["size"])
        there = block["to"] is None
        blocks.append({**block, "arrays": arrays.get(place, []) if there else []})
    if not data["frames"]:
        raise IndexError("no frame")
    return {
        "time": data["time"],
        "seconds": data["seconds"],
        "forgotten": data["forgotten_blocks"],
        "frames": data["frames"],
        "devices": _devices(last),
        "segments": data["segments"],
        "blocks": blocks,
        "sites": data["sites"],
    }
