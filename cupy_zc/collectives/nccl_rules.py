"""What decides how NCCL carries an array, for ``Communicator.explain``."""

from __future__ import annotations

import os
from typing import Any

from ..registration import Rule
from .nccl_registration import NcclRegistrations

__all__ = ["nccl_rules"]

_LOG = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=REG lets NCCL say what it does with it"


def nccl_rules(registrations: NcclRegistrations, array: Any, *, sharp: bool) -> tuple[Rule, ...]:
    """Rules for an array. Local.

    Args:
        registrations: Of the communicator.
        array: A ``cupy.ndarray`` with bytes.
        sharp: Whether the communicator has one rank a node.
    """
    mode, why = registrations.mode(array, captured=False)
    captured, why_captured = registrations.mode(array, captured=True)
    return (
        Rule(
            "registered with NCCL", mode != "none", why or f"as {mode!r}; {_LOG}",
            "" if mode != "none" else "call register(array) on every rank",
        ),
        Rule(
            "registered with NCCL when captured", captured != "none",
            why_captured or f"as {captured!r}, until the graph is gone; {_LOG}",
            "" if captured != "none" else "take the array from a pool, unset NCCL_GRAPH_REGISTER",
        ),
        _sharp(sharp=sharp),
    )  # fmt: skip


def _sharp(*, sharp: bool) -> Rule:
    name, asked = "IB SHARP", os.environ.get("NCCL_COLLNET_ENABLE")
    if not sharp:
        return Rule(
            name, False, "NCCL has several ranks of a node in this communicator",
            "backend='hierarchical', or 'auto' on several nodes, has rails of one rank a node",
        )  # fmt: skip
    if asked == "0":
        return Rule(name, False, "NCCL_COLLNET_ENABLE=0", "unset it")
    return Rule(
        name, None, "asked for; NCCL takes it where the network has it and its plugin is there",
        "NCCL_DEBUG=INFO lets NCCL say whether it has a CollNet, and why not",
    )  # fmt: skip
