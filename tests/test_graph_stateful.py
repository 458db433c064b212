"""Captures, replays, drops and releases in any order, against a model of who owns which bytes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import cupy_zc
from cupy_zc import Communicator, LiveGraphsError
from cupy_zc.driver.host import HostDriver
from cupy_zc.memory import graphs as ties

RANKS = 2
GRANULE = 1 << 12
PICK = st.integers(0, 1 << 16)
COUNTS = st.sampled_from([4, 128, 700, 1024])

_numbers = itertools.count(1)


@dataclass(eq=False)
class Thing:
    """An array on all ranks: what they hold, what should be in it, and which bytes it is."""

    count: int
    #: Empty once it was dropped: the model must keep no memory.
    arrays: list[Any]
    values: list[np.ndarray[Any, Any]]
    spans: list[tuple[int, int]]
    #: The capture whose temporary it is.
    capture: Program | None = None


@dataclass(eq=False)
class Program:
    """What was captured: on the model, and on each rank."""

    streams: list[Any]
    forks: list[Any] = field(default_factory=list)
    forked: bool = False
    steps: list[Callable[[], None]] = field(default_factory=list)
    #: Arrays whose bytes belong to the graph, also after they were dropped.
    owned: list[Thing] = field(default_factory=list)
    temporaries: list[Thing] = field(default_factory=list)
    collectives: int = 0
    #: For each rank, what can be launched.
    graphs: list[list[Any]] = field(default_factory=list)

    @property
    def recording(self) -> list[Any]:
        return self.forks if self.forked else self.streams


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


class Graphs(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.stack = contextlib.ExitStack()
        self.driver = HostDriver(granularity=GRANULE, memory=1 << 30)
        self.comms = self.stack.enter_context(work.communicators(RANKS, driver=self.driver))
        self.pools = [cupy_zc.MemoryPool(driver=self.driver, segment_size=4 * GRANULE)
                      for _ in range(RANKS)]  # fmt: skip
        self.things: list[Thing] = []
        self.junk: list[list[Any]] = [[] for _ in range(RANKS)]
        self.programs: list[Program] = []
        self.open: Program | None = None
        self.fill = 0

    def fine(self, body: Callable[[Communicator], Any]) -> list[Any]:
        return work.run(self.comms, body)

    def next_fill(self) -> int:
        self.fill = self.fill % 250 + 1
        return self.fill

    # Who may own what

    def owners(self, rank: int, but: Program | None = None) -> list[tuple[int, int]]:
        """The bytes that nobody may be given now."""
        taken = [thing.spans[rank] for thing in self.things]
        for program in [*self.programs, *([self.open] if self.open else [])]:
            if program is not but:
                taken += [thing.spans[rank] for thing in program.owned]
            else:  # its dropped temporaries are for itself to reuse
                taken += [thing.spans[rank] for thing in program.owned if thing.capture is not but]
                taken += [thing.spans[rank] for thing in program.temporaries]
        return taken

    def make(self, count: int, streams: list[Any], capture: Program | None) -> Thing:
        nbytes = 4 * count

        def body(comm: Communicator) -> Any:
            with streams[comm.rank]:
                return cupy.ndarray(count, "u4", self.pools[comm.rank].malloc(nbytes))

        arrays = self.fine(body)
        spans = [(array.data.ptr, array.data.ptr + nbytes) for array in arrays]
        for rank, span in enumerate(spans):
            assert not any(overlap(span, other) for other in self.owners(rank, capture))
        return Thing(count, arrays, [np.zeros(count, "u4") for _ in range(RANKS)], spans, capture)

    # Eager

    @rule(count=COUNTS, where=PICK)
    def allocate(self, count: int, where: int) -> None:
        """On the null stream, or on one that captured a graph, where its temporaries came from."""
        streams = [[self.driver.current_stream()] * RANKS]
        streams += [each for program in self.programs for each in (program.streams, program.forks)]
        streams = [each for each in streams if each]
        thing = self.make(count, streams[where % len(streams)], None)
        value = self.next_fill()
        for rank, array in enumerate(thing.arrays):
            cupy_zc.copyto(array, value + rank)
            thing.values[rank][:] = value + rank
        self.things.append(thing)

    @rule(which=PICK)
    def drop_array(self, which: int) -> None:
        if self.things:
            self.things.pop(which % len(self.things)).arrays.clear()

    @rule(rank=st.integers(0, RANKS - 1), count=COUNTS, keep=st.booleans())
    def another_history(self, rank: int, count: int, keep: bool) -> None:
        array = cupy.ndarray(count, "u4", self.pools[rank].malloc(4 * count))
        span = (array.data.ptr, array.data.ptr + 4 * count)
        assert not any(overlap(span, other) for other in self.owners(rank))
        cupy_zc.copyto(array, 0xFFFFFFFF)
        if keep and len(self.junk[rank]) < 8:
            self.junk[rank].append(array)

    @rule(rank=st.integers(0, RANKS - 1))
    def drop_history(self, rank: int) -> None:
        for array in self.junk[rank]:
            assert (cupy_zc.view(array) == 0xFFFFFFFF).all()
        self.junk[rank].clear()

    @rule(which=PICK)
    def eager_collective(self, which: int) -> None:
        if self.things:
            thing = self.things[which % len(self.things)]
            self.fine(
                lambda comm: comm.all_reduce(thing.arrays[comm.rank], thing.arrays[comm.rank])
            )
            self.reduce(thing, thing)

    @staticmethod
    def reduce(source: Thing, target: Thing) -> None:
        total = source.values[0] + source.values[1]
        for values in target.values:
            values[:] = total

    @rule()
    def free_all_blocks(self) -> None:
        for pool in self.pools:
            pool.free_all_blocks()

    @rule()
    def collect(self) -> None:
        self.fine(lambda comm: comm.collect())
        assert {comm._registry.lanes.held for comm in self.comms} == {
            self.comms[0]._registry.lanes.held
        }

    @rule()
    def close(self) -> None:
        if self.leased():
            for comm in self.comms:
                with pytest.raises(LiveGraphsError):
                    comm.close()

    # Captures

    @rule()
    def begin(self) -> None:
        if self.open is None and len(self.programs) < 6:
            self.open = Program([self.driver.make_stream() for _ in range(RANKS)])
            for stream in self.open.streams:
                stream.begin_capture()

    @precondition(lambda self: getattr(self, "open", None) is not None)
    @rule(count=COUNTS)
    def temporary(self, count: int) -> None:
        program = self.open
        assert program is not None
        thing, value = self.make(count, program.recording, program), self.next_fill()
        for rank, stream in enumerate(program.recording):
            address = thing.spans[rank][0]
            stream.enqueue(functools.partial(ctypes.memset, address, value, 4 * count))

        def step() -> None:
            for values in thing.values:
                values[:] = value * 0x01010101

        program.steps.append(step)
        program.temporaries.append(thing)
        program.owned.append(thing)

    @precondition(lambda self: getattr(self, "open", None) is not None)
    @rule(which=PICK)
    def drop_temporary(self, which: int) -> None:
        program = self.open
        assert program is not None
        if program.temporaries:
            thing = program.temporaries.pop(which % len(program.temporaries))
            thing.arrays.clear()

    @precondition(lambda self: getattr(self, "open", None) is not None)
    @rule(which=PICK, other=PICK)
    def captured_collective(self, which: int, other: int) -> None:
        program = self.open
        assert program is not None
        things = self.things + program.temporaries
        if not things:
            return
        source = things[which % len(things)]
        targets = [each for each in things if each.count == source.count]
        target = targets[other % len(targets)]

        def body(comm: Communicator) -> None:
            stream = program.recording[comm.rank]
            comm.all_reduce(source.arrays[comm.rank], target.arrays[comm.rank], stream=stream)

        self.fine(body)
        program.steps.append(functools.partial(self.reduce, source, target))
        program.owned += [each for each in (source, target) if each not in program.owned]
        program.collectives += 1

    @precondition(lambda self: getattr(self, "open", None) is not None)
    @rule()
    def fork_or_join(self) -> None:
        program = self.open
        assert program is not None
        if program.forked:
            for stream, fork in zip(program.streams, program.forks, strict=True):
                stream.wait_event(fork.record())
        else:
            program.forks = [self.driver.make_stream() for _ in range(RANKS)]
            for stream, fork in zip(program.streams, program.forks, strict=True):
                fork.wait_event(stream.record())
        program.forked = not program.forked

    @precondition(lambda self: getattr(self, "open", None) is not None)
    @rule(fail=st.booleans())
    def end(self, fail: bool) -> None:
        program, self.open = self.open, None
        assert program is not None
        if fail:
            for stream in program.streams:
                with contextlib.suppress(cupy_zc.DriverError):
                    stream.synchronize()  # invalidates the capture
                with contextlib.suppress(cupy_zc.DriverError):
                    stream.end_capture()
            return
        if program.forked:
            for stream, fork in zip(program.streams, program.forks, strict=True):
                stream.wait_event(fork.record())
        program.graphs = [[stream.end_capture()] for stream in program.streams]
        for thing in program.temporaries:
            thing.arrays.clear()
        program.temporaries.clear()
        self.programs.append(program)

    # Graphs

    @precondition(lambda self: bool(getattr(self, "programs", None)))
    @rule(which=PICK, times=st.integers(1, 3))
    def replay(self, which: int, times: int) -> None:
        program = self.programs[which % len(self.programs)]

        def body(comm: Communicator) -> None:
            for _ in range(times):
                program.graphs[comm.rank][-1].launch(program.streams[comm.rank])
                program.streams[comm.rank].synchronize()

        self.fine(body)
        for _, step in itertools.product(range(times), program.steps):
            step()

    @precondition(lambda self: bool(getattr(self, "programs", None)))
    @rule(which=PICK)
    def clone(self, which: int) -> None:
        for executables in self.programs[which % len(self.programs)].graphs:
            executables.append(executables[-1].instantiate())

    @precondition(lambda self: bool(getattr(self, "programs", None)))
    @rule(which=PICK)
    def drop_graph(self, which: int) -> None:
        program = self.programs[which % len(self.programs)]
        for executables in program.graphs:
            del executables[0]
        if not program.graphs[0]:
            self.programs.remove(program)

    # What always holds

    def leased(self) -> int:
        programs = [*self.programs, *([self.open] if self.open else [])]
        return sum(program.collectives > 0 for program in programs)

    @invariant()
    def arrays_hold_what_their_owners_wrote(self) -> None:
        for thing in getattr(self, "things", ()):
            for array, values in zip(thing.arrays, thing.values, strict=True):
                np.testing.assert_array_equal(cupy_zc.view(array), values)
        for arrays in getattr(self, "junk", ()):
            assert all((cupy_zc.view(array) == 0xFFFFFFFF).all() for array in arrays)

    @invariant()
    def there_is_a_lease_for_each_graph_that_lives(self) -> None:
        if hasattr(self, "comms"):
            assert [len(comm.leases()) for comm in self.comms] == [self.leased()] * RANKS

    def teardown(self) -> None:
        if not hasattr(self, "comms"):
            return
        try:
            if self.open is not None:
                self.end(fail=True)
            self.programs.clear()
            self.things.clear()
            for arrays in self.junk:
                arrays.clear()
            gc.collect()
            self.fine(lambda comm: comm.collect())
            self.fine(lambda comm: comm.collect())  # what the first one let go of
            for comm, pool in zip(self.comms, self.pools, strict=True):
                assert comm.leases() == ()
                assert comm._registry.lanes.held == ()
                assert all(segment.pins == 0 for segment in pool.device_pool().segments())
                pool.free_all_blocks()
                assert (pool.used_bytes(), pool.total_bytes()) == (0, 0)
                assert pool.device_pool().captures.homes() == []
            assert not ties._ties
        finally:
            self.stack.close()
            self.__dict__.clear()


TestGraphs = Graphs.TestCase
TestGraphs.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
