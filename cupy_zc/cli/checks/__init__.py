"""What ``cupy-zc doctor`` looks at, a topic a module. Each gives findings, and changes nothing."""

from __future__ import annotations

from .devices import Devices, look_at_devices
from .finding import Finding, Machine, Status
from .machine import look_at_machine
from .network import look_at_network
from .software import look_at_software

__all__ = [
    "Devices",
    "Finding",
    "Machine",
    "Status",
    "look_at_devices",
    "look_at_machine",
    "look_at_network",
    "look_at_software",
]
