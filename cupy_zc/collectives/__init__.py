"""Collectives on the arrays of all ranks: checks, a plan, and the engine that carries it out."""

from __future__ import annotations

from .call import Transfer
from .communicator import Communicator
from .opening import init_process_group

__all__ = ["Communicator", "Transfer", "init_process_group"]
