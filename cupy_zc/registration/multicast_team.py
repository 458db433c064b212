"""Whether the ranks of a communicator may try multicast, and as what team. Nothing is made here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..config import multicast_refusal, settings
from ..group.naming import name_ranks

if TYPE_CHECKING:
    from .registry import Registry

__all__ = ["MulticastStatus", "Team", "form_team", "switched_off"]


@dataclass(frozen=True, slots=True)
class MulticastStatus:
    """Whether a communicator uses multicast, and why not.

    Equal on all ranks, but for the words: a rank adds what it could not undo.
    """

    #: It is "off" where nobody tried, by a switch or because it would not help; "unavailable" where
    #: it cannot be had, or failed its probe; "probing" while it is being tried; or "on".
    state: Literal["off", "unavailable", "probing", "on"]
    #: The switch, or the words of the driver; empty where it is on.
    reason: str
    #: Arenas in which nothing more is bound since a failure, and the words of that.
    fallen: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Team:
    """What all ranks have agreed on. Sizes in bytes."""

    devices: int
    #: What offsets and sizes of bindings are multiples of.
    granule: int
    #: Most that an object covers.
    piece: int
    #: Seconds in which a fabric that is not ready is tried again.
    patience: float


def switched_off(ranks: Sequence[int], switches: Sequence[str | None]) -> str:
    """By what multicast is switched off, and on which ranks; empty where it is on none."""
    off: dict[str, list[int]] = {}
    for rank, switch in zip(ranks, switches, strict=True):
        if switch:
            off.setdefault(switch, []).append(rank)
    if not off:
        return ""
    which = ", ".join(f"{switch} on {name_ranks(there)}" for switch, there in off.items())
    return f"{which} switches it off; start every rank without that to allow it"


def form_team(registry: Registry, *, able: bool) -> tuple[MulticastStatus, Team | None]:
    """Ask all ranks whether multicast may be tried. Collective; the answer is the same on all.

    Args:
        registry: Of the communicator.
        able: Whether the engine of this rank can use it.

    Returns:
        The team, with the status "probing"; or None, and why not.

    Raises:
        PeerTimeoutError: a rank did not come.
    """
    driver, device, channel = registry.driver, registry.device, registry.channel
    info = driver.device_info(device)
    granularity = driver.granularity(device, settings().segment_size)
    least, best = granularity.multicast_minimum, granularity.multicast_recommended
    room = max(driver.memory_info(device).total, best)
    own = [
        multicast_refusal(), info.multicast and least > 0, able, info.uuid.hex(), least, room,
        settings().setup_timeout,
    ]  # fmt: skip
    said = channel.all_gather(json.dumps(own).encode(), tag="multicast of the ranks")
    switches, has, uses, uuids, granules, rooms, patience = zip(*map(json.loads, said), strict=True)
    off = switched_off(channel.ranks, switches)
    if off:
        return MulticastStatus("off", off), None
    for right, reason in (
        (has, "no multicast, as the devices say"),
        (uses, "an engine that does not use multicast"),
        (
            [uuids.count(uuid) == 1 for uuid in uuids],
            "a device in common, which can be part of a multicast object only once",
        ),
    ):
        without = [rank for rank, fine in zip(channel.ranks, right, strict=True) if not fine]
        if without:
            verb = "has" if len(without) == 1 else "have"
            return MulticastStatus("unavailable", f"{name_ranks(without)} {verb} {reason}"), None
    piece = 1 << (max(rooms) - 1).bit_length()
    team = Team(channel.size, max(granules), piece, min(patience))
    return MulticastStatus("probing", ""), team
