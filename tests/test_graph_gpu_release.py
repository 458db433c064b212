"""The end of graphs with collectives, on every engine. No multicast object is made."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from graph_ranks import BACKENDS, Rank, emulated, on_all

from cupy_zc import (
    ClosedError,
    LiveGraphsError,
)
from cupy_zc.memory import graphs as ties

ROOT = Path(__file__).parents[1]


__all__ = ["emulated"]  # a fixture

pytestmark = [BACKENDS, pytest.mark.usefixtures("emulated")]


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
        descriptors = 0
        rank.pool.free_all_blocks()  # each on its device
        rank.meet()
        if rank.rank == 0:  # alone: to look for descriptors takes one
            descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        rank.meet()
        windows = rank.comm._registry.windows._windows.values()
        mapped = sum(len(window._mapped) for window in windows)
        free = rank.comm._driver.memory_info(rank.comm._device).free
        return mapped, rank.comm._heap.total_bytes(), free, descriptors

    def body(rank: Rank) -> None:
        churn(rank, 5)
        before = figures(rank)
        churn(rank, times)
        after = figures(rank)
        assert after[:2] == before[:2]
        assert after[3] <= before[3] + 16  # of segments, which a descriptor of the host driver is
        assert after[2] >= before[2] - (8 << 20), f"{before[2] - after[2]} bytes did not come back"
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
        most = 4 << 20 if backend == "host" else rank.comm._engine.lane_bytes(0)
        assert all(0 < lease.lane_bytes <= most for lease in leases)
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
import graph_ranks as tests
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
    if backend == "device, emulated":
        pytest.skip("the emulation is set up by pytest, and the program is another process")
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
