"""Random programs that register, capture and let go, against a model of what NCCL has then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from collective_memory import got, put
from device_ranks import device
from emulated_driver import EmulatedDriver
from fake_nccl import FakeNccl, fake_nccl
from graph_workers import array_of, pool_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from nccl_engines import engines_of, eventually, play
from nccl_registered import held, span_of
from several_nodes import pretend

from cupy_zc import Communicator

__all__ = ["device"]  # a fixture

pytestmark = pytest.mark.timeout(120)

RANKS = 2
#: Arrays of each rank, and the pool of each: two share a segment.
POOLS = (0, 0, 1, 2)

which = st.integers(0, len(POOLS) - 1)
pick = st.integers(0, 1000)


class Registering(RuleBasedStateMachine):
    """Ranks do the same; each step ends before the next one begins.

    A holder is a registration or a graph. What nobody holds stays until somebody looks.
    """

    driver: EmulatedDriver
    windows = False

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        self.nccl: FakeNccl = self.stack.enter_context(fake_nccl(self.driver))
        self.nccl.version = 23007 if self.windows else 22809
        play(patch, self.nccl)
        self.comms = self.stack.enter_context(
            pretend((0, 1), driver=self.driver, backend="nccl", register="manual", timeout=10)
        )
        self.arrays: list[list[cupy.ndarray]] = self.on_all(self.make)
        #: Per rank: what the user has.
        self.registrations: list[list[Any]] = [[] for _ in self.comms]
        self.graphs: list[list[Any]] = [[] for _ in self.comms]
        #: By pool: who holds its segment; and pools whose segment is registered.
        self.holders: dict[int, set[int]] = {pool: set() for pool in POOLS}
        self.has: set[int] = set()
        #: Of the registrations and graphs, by the order of the lists above: name and pool.
        self.named: list[tuple[int, int]] = []
        self.graphed: list[tuple[int, int]] = []
        self.names = 0

    def on_all(self, body: Callable[[Communicator], Any]) -> list[Any]:
        return work.run(self.comms, body)

    @staticmethod
    def make(comm: Communicator) -> list[cupy.ndarray]:
        pools = [pool_of(comm) for _ in range(1 + max(POOLS))]
        return [array_of(pools[pool], 10, "i4") for pool in POOLS]

    def name(self) -> int:
        self.names += 1
        return self.names

    def swept(self) -> None:
        """Somebody looked."""
        self.has = {pool for pool in self.has if self.holders[pool]}

    @rule(array=which)
    def register(self, array: int) -> None:
        def body(comm: Communicator) -> None:
            mine = self.arrays[comm.rank][array]
            self.registrations[comm.rank].append(comm.register(mine))

        self.on_all(body)
        self.swept()
        pool, name = POOLS[array], self.name()
        self.holders[pool].add(name)
        self.has.add(pool)
        self.named.append((name, pool))

    @precondition(lambda self: self.named)
    @rule(at=pick)
    def deregister(self, at: int) -> None:
        at %= len(self.named)
        name, pool = self.named.pop(at)
        for each in self.registrations:
            each.pop(at).deregister()
        self.holders[pool].discard(name)

    @rule(array=which, times=st.integers(1, 3))
    def call(self, array: int, times: int) -> None:
        def body(comm: Communicator) -> None:
            mine = self.arrays[comm.rank][array]
            put(mine, np.full(10, comm.rank + 1, "i4"))
            for _ in range(times):
                comm.all_reduce(mine, mine)
            comm.synchronize()
            assert (got(mine) == 3 * 2 ** (times - 1)).all()
            transfer = comm.last_transfer
            assert transfer is not None
            assert transfer.zero_copy == (POOLS[array] in self.has)

        self.swept()
        self.on_all(body)

    @precondition(lambda self: len(self.graphed) < 3)
    @rule(array=which)
    def capture(self, array: int) -> None:
        def body(comm: Communicator) -> None:
            mine, stream = self.arrays[comm.rank][array], comm._driver.make_stream()
            stream.begin_capture()
            comm.all_reduce(mine, mine, stream=stream)
            self.graphs[comm.rank].append((stream.end_capture(), stream))

        self.on_all(body)
        self.swept()
        pool, name = POOLS[array], self.name()
        if pool in self.has:  # a graph registers nothing, but keeps it
            self.holders[pool].add(name)
        self.graphed.append((name, pool))

    @precondition(lambda self: self.graphed)
    @rule(at=pick)
    def replay(self, at: int) -> None:
        at %= len(self.graphed)
        array = POOLS.index(self.graphed[at][1])

        def body(comm: Communicator) -> None:
            graph, stream = self.graphs[comm.rank][at]
            graph.launch(stream)
            stream.synchronize()
            assert array >= 0

        self.on_all(body)

    @precondition(lambda self: self.graphed)
    @rule(at=pick)
    def drop(self, at: int) -> None:
        at %= len(self.graphed)
        name, pool = self.graphed.pop(at)
        for each in self.graphs:
            each.pop(at)
        for comm in self.comms:
            work.collected(lambda comm=comm: len(comm.leases()) == len(self.graphed))
            if pool in self.has:
                eventually(lambda comm=comm: engines_of(comm)[0].registrations.stale)
        self.holders[pool].discard(name)

    @rule()
    def collect(self) -> None:
        self.on_all(lambda comm: comm.collect())
        self.swept()

    @invariant()
    def nccl_has_what_the_model_has(self) -> None:
        for comm, arrays in zip(self.comms, self.arrays, strict=True):
            wanted = {span_of(arrays[POOLS.index(pool)]) for pool in self.has}
            assert held(comm) == [wanted]
            (engine,) = engines_of(comm)
            assert len(engine._comm.windows) == (len(wanted) if self.windows else 0)
            for array, pool in zip(arrays, POOLS, strict=True):
                assert array.data.mem.segment.pins > 0 or pool not in self.has
            assert not self.nccl.world.mistakes

    def teardown(self) -> None:
        self.graphs.clear()
        self.stack.close()


@pytest.mark.parametrize("windows", [False, True])
def test_nccl_has_what_somebody_holds(device: EmulatedDriver, windows: bool) -> None:
    class Machine(Registering):
        pass

    Machine.driver, Machine.windows = device, windows
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=8, stateful_step_count=20, deadline=None)
    )


@pytest.mark.slow
def test_nccl_has_what_somebody_holds_in_long_programs(device: EmulatedDriver) -> None:
    Registering.driver = device
    run_state_machine_as_test(
        Registering, settings=settings(max_examples=60, stateful_step_count=50, deadline=None)
    )
