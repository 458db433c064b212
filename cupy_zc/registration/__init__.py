"""Memory that peers can reach: mirrored arenas, registrations, and the symmetric heap.

::

    registry = Registry(driver, device, channel)    # one for each communicator
    heap = SymmetricHeap(registry)                  # its arena 0: the same offsets on every rank
    with registry.register(array):                  # collective
        arena, offset, registered, reason, segment = registry.locate(array)
        address = registry.address(peer, arena_there, offset_there)
"""

from __future__ import annotations

from .explain import Rule
from .graph import Lease, LeaseInfo, Leases
from .multicast_probe import HostProbe, Probe, Target
from .multicast_team import MulticastStatus
from .published import Location, Registration
from .registry import Choice, Registry, is_agreed
from .symmetric import SymmetricHeap, SymmetricMemory
from .targets import pin, refusal

__all__ = [
    "Choice",
    "HostProbe",
    "Lease",
    "LeaseInfo",
    "Leases",
    "Location",
    "MulticastStatus",
    "Probe",
    "Registration",
    "Registry",
    "Rule",
    "SymmetricHeap",
    "SymmetricMemory",
    "Target",
    "is_agreed",
    "pin",
    "refusal",
]
