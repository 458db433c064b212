"""Leases: what a captured collective uses stays as long as its graph, and no longer."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import collective_workers as work
import cupy
import group_workers
import numpy as np
import pytest
from conftest import Resources
from faults import FaultyDriver

import cupy_zc
from cupy_zc import Communicator, LiveGraphsError
from cupy_zc.driver.host import HostDriver

GRANULE = 1 << 12


def pool_of(comm: Communicator, segment_size: int = 1 << 16) -> cupy_zc.MemoryPool:
    return cupy_zc.MemoryPool(driver=comm._driver, segment_size=segment_size)


def array_of(pool: cupy_zc.MemoryPool, count: int = 100, dtype: str = "i4") -> cupy.ndarray:
    kind = np.dtype(dtype)
    return cupy.ndarray(count, kind, pool.malloc(count * kind.itemsize))


def captured(comm: Communicator, *arrays: cupy.ndarray) -> tuple[Any, Any]:
    """A graph that sums each array in place, and its stream. Collective."""
    stream = comm._driver.make_stream()
    stream.begin_capture()
    for array in arrays:
        comm.all_reduce(array, array, stream=stream)
    return stream.end_capture(), stream


def meet(comm: Communicator) -> None:
    """A barrier of the hosts: one on a stream would be waited for by who closes beside it."""
    comm._talk.all_gather(b"")


def fill(array: cupy.ndarray, value: Any) -> None:
    cupy_zc.copyto(array, value)


def run(n: int, body: Callable[[Communicator], Any], **options: Any) -> list[Any]:
    with work.communicators(n, timeout=10, **options) as comms:
        return work.run(comms, body)


# What a capture opens


def test_the_first_captured_call_opens_a_lease_and_the_others_find_it() -> None:
    def body(comm: Communicator) -> None:
        pool = pool_of(comm)
        one, two = array_of(pool), array_of(pool, 50, "f8")
        stream, fork = comm._driver.make_stream(), comm._driver.make_stream()
        stream.begin_capture()
        assert comm.leases() == ()
        comm.all_reduce(one, one, stream=stream)
        fork.wait_event(stream.record())
        comm.broadcast(two, 1, stream=fork)
        stream.wait_event(fork.record())
        comm.all_reduce(one, one, stream=stream)
        (lease,) = comm.leases()
        assert (lease.calls, lease.lane, lease.capturing) == (3, 1, True)
        assert [(each.nbytes, each.dtype) for each in lease.arrays] == [
            (400, "int32"),
            (400, "float64"),
        ]
        assert lease.arrays[0].arena == 1
        assert lease.bytes == pool.total_bytes() == 1 << 16
        assert lease.lane_bytes == 64 * 2 + 128
        graph = stream.end_capture()
        (lease,) = comm.leases()
        assert not lease.capturing
        with pytest.raises(AttributeError):
            lease.lane = 3  # type: ignore[misc]
        fill(one, comm.rank + 1)
        fill(two, comm.rank)
        comm.barrier()
        graph.launch(stream)
        assert (cupy_zc.view(one) == 6).all()
        assert (cupy_zc.view(two) == 1).all()
        comm.barrier()

    run(2, body)


@pytest.mark.parametrize("register", ["auto", "manual"])
def test_buffers_are_registered_by_the_capture_whatever_each_rank_allocated_before(
    register: str,
) -> None:
    def body(comm: Communicator) -> list[int]:
        pool = pool_of(comm)
        history = [array_of(pool, 1000) for _ in range(3 * comm.rank)]
        kept = array_of(pool, 500 * (comm.rank + 1))
        del history[::2]
        given, taken = array_of(pool), array_of(pool)
        stream = comm._driver.make_stream()
        stream.begin_capture()
        comm.all_reduce(given, taken, stream=stream)
        graph = stream.end_capture()
        offsets = [each.offset for each in comm.leases()[0].arrays]
        comm.barrier()
        for turn in range(3):
            fill(given, np.arange(100) + turn * comm.rank)
            graph.launch(stream)
            assert (cupy_zc.view(taken) == 3 * np.arange(100) + 3 * turn).all()
            transfer = comm.last_transfer
            assert transfer is not None
            assert transfer.zero_copy
        comm.barrier()
        del kept
        return offsets

    offsets = run(3, body, register=register)
    assert len({tuple(each) for each in offsets}) > 1


def test_explain_knows_what_the_ranks_captured_together() -> None:
    def body(comm: Communicator) -> list[tuple[str, bool | None]]:
        pool = pool_of(comm)
        history = array_of(pool, 5000 * (comm.rank + 1))
        array, same = array_of(pool), comm.empty(100, "i4")
        graph, _ = captured(comm, array, same)
        comm.barrier()
        told = [
            (rule.detail, rule.passed)
            for each in (array, same)
            for rule in comm.explain(each)
            if "on every rank" in rule.name
        ]
        comm.barrier()
        del graph, history
        return told

    told = run(2, body)
    assert [passed for _, passed in told[0]] == [True, False, True, True]
    assert told[0][1][0] == "another place on rank 1"


def test_the_example_of_the_documentation_of_nccl() -> None:
    """Two collectives in a graph, the second one at other offsets of both buffers."""

    def body(comm: Communicator) -> None:
        pool = pool_of(comm, 1 << 20)
        sendbuff, recvbuff = array_of(pool, 1 << 14, "f4"), array_of(pool, 1 << 14, "f4")
        stream = comm._driver.make_stream()
        with stream:
            stream.begin_capture()
            comm.all_reduce(sendbuff[:1024], recvbuff[:1024])
            comm.all_reduce(sendbuff[1024:2048], recvbuff[2048:3072])
            graph = stream.end_capture()
        fill(sendbuff, np.arange(1 << 14) * (comm.rank + 1))
        fill(recvbuff, 0)
        comm.barrier()
        graph.launch(stream)
        stream.synchronize()
        wanted = np.zeros(1 << 14)
        wanted[:1024] = np.arange(1024) * 3
        wanted[2048:3072] = np.arange(1024, 2048) * 3
        np.testing.assert_array_equal(cupy_zc.view(recvbuff), wanted)
        comm.barrier()
        del graph
        assert comm.leases() == ()

    run(2, body)


def test_a_registration_and_a_lease_both_count() -> None:
    def body(comm: Communicator) -> None:
        array = array_of(pool_of(comm))
        segment, locate = array.data.mem.segment, comm._registry.locate
        registration = comm.register(array)
        graph, _ = captured(comm, array)
        assert segment.pins == 2
        registration.deregister()
        comm.collect()
        assert locate(array).registered
        registration = comm.register(array)
        del graph
        assert comm.leases() == ()
        comm.collect()
        assert locate(array).registered
        assert segment.pins == 1
        registration.deregister()
        assert not locate(array).registered

    run(2, body)


def test_what_was_registered_at_an_agreed_call_is_held_by_the_lease_too() -> None:
    def body(comm: Communicator) -> None:
        array = array_of(pool_of(comm))
        fill(array, 0)
        comm.all_reduce(array, array)
        comm.all_reduce(array, array)
        assert comm.leases() == ()
        steps = comm._talk._step
        graph, _ = captured(comm, array)
        assert comm._talk._step - steps == 3  # the agreed point, and a lane: memory and a vote
        assert array.data.mem.segment.pins == 1
        del graph
        assert comm.leases() == ()
        assert array.data.mem.segment.pins == 0
        steps = comm._talk._step
        captured(comm, array)
        assert comm._talk._step - steps == 1  # the lane is there

    run(2, body)


def test_point_to_point_calls_are_leased_without_a_word_to_the_peers() -> None:
    def body(comm: Communicator) -> None:
        pool, peer = pool_of(comm), 1 - comm.rank
        given, taken, other = array_of(pool), array_of(pool), array_of(pool)
        stream, steps = comm._driver.make_stream(), comm._talk._step
        stream.begin_capture()
        comm.send_recv(given, taken, peer, stream=stream)
        comm.send(given, peer, stream=stream)
        comm.recv(other, peer, stream=stream)
        assert comm._talk._step == steps
        graph = stream.end_capture()
        (lease,) = comm.leases()
        assert (lease.lane, lease.calls, lease.lane_bytes) == (None, 3, 0)
        assert [each.arena for each in lease.arrays] == [-1] * 3  # nobody had registered them
        for turn in range(5):
            fill(given, comm.rank + 10 * turn)
            graph.launch(stream)
            stream.synchronize()
            assert (cupy_zc.view(taken) == peer + 10 * turn).all()
            assert (cupy_zc.view(other) == peer + 10 * turn).all()
        with comm.register(given):
            again = comm._driver.make_stream()
            again.begin_capture()
            comm.send_recv(given, taken, peer, stream=again)
            other_graph = again.end_capture()
        comm.collect()  # held by the second lease
        other_graph.launch(again)
        transfer = comm.last_transfer
        assert transfer is not None
        assert transfer.zero_copy
        comm.barrier()
        del graph, other_graph
        assert comm.leases() == ()

    run(2, body)


def test_several_communicators_in_one_capture_have_a_lease_each() -> None:
    def body(comm: Communicator) -> None:
        pool = pool_of(comm)
        part = comm.split(comm.rank // 2)
        assert part is not None
        with part:
            array, stream = array_of(pool), comm._driver.make_stream()
            stream.begin_capture()
            part.all_reduce(array, array, stream=stream)
            comm.all_reduce(array, array, "max", stream=stream)
            graph = stream.end_capture()
            assert comm.leases()[0].graph == part.leases()[0].graph
            assert array.data.mem.segment.pins == 2
            fill(array, comm.rank)
            comm.barrier()
            graph.launch(stream)
            assert (cupy_zc.view(array) == 5).all()
            comm.barrier()
            del graph
            assert comm.leases() == part.leases() == ()

    run(4, body)


def test_captures_at_once_on_one_communicator_have_a_lease_each() -> None:
    def body(comm: Communicator) -> None:
        pool = pool_of(comm)
        arrays, streams = [array_of(pool) for _ in range(3)], []
        for _ in arrays:
            streams.append(comm._driver.make_stream())
            streams[-1].begin_capture()
        for _ in range(2):
            for array, stream in zip(arrays, streams, strict=True):
                comm.all_reduce(array, array, stream=stream)
        graphs = [stream.end_capture() for stream in streams]
        assert [(lease.lane, lease.calls) for lease in comm.leases()] == [(1, 2), (2, 2), (3, 2)]
        for array in arrays:
            fill(array, 1)
        comm.barrier()
        for graph, stream in zip(graphs, streams, strict=True):
            graph.launch(stream)
        assert all((cupy_zc.view(array) == 4).all() for array in arrays)
        comm.barrier()

    run(2, body)


def test_captures_at_once_in_threads_stay_apart() -> None:
    def body(comm: Communicator) -> None:
        parts = [comm.split(0) for _ in range(3)]
        pool = pool_of(comm)
        failures: list[BaseException] = []

        def capture(part: Communicator) -> None:
            try:
                for _ in range(10):
                    array = array_of(pool)
                    graph, stream = captured(part, array, array)
                    fill(array, 1)
                    part.barrier()
                    graph.launch(stream)
                    assert (cupy_zc.view(array) == 4).all()
                    assert len(part.leases()) == 1
                    part.barrier()
                    del graph
                    assert part.leases() == ()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=capture, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert not failures, failures
        for part in parts:
            assert part is not None
            part.close()

    run(2, body)


# Whose memory it is


def test_a_temporary_of_a_capture_is_nobody_elses_while_the_graph_lives() -> None:
    """Ends: 7s read back as 2s, because a replay wrote to a temporary that had a new owner."""

    def body(comm: Communicator) -> None:
        pool, stream = pool_of(comm), comm._driver.make_stream()
        source = comm.empty(100, "i4")
        fill(source, 1)
        with stream:
            stream.begin_capture()
            temporary = array_of(pool)
            address = temporary.data.ptr
            comm.all_reduce(source, temporary)
            comm.all_reduce(temporary, temporary)
            del temporary
            graph = stream.end_capture()
            fresh = [array_of(pool) for _ in range(50)]
        fresh += [array_of(pool) for _ in range(50)]
        assert address not in {array.data.ptr for array in fresh}
        for array in fresh:
            fill(array, 7)
        comm.barrier()
        for _ in range(1000):
            graph.launch(stream)
        assert all((cupy_zc.view(array) == 7).all() for array in fresh)
        comm.barrier()

    run(2, body)


def test_a_temporary_is_reused_inside_its_capture_also_after_a_collective() -> None:
    def body(comm: Communicator) -> None:
        pool, stream = pool_of(comm), comm._driver.make_stream()
        with stream:
            stream.begin_capture()
            seen = set()
            for _ in range(20):
                temporary = array_of(pool)
                seen.add(temporary.data.ptr)
                comm.all_reduce(temporary, temporary)
                del temporary
            graph = stream.end_capture()
        assert len(seen) == 1
        assert comm.leases()[0].calls == 20
        comm.barrier()
        del graph

    run(2, body)


def test_an_array_dropped_after_the_capture_is_not_handed_on_while_the_graph_lives() -> None:
    """Ends: capture, drop the output, allocate the same size, replay: the new array is gone."""

    def body(comm: Communicator) -> None:
        pool, stream = pool_of(comm), comm._driver.make_stream()
        given, taken = array_of(pool), array_of(pool)
        fill(given, 2)
        address = taken.data.ptr
        stream.begin_capture()
        comm.all_reduce(given, taken, stream=stream)
        graph = stream.end_capture()
        del taken
        fresh = [array_of(pool) for _ in range(20)]
        for array in fresh:
            fill(array, 7)
        comm.barrier()
        graph.launch(stream)
        assert all((cupy_zc.view(array) == 7).all() for array in fresh)
        comm.barrier()
        del graph
        assert comm.leases() == ()
        held = [array_of(pool) for _ in range(200)]
        assert address in {array.data.ptr for array in held}

    run(2, body)


def test_a_symmetric_array_dropped_after_the_capture_is_kept_on_all_ranks() -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(100, "i4")
        address = array.data.ptr
        graph, _ = captured(comm, array)
        del array
        assert comm.empty(100, "i4").data.ptr != address
        if comm.rank:
            del graph  # on one rank first
            assert comm.leases() == ()
        comm.barrier()
        assert comm.empty(100, "i4").data.ptr != address
        graph = None
        assert comm.leases() == ()
        comm.barrier()
        comm.empty(1)  # tells of what was dropped
        assert address in {each.data.ptr for each in [comm.empty(100, "i4") for _ in range(5)]}

    run(2, body)


# Replays


def test_a_thousand_replays_with_changing_input_are_right_without_synchronizing() -> None:
    def body(comm: Communicator) -> None:
        pool, stream = pool_of(comm), comm._driver.make_stream()
        given, taken, results = array_of(pool, 10), array_of(pool, 10), []
        graph_stream = stream
        stream.begin_capture()
        comm.all_reduce(given, taken, stream=stream)
        graph = stream.end_capture()
        comm.barrier()
        with stream.hold():  # everything below is queued
            for turn in range(1000):
                stream.enqueue(lambda turn=turn: fill_now(given, turn * (comm.rank + 1)))
                graph.launch(graph_stream)
                stream.enqueue(lambda: results.append(int(cupy_zc.view(taken)[9])))
        stream.synchronize()
        assert results == [3 * turn for turn in range(1000)]
        comm.barrier()

    run(2, body)


def fill_now(array: cupy.ndarray, value: int) -> None:
    """From inside a stream, where :func:`fill` would wait for that stream."""
    cupy_zc.view(array)[...] = value


def test_replays_on_one_stream_run_beside_eager_calls_on_another() -> None:
    def body(comm: Communicator) -> None:
        pool = pool_of(comm)
        one, two = array_of(pool, 10), array_of(pool, 10)
        graph, stream = captured(comm, one)
        fill(one, 1)
        fill(two, 1)
        comm.barrier()

        def replay() -> None:
            for _ in range(10):
                graph.launch(stream)

        thread = threading.Thread(target=replay)
        if comm.rank:  # in another order on each rank
            thread.start()
            thread.join(0.05)
        for _ in range(10):
            comm.all_reduce(two, two)
        if not comm.rank:
            thread.start()
        thread.join(20)
        assert not thread.is_alive()
        assert int(cupy_zc.view(one)[0]) == int(cupy_zc.view(two)[0]) == 1024
        comm.barrier()

    run(2, body)


def test_a_child_graph_keeps_its_lease_as_long_as_its_parent() -> None:
    def body(comm: Communicator) -> None:
        array = array_of(pool_of(comm))
        child, stream = captured(comm, array)
        stream.begin_capture()
        child.launch(stream)
        comm.all_reduce(array, array, "max", stream=stream)
        child.launch(stream)
        parent = stream.end_capture()
        del child
        assert len(comm.leases()) == 2
        fill(array, comm.rank + 1)
        comm.barrier()
        parent.launch(stream)
        assert (cupy_zc.view(array) == 6).all()
        comm.barrier()
        del parent
        assert comm.leases() == ()

    run(2, body)


def test_an_executable_keeps_the_lease_when_its_graph_is_gone() -> None:
    def body(comm: Communicator) -> None:
        array = array_of(pool_of(comm))
        graph, stream = captured(comm, array)
        clones = [graph.instantiate() for _ in range(2)]
        del graph
        fill(array, 1)
        comm.barrier()
        for _ in range(2):
            assert len(comm.leases()) == 1
            clones.pop().launch(stream)
        assert (cupy_zc.view(array) == 4).all()
        assert comm.leases() == ()
        comm.barrier()

    run(2, body)


def test_a_graph_dropped_while_its_replay_is_queued_is_leased_until_that_has_run() -> None:
    def body(comm: Communicator) -> None:
        array = array_of(pool_of(comm))
        graph, stream = captured(comm, array)
        fill(array, 1)
        comm.barrier()
        hold = stream.hold()
        graph.launch(stream)
        del graph
        assert len(comm.leases()) == 1
        assert (cupy_zc.view(array) == 1).all()
        hold.release()
        stream.synchronize()
        assert (cupy_zc.view(array) == 2).all()
        assert comm.leases() == ()
        comm.barrier()

    run(2, body)


# The end of a lease


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
    from cupy_zc.memory import graphs

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


# The pool in captures


def test_growth_and_the_limit_of_a_pool_in_a_capture() -> None:
    def body(comm: Communicator) -> None:
        pool, stream = pool_of(comm), comm._driver.make_stream()
        source = comm.empty(1000, "i4")
        fill(source, 1)
        with stream:
            stream.begin_capture()
            held = [array_of(pool, 1000) for _ in range(5)]  # grows more than once
            for array in held:
                comm.all_reduce(source, array)
            pool.set_limit(size=pool.total_bytes())
            calls = comm.leases()[0].calls
            with pytest.raises(cupy_zc.OutOfMemoryError):
                array_of(pool, 1 << 16)
            assert comm.leases()[0].calls == calls
            pool.free_all_blocks()
            graph = stream.end_capture()
        comm.barrier()
        graph.launch(stream)
        assert all((cupy_zc.view(array) == 2).all() for array in held)
        comm.barrier()

    run(2, body)


def test_garbage_collection_in_a_capture_makes_no_driver_call() -> None:
    """Ends: a finalizer that calls CUDA, which invalidates a capture."""
    driver = FaultyDriver(HostDriver(granularity=GRANULE, memory=1 << 30))
    sockets: list[Any] = []
    with work.communicators(2, driver=driver) as comms:

        def make(comm: Communicator) -> list[Any]:
            array = array_of(pool_of(comm))
            graph, _ = captured(comm, array)
            part = comm.split(0)
            assert part is not None
            sockets.extend([part._talk, part._letters, part._bootstrap])
            other, _ = captured(part, array)
            litter = [graph, other, array, array_of(pool_of(comm)), comm.empty(3), part]
            litter.append(litter)  # which only the collector can drop
            return litter

        litter = work.run(comms, make)
        stream = comms[0]._driver.make_stream()
        stream.begin_capture()
        litter.clear()
        before = driver.calls.copy()
        gc.collect()
        assert driver.calls == before
        stream.end_capture()
        work.run(comms, lambda comm: comm.collect())
        assert [comm.leases() for comm in comms] == [(), ()]
        for each in sockets:  # which want to be closed
            each.close()


# Order of death


def test_close_with_live_graphs_names_them_and_leaves_the_communicator_open() -> None:
    def body(comm: Communicator) -> None:
        array = array_of(pool_of(comm))
        graph, stream = captured(comm, array)
        number = comm.leases()[0].graph
        with pytest.raises(LiveGraphsError, match=f"close .*capture {number};") as caught:
            comm.close()
        assert caught.value.graphs == (number,)
        fill(array, 1)
        comm.barrier()
        graph.launch(stream)
        comm.all_reduce(array, array)
        assert (cupy_zc.view(array) == 4).all()
        comm.barrier()
        loop: list[Any] = [graph]
        loop.append(loop)
        del graph, loop, caught
        comm.close()  # what only the collector can free is no live graph

    run(2, body)


def test_leaving_the_block_of_a_communicator_with_live_graphs_is_an_error_too() -> None:
    def body(comm: Communicator) -> None:
        graphs = []
        with pytest.raises(LiveGraphsError), comm:
            graphs.append(captured(comm, comm.empty(3, "i4")))
        comm.barrier()
        with pytest.raises(ZeroDivisionError), comm:  # an error on the way out is not hidden
            1 / 0  # noqa: B018
        with pytest.raises(cupy_zc.ClosedError):
            comm.leases()

    run(2, body)


def test_after_a_forced_close_a_replay_does_nothing_and_reports() -> None:
    def body(comm: Communicator) -> None:
        pool, peer = pool_of(comm), 1 - comm.rank
        array = array_of(pool)
        stream = comm._driver.make_stream()
        stream.begin_capture()
        comm.all_reduce(array, array, stream=stream)
        graph = stream.end_capture()
        stream.begin_capture()
        comm.send_recv(array, array, peer, stream=stream)
        letters = stream.end_capture()
        fill(array, 5)
        comm.barrier()
        comm.close(force=True)
        comm.close()
        for each in (graph, letters):
            with pytest.raises(cupy_zc.ClosedError, match=r"replayed.*is closed.*did nothing"):
                each.launch(stream)
        with stream.hold():
            graph.launch(stream)
        with pytest.raises(cupy_zc.ClosedError):
            stream.synchronize()
        assert (cupy_zc.view(array) == 5).all()
        address = array.data.ptr
        del array  # the graph can still run, and may have other nodes that write to it
        assert address not in {each.data.ptr for each in [array_of(pool) for _ in range(50)]}
        del graph, letters, each
        work.collected(lambda: not comm._registry.leases.live())
        assert address in {each.data.ptr for each in [array_of(pool) for _ in range(100)]}

    run(2, body)


@pytest.mark.parametrize("closing", [True, False])
@pytest.mark.parametrize("order", ["cpag", "pacg", "apcg", "gpac", "acpg", "gcap"])
def test_communicator_pool_arrays_and_graph_may_go_in_any_order(order: str, closing: bool) -> None:
    def body(comm: Communicator) -> None:
        part = comm.split(0)
        assert part is not None
        pool = pool_of(comm)
        arrays = [array_of(pool), part.empty(100, "i4")]
        graph, stream = captured(part, *arrays)
        sockets: list[Any] = [part._talk, part._letters, part._bootstrap]  # which want to be closed
        things: dict[str, list[Any]] = {"p": [pool], "a": arrays, "g": [graph], "c": [part]}
        del pool, graph, arrays, part
        meet(comm)
        closed = False
        for which in order:
            if which == "c" and closing:
                things["c"][0].close(force=True)
                closed = True
            things[which].clear()
            gc.collect()
            if things["g"]:
                meet(comm)
                # The graph of a communicator that was only dropped works on.
                with pytest.raises(cupy_zc.ClosedError) if closed else nullcontext():
                    things["g"][0].launch(stream)
        meet(comm)
        work.collected(lambda: not _ties())
        for each in sockets:
            each.close()
        meet(comm)

    run(2, body)


def _ties() -> list[Any]:
    from cupy_zc.memory import graphs

    graphs.settle()
    return list(graphs._ties)
