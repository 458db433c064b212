"""Graphs with collectives, on every engine: what a replay reads and writes, and what is released.

Ranks are threads. On the host driver the same tests run without a GPU. No multicast object is made.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy
import group_workers
import numpy as np
import pytest

import cupy_zc
from cupy_zc import (
    ClosedError,
    Communicator,
    LiveGraphsError,
    MemoryPool,
    MismatchError,
    enqueue,
    view,
)
from cupy_zc.driver.host import HostDriver
from cupy_zc.memory import graphs as ties

ROOT = Path(__file__).parents[1]


@dataclass
class Rank:
    """One rank: its communicator, and a stream for its work and one for eager calls."""

    comm: Communicator
    pool: MemoryPool
    stream: Any
    other: Any

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def empty(self, count: int = 1000, dtype: str = "i4") -> cupy.ndarray:
        return cupy.empty(count, dtype)

    def fill(self, array: cupy.ndarray, value: Any, stream: Any = None) -> None:
        """In the order of the rank's stream."""
        enqueue(lambda: view(array).__setitem__(slice(None), value), stream or self.stream)

    def read(self, array: cupy.ndarray) -> np.ndarray:
        """After the work of the rank's stream; others are not waited for."""
        self.stream.synchronize()
        with self.stream:
            return cupy_zc.asnumpy(array)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[list[Any]]:
        """A capture; the list has the graph afterwards."""
        made: list[Any] = []
        with self.stream:
            self.stream.begin_capture()
            try:
                yield made
            finally:
                made.append(self.stream.end_capture())

    def graph(self, *arrays: cupy.ndarray) -> Any:
        """A graph that sums each array in place. Collective."""
        with self.capturing() as made:
            for array in arrays:
                self.comm.all_reduce(array, array)
        return made.pop()

    def meet(self) -> None:
        """Wait for the other ranks, on the host alone."""
        self.comm._talk.all_gather(b"")

    def leases_end(self) -> None:
        """All leases end soon: CUDA tells of a graph's end from a thread of its own."""
        until = time.monotonic() + 5
        while self.comm.leases():
            assert time.monotonic() < until
            gc.collect()


def make(backend: str, n: int, **options: Any) -> list[Communicator]:
    """Communicators, and a pool for CuPy."""
    if backend == "host":
        driver: Any = HostDriver(granularity=1 << 16, memory=1 << 32)
    else:
        driver = "cuda"
    pool = cupy_zc.install(MemoryPool(driver=driver, segment_size=1 << 21))
    devices = list(range(n)) if backend == "device, 2 GPUs" else None
    return Communicator.in_process(
        n, backend=backend.partition(",")[0], driver=pool.driver, devices=devices, **options
    )


@contextlib.contextmanager
def ranks(backend: str, n: int = 2, **options: Any) -> Iterator[list[Communicator]]:
    comms = make(backend, n, **{"timeout": 20, **options})
    try:
        yield comms
    finally:
        for comm in comms:
            comm.close(force=True)
        cupy_zc.uninstall()
        assert comms[0]._driver.multicast_objects_created == 0


@pytest.fixture(
    params=[
        "host",
        pytest.param("device", marks=pytest.mark.gpu),
        pytest.param("device, 2 GPUs", marks=pytest.mark.multi_gpu),
    ]
)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(comms: list[Communicator], body: Callable[[Rank], Any]) -> list[Any]:
    """``body(rank)`` on all ranks, each in a thread with its device and streams."""

    def one(number: int) -> Any:
        comm = comms[number]
        device: Any = contextlib.nullcontext()
        if comm._driver.name == "cuda":
            device = cupy.cuda.Device(comm._device)
        with device:
            pool = cupy_zc.memory.installed_pool()
            assert pool is not None
            streams = [comm._driver.make_stream(non_blocking=True) for _ in range(2)]
            rank = Rank(comm, pool, *streams)
            with rank.stream:
                warm = rank.empty(4)
                rank.fill(warm, 1)  # kernels are loaded before a rank waits for another one
                enqueue(lambda: view(warm).__iadd__(1), rank.stream)
            rank.stream.synchronize()
            rank.meet()
            try:
                with rank.stream:
                    return body(rank)
            except BaseException:
                comm.close(force=True)
                raise

    return list(group_workers.all_fine(group_workers.in_threads(len(comms), one)))


def on_all(backend: str, body: Callable[[Rank], Any], n: int = 2, **options: Any) -> list[Any]:
    with ranks(backend, n, **options) as comms:
        return run(comms, body)


# What a replay reads and writes


def test_the_graph_example_of_nccl(backend: str) -> None:
    def body(rank: Rank) -> None:
        sendbuff, recvbuff = rank.empty(1 << 14, "f4"), rank.empty(1 << 14, "f4")
        rank.fill(recvbuff, 0)
        rank.fill(sendbuff, rank.rank + 1)
        rank.stream.synchronize()
        with rank.capturing() as made:
            rank.comm.all_reduce(sendbuff[:1024], recvbuff[:1024])
            rank.comm.all_reduce(sendbuff[1024:2048], recvbuff[2048:3072])
        graph = made.pop()
        graph.launch(rank.stream)
        result = rank.read(recvbuff)
        wanted = np.zeros(1 << 14, "f4")
        wanted[:1024] = wanted[2048:3072] = 3
        np.testing.assert_array_equal(result, wanted)
        transfer = rank.comm.last_transfer
        assert transfer is not None
        assert transfer.zero_copy
        rank.meet()
        del graph
        rank.leases_end()

    on_all(backend, body)


def test_a_temporary_is_nobody_elses_while_the_graph_lives(backend: str) -> None:
    def body(rank: Rank) -> None:
        source, total = rank.empty(), rank.empty()
        rank.fill(source, 1)
        rank.fill(total, 0)
        rank.stream.synchronize()
        with rank.capturing() as made:
            temporary = rank.empty()
            rank.comm.all_reduce(source, temporary)
            rank.comm.all_reduce(temporary, total)
            del temporary
        graph = made.pop()
        fresh = [rank.empty() for _ in range(50)]
        for array in fresh:
            rank.fill(array, 7)
        for _ in range(1000):
            graph.launch(rank.stream)
        assert (rank.read(total) == 4).all()
        assert all((rank.read(array) == 7).all() for array in fresh)
        rank.meet()

    on_all(backend, body)


def test_an_output_dropped_after_the_capture_is_not_handed_on(backend: str) -> None:
    def body(rank: Rank) -> None:
        source, output = rank.empty(), rank.empty()
        rank.fill(source, 1)
        rank.stream.synchronize()
        with rank.capturing() as made:
            rank.comm.all_reduce(source, output)
        graph = made.pop()
        del output
        fresh = [rank.empty() for _ in range(50)]
        for array in fresh:
            rank.fill(array, 7)
        for _ in range(100):
            graph.launch(rank.stream)
        assert all((rank.read(array) == 7).all() for array in fresh)
        rank.meet()

    on_all(backend, body)


def test_a_thousand_replays_with_changing_input_are_right_without_synchronizing(
    backend: str,
) -> None:
    def body(rank: Rank) -> None:
        given, taken, total = rank.empty(), rank.empty(), rank.empty(1000, "i8")
        rank.fill(given, rank.rank)
        rank.fill(total, 0)
        rank.stream.synchronize()
        with rank.capturing() as made:
            rank.comm.all_reduce(given, taken)
            enqueue(lambda: view(total).__iadd__(view(taken)), rank.stream)
            enqueue(lambda: view(given).__iadd__(1), rank.stream)
        graph = made.pop()
        for _ in range(1000):
            graph.launch(rank.stream)
        wanted = sum(1 + 2 * turn for turn in range(1000))
        assert (rank.read(total) == wanted).all()
        rank.meet()

    on_all(backend, body)


def test_replays_on_one_stream_run_beside_eager_calls_on_another(backend: str) -> None:
    def body(rank: Rank) -> None:
        captured, eager = rank.empty(), rank.empty()
        rank.fill(captured, 1)
        rank.fill(eager, 1)
        rank.stream.synchronize()
        graph = rank.graph(captured)

        def replay() -> None:
            for _ in range(20):
                graph.launch(rank.stream)

        thread = threading.Thread(target=replay)
        if rank.rank:  # in another order on each rank
            thread.start()
            time.sleep(0.05)
        for _ in range(20):
            rank.comm.all_reduce(eager, eager, "max", stream=rank.other)
        if not rank.rank:
            thread.start()
        thread.join(30)
        assert not thread.is_alive()
        assert (rank.read(captured) == 1 << 20).all()
        rank.other.synchronize()
        assert (rank.read(eager) == 1).all()
        rank.comm.check()
        rank.meet()

    on_all(backend, body)


def test_ranks_capture_with_other_histories_of_allocations(backend: str) -> None:
    def body(rank: Rank) -> list[int]:
        history = [rank.empty(5000) for _ in range(3 * rank.rank)]
        del history[::2]
        array = rank.empty()
        rank.fill(array, rank.rank + 1)
        rank.stream.synchronize()
        graph = rank.graph(array)
        graph.launch(rank.stream)
        assert (rank.read(array) == 3).all()
        offsets = [each.offset for each in rank.comm.leases()[0].arrays]
        rank.meet()
        return offsets

    on_all(backend, body, register="manual")


def test_a_forked_stream_is_in_the_lease_of_its_capture(backend: str) -> None:
    def body(rank: Rank) -> None:
        one, two = rank.empty(), rank.empty()
        rank.fill(one, 1)
        rank.fill(two, 2)
        rank.stream.synchronize()
        with rank.capturing() as made:
            rank.comm.all_reduce(one, one)
            rank.other.wait_event(rank.stream.record())
            rank.comm.all_reduce(two, two, stream=rank.other)
            rank.stream.wait_event(rank.other.record())
            assert [lease.calls for lease in rank.comm.leases()] == [2]
        graph = made.pop()
        graph.launch(rank.stream)
        assert (rank.read(one) == 2).all()
        assert (rank.read(two) == 4).all()
        rank.meet()

    on_all(backend, body)


# What is released, and when


@pytest.mark.parametrize("how", ["launched", "thread", "synchronized"])
def test_a_dropped_graph_is_released_after_its_replay(backend: str, how: str) -> None:
    def body(rank: Rank) -> None:
        array = rank.empty()
        rank.fill(array, 1)
        rank.stream.synchronize()
        box = [rank.graph(array)]
        rank.meet()
        box[0].launch(rank.stream)
        if how == "synchronized":
            rank.stream.synchronize()
        if how == "thread":
            thread = threading.Thread(target=box.clear)
            thread.start()
            thread.join(10)
        box.clear()
        assert (rank.read(array) == 2).all()
        rank.leases_end()
        assert array.data.mem.segment.pins == 0
        rank.meet()

    on_all(backend, body, register="manual")


@pytest.mark.parametrize("times", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_graphs_captured_and_dropped_leave_memory_flat(backend: str, times: int) -> None:
    def churn(rank: Rank, count: int) -> None:
        source = rank.empty()
        rank.fill(source, 1)
        rank.stream.synchronize()
        for _ in range(count):
            with rank.capturing() as made:
                temporary = rank.empty()
                rank.comm.all_reduce(source, temporary)
                del temporary
            made.pop().launch(rank.stream)
            rank.stream.synchronize()
        rank.leases_end()
        rank.comm.collect()

    def figures(rank: Rank) -> tuple[int, ...]:
        rank.meet()
        if rank.rank == 0:
            rank.pool.free_all_blocks()
        rank.meet()
        windows = rank.comm._registry.windows._windows.values()
        mapped = sum(len(window._mapped) for window in windows)
        free = rank.comm._driver.memory_info(rank.comm._device).free
        return mapped, rank.comm._heap.total_bytes(), free, len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def body(rank: Rank) -> None:
        churn(rank, 5)
        before = figures(rank)
        churn(rank, times)
        after = figures(rank)
        assert after[:2] == before[:2]
        assert after[2] >= before[2] - (8 << 20)
        assert after[3] <= before[3]
        assert rank.comm._registry.lanes.held == ()
        rank.meet()

    on_all(backend, body)


def test_fifty_live_graphs_report_their_memory_which_is_bounded(backend: str) -> None:
    def body(rank: Rank) -> None:
        source, graphs = rank.empty(), []
        rank.fill(source, 1)
        rank.stream.synchronize()
        for _ in range(50):
            with rank.capturing() as made:
                temporary = rank.empty()
                rank.comm.all_reduce(source, temporary)
                del temporary
            graphs += made
        leases = rank.comm.leases()
        assert sorted(lease.lane or 0 for lease in leases) == list(range(1, 51))
        assert all(0 < lease.bytes <= 2 << 22 for lease in leases)
        assert all(0 < lease.lane_bytes <= 4 << 20 for lease in leases)
        for graph in graphs:
            graph.launch(rank.stream)
        rank.stream.synchronize()
        rank.comm.check()
        rank.meet()
        graphs.clear()
        made.clear()
        del graph
        rank.leases_end()

    on_all(backend, body)


def test_what_a_capture_and_a_release_take(backend: str) -> None:
    """The figures are 300 us and 1 ms; ranks that are threads share the interpreter."""

    def body(rank: Rank) -> None:
        array, costs = rank.empty(), []
        with rank.capturing() as made:
            rank.comm.all_reduce(array, array)
            for _ in range(100):
                began = time.perf_counter()
                rank.comm.all_reduce(array, array)
                costs.append(time.perf_counter() - began)
        made.clear()
        assert statistics.median(costs) < 3e-3
        rank.leases_end()
        times = []
        for _ in range(20):
            box = [rank.graph(array)]
            rank.meet()
            began = time.perf_counter()
            box.clear()
            while rank.comm.leases():
                pass
            times.append(time.perf_counter() - began)
            rank.meet()
        assert min(times) < 1e-3

    on_all(backend, body)


# Ranks that differ


def test_a_different_count_on_one_rank_is_an_error_on_all(backend: str) -> None:
    def body(rank: Rank) -> None:
        array = rank.empty()
        with rank.capturing() as made:
            with pytest.raises(MismatchError, match="count=999"):
                rank.comm.all_reduce(array[: 1000 - rank.rank], array)
            assert rank.comm.leases() == ()
        made.clear()
        graph = rank.graph(array)
        assert len(rank.comm.leases()) == 1
        rank.meet()
        del graph

    on_all(backend, body)


def test_a_rank_that_captures_alone_is_an_error_on_both(backend: str) -> None:
    def body(rank: Rank) -> None:
        array = rank.empty()
        rank.fill(array, 1)
        rank.stream.synchronize()
        if rank.rank:
            with rank.capturing() as made, pytest.raises(MismatchError, match="rank 0 is at"):
                rank.comm.all_reduce(array, array)
            made.clear()
        else:
            with pytest.raises(MismatchError, match="rank 1 is at"):
                rank.comm.collect()
        assert rank.comm.leases() == ()
        rank.comm.all_reduce(array, array)
        assert (rank.read(array) == 2).all()
        rank.meet()

    on_all(backend, body)


# The end


def test_a_communicator_with_live_graphs_is_closed_only_by_force(backend: str) -> None:
    def body(rank: Rank) -> None:
        array = rank.empty()
        rank.fill(array, 1)
        rank.stream.synchronize()
        graph = rank.graph(array)
        with pytest.raises(LiveGraphsError):
            rank.comm.close()
        graph.launch(rank.stream)
        assert (rank.read(array) == 2).all()
        rank.meet()
        rank.comm.close(force=True)
        with contextlib.suppress(ClosedError):  # an engine that runs on the host says it at once
            graph.launch(rank.stream)
        rank.stream.synchronize()
        assert (rank.read(array) == 2).all()

    on_all(backend, body)


def test_nothing_is_tied_to_a_graph_in_the_end(backend: str) -> None:
    def body(rank: Rank) -> None:
        array = rank.empty()
        graphs = [rank.graph(array) for _ in range(3)]
        rank.meet()
        graphs.clear()
        rank.leases_end()

    on_all(backend, body)
    ties.settle()
    assert not ties._ties


LEAVE = """
import sys, threading
sys.path.insert(0, "tests")
import test_graph_gpu as tests
alive = []
comms = tests.make(sys.argv[1], 2, timeout=20)

def body(rank):
    array = rank.empty()
    rank.fill(array, 1)
    rank.stream.synchronize()
    graph = rank.graph(array)
    graph.launch(rank.stream)
    rank.stream.synchronize()
    alive.extend([graph, rank])
    rank.meet()

tests.run(comms, body)
"""


@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(49))])
def test_a_program_ends_silently_with_live_graphs(backend: str, turn: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEAVE, backend],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
