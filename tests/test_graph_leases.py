"""Leases: what a capture opens, registers and shows."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from graph_workers import array_of, captured, fill, pool_of, run

import cupy_zc
from cupy_zc import Communicator


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
