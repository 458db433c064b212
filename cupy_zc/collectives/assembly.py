"""Puts the engine of a communicator together, and the groups of ranks that it works with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..group import Across, Bootstrap, Topology
from .acts import World
from .call import Call
from .checks import Checker
from .engine import Engine
from .hierarchical import HierarchicalEngine
from .level import Level
from .local import local_work
from .opening import WITHIN_NODE, Options
from .parents import Parents
from .tiers import HostTier, Tier

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
    return _Several(bootstrap, topology, options, checker, abandon, stack).hierarchical(interrupted)


def _nothing(*_: Any) -> None:
    """Nobody is to be told."""


class _Several:
    """Ranks on several nodes."""

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

    def part_of(self, ranks: Sequence[int]) -> Bootstrap:
        """Some of the ranks."""
        part = self.bootstrap.part(ranks)
        self.stack.callback(part.close)
        return part

    def level(self, group: Bootstrap, name: str) -> Level:
        """Ranks that reach each other's memory, by a name of their own in errors."""
        options = self.options
        checker = Checker(
            group.rank, group.size, options.device, options.driver.name == "host", group=name
        )
        together = Topology(group.rank, (0,) * group.size)
        return Level(group, together, options, checker, self.stack)

    def hierarchical(self, interrupted: _Interrupted) -> Parts:
        """A node, the rail, and all ranks."""
        topology = self.topology
        world = World.of(topology)
        node_ranks = self.part_of(topology.node_ranks)
        rail_ranks = self.part_of(world.rail)
        node = self.level(node_ranks, f" of node {topology.node}")
        parents = Parents()

        def asked(awaited: Collection[int], number: int, _: Call) -> None:
            parent = parents.of(number)
            if parent is not None:
                interrupted(awaited, *parent)

        inner = "host" if self.options.driver.name == "host" else "device"
        engine = node.make_engine(inner, self.abandon, asked, self.stack)
        rail = self.tier(rail_ranks, f" of rail {topology.local_rank}")
        whole = self.tier(self.bootstrap, "")
        local = local_work(self.options.driver, self.options.device)
        name = f"node {topology.node}"
        across = Across(rail_ranks, world.rail, self.options.wait, name, topology.node_ranks)
        made = HierarchicalEngine(node, engine, rail, whole, across, world, local, parents)
        self.stack.callback(made.close)
        return Parts(node, made, across, made.part, (node_ranks, rail_ranks))

    def tier(self, group: Bootstrap, name: str) -> Tier:
        """Ranks of several nodes."""
        level = self.level(group, name)
        engine = level.make_engine("host", self.abandon, _nothing, self.stack)
        return HostTier(level, engine, automatic=self.options.register == "auto")
