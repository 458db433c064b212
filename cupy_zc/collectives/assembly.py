"""Puts the engine of a communicator together, and the groups of ranks that it works with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from ..driver.api import KernelDriver
from ..group import Across, Bootstrap, Topology
from .acts import World
from .call import Call
from .checks import Checker
from .engine import Engine
from .gate import Gate, gate_of
from .hierarchical import HierarchicalEngine
from .level import Level
from .local import local_work
from .nccl import RAIL_BLOCKS, NcclEngine
from .opening import WITHIN_NODE, Options
from .parents import Parents
from .tiers import HostTier, NcclTier, Tier

__all__ = ["Parts", "assemble"]

_Interrupted: TypeAlias = Callable[[Collection[int], int, Call], None]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a communicator is made of."""

    #: The ranks of this rank's node.
    node: Level
    engine: Engine
    #: Ranks of the other nodes; None where there are none.
    across: Across | None
    #: What has to learn that this rank makes no further calls, besides the node.
    part: Callable[[], None]
    #: Where ranks outside of the node are known to have gone; to be closed last.
    groups: tuple[Bootstrap, ...] = ()


def assemble(
    bootstrap: Bootstrap,
    topology: Topology,
    options: Options,
    checker: Checker,
    abandon: Callable[[], None],
    interrupted: _Interrupted,
    stack: ExitStack,
) -> Parts:
    """Make the engine that the options name. Collective.

    Args:
        bootstrap: All ranks; stays the caller's.
        topology: Where they are.
        options: What the user chose, and which engine that is.
        checker: The names of calls, for errors.
        abandon: Called when the ranks have lost each other, to let the peers know.
        interrupted: As for ``HostEngine``.
        stack: Closes what was made, if something fails before the communicator is there.

    Raises:
        AgreementError: a rank could not; on all of them.
    """
    if options.engine in WITHIN_NODE:
        node = Level(bootstrap, topology, options, checker, stack)
        engine = node.make_engine(options.engine, abandon, interrupted, stack)
        return Parts(node, engine, None, _nothing)
    several = _Several(bootstrap, topology, options, checker, abandon, stack)
    return several.nccl() if options.engine == "nccl" else several.hierarchical(interrupted)


def _nothing(*_: Any) -> None:
    """Nobody is to be told."""


class _Several:
    """Ranks that may be on several nodes."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        topology: Topology,
        options: Options,
        checker: Checker,
        abandon: Callable[[], None],
        stack: ExitStack,
    ) -> None:
        self.bootstrap, self.topology, self.options = bootstrap, topology, options
        self.checker, self.abandon, self.stack = checker, abandon, stack
        self.local = local_work(options.driver, options.device)
        self.stack.callback(self.local.close)

    def part_of(self, ranks: Sequence[int]) -> Bootstrap:
        """Some of the ranks."""
        part = self.bootstrap.part(ranks)
        self.stack.callback(part.close)
        return part

    def checker_of(self, group: Bootstrap, name: str) -> Checker:
        """Calls of some of the ranks, by a name of their own in errors."""
        options = self.options
        host = options.driver.name == "host"
        return Checker(group.rank, group.size, options.device, host, group=name)

    def level(self, group: Bootstrap, name: str) -> Level:
        """Ranks that reach each other's memory."""
        together = Topology(group.rank, (0,) * group.size)
        checker = self.checker_of(group, name)
        return Level(group, together, self.options, checker, self.stack)

    @property
    def node_name(self) -> str:
        """Of this rank's node."""
        return f"node {self.topology.node}"

    def across(self, group: Bootstrap, ranks: Sequence[int]) -> Across:
        """Ranks of other nodes, which learn how a step of this one went."""
        members = self.topology.node_ranks
        return Across(group, ranks, self.options.wait, self.node_name, members)

    def nccl(self) -> Parts:
        """All ranks, by NCCL; those of a node share what is registered, and the lanes of graphs."""
        topology, nodes = self.topology, self.topology.nodes
        if len(nodes) == 1:
            node = Level(self.bootstrap, topology, self.options, self.checker, self.stack)
            return Parts(node, self.connected(node, self.bootstrap, self.checker), None, _nothing)
        node_ranks = self.part_of(topology.node_ranks)
        groups: tuple[Bootstrap, ...] = (node_ranks,)
        node = self.level(node_ranks, f" of {self.node_name}")
        engine = self.connected(
            node, self.bootstrap, self.checker, sharp=len(nodes) == topology.size
        )
        if topology.is_even:
            ranks = World.of(topology).rail
            rail = self.part_of(ranks)
            groups = (node_ranks, rail)
            across = self.across(rail, ranks)
        else:
            across = self.across(self.bootstrap, range(topology.size))
        return Parts(node, engine, across, _nothing, groups)

    def connected(
        self,
        node: Level,
        group: Bootstrap,
        checker: Checker,
        *,
        sharp: bool = False,
        beside: bool = False,
        mail: bool = True,
        tried: bool = False,
        gate: Gate | None = None,
    ) -> NcclEngine:
        """Ranks that NCCL connects; see :class:`NcclEngine`."""
        members = self.topology.node_ranks

        def departed() -> list[int]:
            return [members[rank] for rank in node.departed()]

        engine = NcclEngine(
            group, node.registry, checker, departed, self.abandon, self.options.wait, self.local,
            sharp=sharp, beside=beside, mail=mail, tried=tried, gate=gate,
        )  # fmt: skip
        self.stack.callback(engine.close)
        return engine

    def hierarchical(self, interrupted: _Interrupted) -> Parts:
        """A node, the rail, and all ranks."""
        topology = self.topology
        world = World.of(topology)
        node_ranks = self.part_of(topology.node_ranks)
        rail_ranks = self.part_of(world.rail)
        node = self.level(node_ranks, f" of {self.node_name}")
        parents = Parents()

        def asked(awaited: Collection[int], number: int, _: Call) -> None:
            parent = parents.of(number)
            if parent is not None:
                interrupted(awaited, *parent)

        rail_name = f" of rail {topology.local_rank}"
        rail: Tier
        whole: Tier
        gate: Gate | None = None
        if self.options.driver.name == "host":
            engine = node.make_engine("host", self.abandon, asked, self.stack)
            rail = self.host_tier(rail_ranks, rail_name)
            whole = self.host_tier(self.bootstrap, "")
        else:
            engine = node.make_engine(
                "device", self.abandon, asked, self.stack, spare=2 * RAIL_BLOCKS
            )
            assert isinstance(self.options.driver, KernelDriver)
            on_device: Any = engine
            gate = gate_of(on_device, self.options.driver)
            connected = partial(self.connected, node, tried=True, gate=gate)
            checker = self.checker_of(rail_ranks, rail_name)
            rail = NcclTier(connected(rail_ranks, checker, sharp=True, beside=True, mail=False))
            whole = NcclTier(connected(self.bootstrap, self.checker))
        across = self.across(rail_ranks, world.rail)
        made = HierarchicalEngine(
            node, engine, rail, whole, across, world, self.local, parents, gate
        )
        self.stack.callback(made.close)
        return Parts(node, made, across, made.part, (node_ranks, rail_ranks))

    def host_tier(self, group: Bootstrap, name: str) -> Tier:
        """Ranks on pretend nodes of one machine."""
        level = self.level(group, name)
        engine = level.make_engine("host", self.abandon, _nothing, self.stack)
        return HostTier(level, engine, automatic=self.options.register == "auto")
