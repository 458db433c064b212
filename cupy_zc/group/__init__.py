"""Ranks that find each other, talk on a node with descriptors, and agree.

::

    bootstrap = from_mpi() | from_tcp(size, rank) | in_process(n)[rank]
    topology = discover(bootstrap)                  # which ranks share this node
    channel = Channel.open(bootstrap, topology)     # bytes and descriptors between those
    with Transaction(channel) as transaction: ...   # steps that all take, or none
"""

from __future__ import annotations

from .across import Across
from .agreement import Group, Transaction, agree_equal, vote
from .bootstrap import Bootstrap
from .bootstrap_mpi import from_mpi
from .bootstrap_tcp import from_tcp
from .bootstrap_threads import in_process
from .channel import Channel
from .identity import NodeIdentity, Topology, arrange, discover
from .messages import Message, closing

__all__ = [
    "Across",
    "Bootstrap",
    "Channel",
    "Group",
    "Message",
    "NodeIdentity",
    "Topology",
    "Transaction",
    "agree_equal",
    "arrange",
    "closing",
    "discover",
    "from_mpi",
    "from_tcp",
    "in_process",
    "vote",
]
