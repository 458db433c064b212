"""Which ranks share a node, told by what the kernel says and never by a hostname.

Two machines may have one hostname (cloned images, containers), and one machine several. The boot id
is random for each boot of a kernel; the namespaces tell containers apart that share a kernel but
not the things we need: sockets (net), shared memory (ipc), process identity (pid).
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import settings
from ..errors import MismatchError
from .bootstrap import Bootstrap
from .naming import sides

__all__ = ["NodeIdentity", "Topology", "arrange", "discover"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = ("ipc", "net", "pid")
_DIGEST = 16
#: Machine, and ranks of a pretend node: every rank gets this from each machine.
_FORM = struct.Struct(f"!{_DIGEST}sQ")


@functools.cache
def _boot_id(path: Path = _BOOT_ID) -> str:
    """The boot id, or where it cannot be read a random one: such a process is a node by itself."""
    try:
        return path.read_text().strip()
    except OSError:
        return f"unknown-{uuid.uuid4()}"


def _namespace(name: str) -> int:
    """Inode number of one of this process's namespaces, the same in it; 0 where not readable."""
    try:
        return os.stat(f"/proc/self/ns/{name}").st_ino  # noqa: PTH116 - a magic link, not a path
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """What a process knows of its machine. Ranks with equal ones can share memory."""

    #: Digest of the boot id, and of the ipc, net and pid namespace.
    machine: bytes
    #: ``settings().node_size``: ranks a pretend node, 0 for real nodes.
    node_size: int = 0

    @classmethod
    def here(cls) -> NodeIdentity:
        """The identity of this process."""
        said = " ".join([_boot_id(), *(str(_namespace(name)) for name in _NAMESPACES)])
        machine = hashlib.blake2b(said.encode(), digest_size=_DIGEST).digest()
        return cls(machine, settings().node_size)

    def to_bytes(self) -> bytes:
        """For the way through a bootstrap."""
        return _FORM.pack(self.machine, self.node_size)

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeIdentity:
        """The inverse of :meth:`to_bytes`."""
        return cls(*_FORM.unpack(data))


@dataclass(frozen=True, slots=True)
class Topology:
    """Which rank is on which node. Nodes are numbered in the order of their lowest ranks."""

    rank: int
    #: For each rank, the number of its node.
    node_of: tuple[int, ...]
    #: For each rank, the number of its machine. Empty: nodes are machines. They are not where tests
    #: pretend that a machine is several nodes.
    machine_of: tuple[int, ...] = ()

    @property
    def machine_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's machine, itself among them, ascending."""
        machine_of = self.machine_of or self.node_of
        return tuple(rank for rank in range(self.size) if machine_of[rank] == machine_of[self.rank])

    @property
    def is_even(self) -> bool:
        """Whether all nodes have as many ranks."""
        return len({len(node) for node in self.nodes}) == 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.node_of)

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self.node_of[self.rank]

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, ascending."""
        found: list[list[int]] = [[] for _ in range(max(self.node_of) + 1)]
        for rank, node in enumerate(self.node_of):
            found[node].append(rank)
        return tuple(map(tuple, found))

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's node, itself among them, ascending."""
        return tuple(rank for rank in range(self.size) if self.node_of[rank] == self.node)

    @property
    def local_rank(self) -> int:
        """Place of this rank among :attr:`node_ranks`."""
        return self.node_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks of this rank's node."""
        return len(self.node_ranks)


def arrange(identities: Sequence[NodeIdentity], rank: int) -> Topology:
    """The topology that follows from what all ranks said of themselves. Pure.

    Args:
        identities: One for each rank.
        rank: Whose view it is.

    Raises:
        MismatchError: ranks were given different ``CUPY_ZC_NODE_SIZE``.
    """
    if len({identity.node_size for identity in identities}) > 1:
        node_sizes = {peer: str(identity.node_size) for peer, identity in enumerate(identities)}
        raise MismatchError(f"CUPY_ZC_NODE_SIZE must be equal on all ranks: {sides(node_sizes)}")
    seen: dict[NodeIdentity, int] = {}
    numbers: dict[tuple[NodeIdentity, int], int] = {}
    node_of: list[int] = []
    machines: dict[NodeIdentity, int] = {}
    for identity in identities:
        place = seen[identity] = seen.get(identity, -1) + 1
        part = place // identity.node_size if identity.node_size else 0
        node_of.append(numbers.setdefault((identity, part), len(numbers)))
        machines.setdefault(identity, len(machines))
    machine_of = tuple(machines[identity] for identity in identities)
    return Topology(rank, tuple(node_of), machine_of)


def discover(bootstrap: Bootstrap, *, timeout: float | None = None) -> Topology:
    """Ask all ranks where they are. Collective.

    Args:
        bootstrap: The ranks.
        timeout: Seconds; None for ``settings().setup_timeout``.

    Raises:
        MismatchError: see :func:`arrange`; on all ranks.
    """
    said = bootstrap.all_gather(NodeIdentity.here().to_bytes(), tag="identity", timeout=timeout)
    known = {item: NodeIdentity.from_bytes(item) for item in set(said)}
    return arrange([known[item] for item in said], bootstrap.rank)
