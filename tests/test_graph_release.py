"""The end of a lease: when, by whom it is noticed, and what is left."""

from __future__ import annotations

import gc
import threading
import time

import collective_workers as work
import group_workers
import pytest
from conftest import Resources
from graph_workers import GRANULE, array_of, captured, pool_of, run

import cupy_zc
from cupy_zc import Communicator
from cupy_zc.driver.host import HostDriver
from cupy_zc.memory import graphs


def test_release_is_local_at_once_and_the_peers_unmap_at_the_next_agreed_point() -> None:
    def body(comm: Communicator) -> None:
        array = array_of(pool_of(comm))
        segment, windows = array.data.mem.segment, comm._registry.windows._windows
        graph, _ = captured(comm, array)
        mapped = dict(windows[1 - comm.rank, 1]._mapped)
        assert len(mapped) == 1
        comm.barrier()
        if not comm.rank:
            del graph
            comm.leases()
            assert segment.pins == 0
            assert not comm._registry.locate(array).registered
        comm.barrier()
        assert windows[1 - comm.rank, 1]._mapped == mapped
        comm.collect()
        assert len(windows[1 - comm.rank, 1]._mapped) == (1 if comm.rank == 0 else 0)
        assert comm._registry.lanes.held == (1,)
        graph = None
        comm.collect()
        assert windows[1 - comm.rank, 1]._mapped == {}
        assert not comm._registry.lanes.held

    run(2, body)


@pytest.mark.parametrize("drain", ["pool", "free", "eager", "capture", "collect", "leases"])
def test_a_lease_is_ended_by_whatever_is_at_work_next(drain: str) -> None:
    def body(comm: Communicator) -> None:
        pool = pool_of(comm)
        array, symmetric = array_of(pool), comm.empty(4, "i4")
        graph, _ = captured(comm, array)
        segment = array.data.mem.segment
        assert segment.pins == 1
        del graph
        assert segment.pins == 1  # nothing runs when a graph is dropped
        match drain:
            case "pool":
                array_of(pool, 1 << 20)
            case "free":
                pool.free_all_blocks()
            case "eager":
                comm.all_reduce(symmetric, symmetric)
            case "capture":
                captured(comm, symmetric)
            case "collect":
                comm.collect()
            case "leases":
                comm.leases()
        assert segment.pins == 0
        comm.barrier()

    run(2, body)


def test_eager_calls_look_at_one_lease_each_until_all_are_ended() -> None:
    def body(comm: Communicator) -> None:
        pool, symmetric = pool_of(comm, 1), comm.empty(4, "i4")
        graphs = [captured(comm, array_of(pool)) for _ in range(5)]
        del graphs[1:4]
        for _ in range(20):
            comm.all_reduce(symmetric, symmetric)
        assert len(comm._registry.leases._live) == 2
        comm.barrier()

    run(2, body, register="manual")


def test_from_dropping_a_graph_to_the_end_of_its_lease_takes_under_a_millisecond() -> None:
    def body(comm: Communicator) -> float:
        array, times = array_of(pool_of(comm)), []
        for _ in range(20):
            graph, _ = captured(comm, array)
            comm.barrier()
            began = time.perf_counter()
            del graph
            while comm.leases():
                pass
            times.append(time.perf_counter() - began)
            comm.barrier()
        return min(times)

    assert max(run(2, body)) < 1e-3


def test_a_graph_dropped_in_another_thread_is_noticed_here() -> None:
    def body(comm: Communicator) -> None:
        array = array_of(pool_of(comm))
        box = [captured(comm, array)[0]]
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert comm.leases() == ()
        comm.barrier()

    run(2, body)


def test_pools_of_other_threads_end_a_lease_once() -> None:
    def body(comm: Communicator) -> None:
        pool = pool_of(comm)
        array = array_of(pool)
        kept = comm.register(array)
        for _ in range(20):
            graph, _ = captured(comm, array)
            assert array.data.mem.segment.pins == 2
            del graph
            group_workers.all_fine(group_workers.in_threads(4, lambda _: pool.free_all_blocks()))
            assert array.data.mem.segment.pins == 1
        assert kept.active
        comm.collect()

    run(2, body)


def churn(comm: Communicator, pool: cupy_zc.MemoryPool, times: int) -> None:
    stream = comm._driver.make_stream()
    source = comm.empty(100, "i4")
    for _ in range(times):
        with stream:
            stream.begin_capture()
            temporary = array_of(pool)
            comm.all_reduce(source, temporary)
            del temporary
            stream.end_capture()
    comm.collect()
    pool.free_all_blocks()
    comm.collect()


@pytest.mark.parametrize("times", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_graphs_captured_and_dropped_leave_everything_flat(times: int) -> None:
    driver = HostDriver(granularity=GRANULE, memory=1 << 30)
    with work.communicators(2, driver=driver) as comms:
        pools = [pool_of(comm) for comm in comms]
        work.run(comms, lambda comm: churn(comm, pools[comm.rank], 5))
        gc.collect()
        before, free = Resources.now(), driver.memory_info(0).free
        used = [comm._heap.total_bytes() for comm in comms]
        work.run(comms, lambda comm: churn(comm, pools[comm.rank], times))
        before.assert_same(slack=8)
        assert driver.memory_info(0).free == free
        assert [comm._heap.total_bytes() for comm in comms] == used
        for comm in comms:
            assert comm.leases() == ()
            assert comm._registry.lanes.held == ()
            assert comm._registry._published.keys() == set(
                comms[comm.rank]._heap.arena.segments.values()
            )
    assert not graphs._ties


def test_fifty_live_graphs_report_their_memory_which_is_bounded() -> None:
    def body(comm: Communicator) -> None:
        pool, stream, graphs = pool_of(comm), comm._driver.make_stream(), []
        source = comm.empty(100, "i4")
        before = comm._heap.used_bytes()
        for _ in range(50):
            with stream:
                stream.begin_capture()
                temporary = array_of(pool, 500)
                comm.all_reduce(source, temporary[:100])
                del temporary
                graphs.append(stream.end_capture())
        leases = comm.leases()
        assert [lease.lane for lease in leases] == list(range(1, 51))
        heap = comm._heap.total_bytes()
        assert {lease.bytes for lease in leases} == {GRANULE + heap}
        assert pool.statistics().leased_bytes == pool.total_bytes() == 50 * GRANULE
        assert comm._heap.used_bytes() - before == 50 * 512
        assert sum(lease.lane_bytes for lease in leases) == 50 * (64 * 2 + 128)
        comm.barrier()
        graphs.clear()
        comm.collect()
        pool.free_all_blocks()
        assert pool.total_bytes() == 0

    run(2, body)


def test_a_graph_that_goes_while_its_lane_is_opened_gives_that_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ends: what a lease gets after another thread has found its graph gone, and nobody frees."""

    def body(comm: Communicator) -> None:
        array = comm.empty(4, "i4")
        engine, registry = comm._engine, comm._registry
        open_lane = engine.open_lane

        def late() -> int:
            lane = open_lane()
            for lease in registry.leases._live.values():
                lease.release()
            return lane

        monkeypatch.setattr(engine, "open_lane", late)
        graph, _ = captured(comm, array)
        del graph
        comm.collect()
        comm.collect()
        assert registry.lanes.held == ()

    run(1, body)
