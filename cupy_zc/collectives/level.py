"""Ranks that reach each other's memory, with all that they share; the ranks of a node are.

A communicator has one, and where its ranks are on several nodes perhaps more: see
:mod:`cupy_zc.collectives.hierarchical`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack

from ..group import Bootstrap, Channel, Topology
from ..registration import Registry, SymmetricHeap
from .call import Call
from .checks import Checker
from .engine import Engine
from .host import HostEngine
from .opening import Options

__all__ = ["Level"]


class Level:
    """One group of ranks, as one of them has it. Collective to make.

    Args:
        bootstrap: The ranks; stays the caller's.
        topology: All of them at one node.
        options: What the user chose.
        checker: The names of calls, for errors.
        stack: Closes what was made, if something fails before the communicator is there.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        topology: Topology,
        options: Options,
        checker: Checker,
        stack: ExitStack,
    ) -> None:
        self.rank, self.size = bootstrap.rank, bootstrap.size
        self.checker = checker
        self._options = options
        self._timeout = options.wait
        self.talk = stack.enter_context(Channel.open(bootstrap, topology))
        self.letters = stack.enter_context(Channel.open(bootstrap, topology))
        self.registry = Registry(options.driver, options.device, self.talk, timeout=self._timeout)
        stack.callback(self.registry.close)
        self.heap = SymmetricHeap(self.registry)
        stack.callback(self.heap.close)

    def make_engine(
        self,
        backend: str,
        abandon: Callable[[], None],
        interrupted: Callable[[Collection[int], int, Call], None],
        stack: ExitStack,
        *,
        spare: int = 0,
    ) -> Engine:
        """The engine that carries out calls of these ranks. Collective.

        Args:
            backend: "host" or "device".
            abandon: Called when the ranks have lost each other, to let the peers know.
            interrupted: Asked in a long wait whether peers capture instead; see ``HostEngine``.
            stack: As for the class.
            spare: Multiprocessors of a GPU that are left to another engine.
        """
        engine: Engine
        if backend == "device":
            from .device import DeviceEngine  # needs what a machine without a GPU may lack

            engine = DeviceEngine(
                self.registry, self.heap, self.checker, self.departed, abandon, self._timeout,
                deterministic=self._options.deterministic, tables=self._options.tables, spare=spare,
            )  # fmt: skip
        else:
            engine = HostEngine(
                self.registry, self.heap, self.letters, self.checker,
                self.departed, abandon, interrupted, self._timeout,
            )  # fmt: skip
        stack.callback(engine.close)
        return engine

    def departed(self) -> tuple[int, ...]:
        """The ranks that cannot come any more; all of them where this one has parted."""
        if self.talk.closed:
            return tuple(rank for rank in range(self.size) if rank != self.rank)
        return self.talk.gone()

    def part(self) -> None:
        """Let the peers know that this rank makes no further calls."""
        self.talk.close()
        self.letters.close()
