"""What a schedule of :mod:`.schedule` is made of, and what it depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ..group import Topology
from .call import Call
from .plan import Operation

__all__ = [
    "Act",
    "Buffer",
    "Copy",
    "Divide",
    "Follow",
    "Order",
    "Schedule",
    "Shape",
    "Sizes",
    "Span",
    "Step",
    "World",
]

#: "first" and "second" are scratch of a lane; "extra" is memory for this one call.
Buffer: TypeAlias = Literal["input", "output", "first", "second", "extra"]
#: How rows are sorted: see :meth:`World.order`.
Order: TypeAlias = Literal["to_rails", "to_nodes", "from_rails", "from_nodes"]


class Span(NamedTuple):
    """Elements of a buffer."""

    buffer: Buffer
    start: int
    length: int


class Step(NamedTuple):
    """A collective of the ranks of the node, or of the rail."""

    who: Literal["node", "rail"]
    #: Whether it goes to the side stream, beside what the node does.
    side: bool
    operation: Operation
    reduction: int
    root: int
    columns: int
    source: Span | None
    target: Span | None
    in_place: bool = False


class Copy(NamedTuple):
    """Rows of a rank's own memory, sorted anew."""

    order: Order
    source: Buffer
    target: Buffer
    #: Elements of a row.
    columns: int


class Divide(NamedTuple):
    """A division of each element, in place."""

    side: bool
    span: Span
    by: int


class Follow(NamedTuple):
    """One stream waits for the other: the side stream for the user's, or the reverse."""

    side: bool


Act: TypeAlias = Step | Copy | Divide | Follow


@dataclass(frozen=True, slots=True)
class Sizes:
    """Where algorithms change over, in bytes.

    Estimates by the model of ``docs/scaling.md``: nothing was measured between nodes yet.
    """

    #: Below it ``all_reduce`` and ``broadcast`` go by the leaders.
    leaders: int = 16 << 10
    #: What a rank has of a chunk.
    piece: int = 16 << 20
    #: Of each of the two scratch buffers, for all rows of a call.
    scratch: int = 4 << 20


@dataclass(frozen=True, slots=True)
class World:
    """Where a rank is among nodes of equal size."""

    nodes: int
    #: Ranks of a node.
    local_size: int
    #: Which node this rank is on, and its place there.
    node: int
    local: int
    #: By node: its ranks, ascending.
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, topology: Topology) -> World:
        """That of a rank whose nodes have as many ranks each."""
        nodes = topology.nodes
        return cls(len(nodes), topology.local_size, topology.node, topology.local_rank, nodes)

    @property
    def rail(self) -> tuple[int, ...]:
        """The ranks with the place of this one in their nodes, in the order of nodes."""
        return tuple(ranks[self.local] for ranks in self.ranks)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.local_size

    @property
    def is_blocked(self) -> bool:
        """Whether the ranks of each node follow each other: what belongs to a node is one piece."""
        size = self.local_size
        return all(
            self.ranks[node] == tuple(range(node * size, (node + 1) * size))
            for node in range(self.nodes)
        )

    def order(self, name: Order) -> tuple[tuple[int, int], ...]:
        """Pairs of a source row and a target row, of ``size`` rows.

        Rows of "input" and "output" are in the order of ranks. In scratch they are sorted by local
        rank and then by node, or by node and then by local rank.
        """
        pairs: list[tuple[int, int]] = []
        for node in range(self.nodes):
            for local in range(self.local_size):
                rank = self.ranks[node][local]
                by_local = local * self.nodes + node
                by_node = node * self.local_size + local
                pairs.append(
                    {
                        "to_rails": (rank, by_local),
                        "to_nodes": (by_local, by_node),
                        "from_rails": (by_local, rank),
                        "from_nodes": (by_node, rank),
                    }[name]
                )
        return tuple(pairs)


@dataclass(frozen=True, slots=True)
class Shape:
    """A collective but for its arrays."""

    operation: Operation
    columns: int
    #: Bytes of an element.
    itemsize: int
    reduction: int
    #: Whether an average is a division at the end, as for integers, and not on the way.
    divides_last: bool
    root: int
    in_place: bool

    @classmethod
    def of(cls, call: Call) -> Shape:
        """That of a call."""
        return cls(
            call.operation, call.columns, call.dtype.itemsize, call.reduction,
            call.dtype.kind in "iu", call.root, call.in_place,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one rank does."""

    acts: tuple[Act, ...]
    #: Bytes that are needed of each of the two scratch buffers, and of memory for this call alone.
    scratch: int = 0
    extra: int = 0

    @property
    def uses_side(self) -> bool:
        """Whether there is work for the side stream."""
        return any(isinstance(act, Follow) for act in self.acts)
