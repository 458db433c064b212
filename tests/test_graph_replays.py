"""Replays of captured collectives."""

from __future__ import annotations

import threading

from graph_workers import array_of, captured, fill, fill_now, pool_of, run

import cupy_zc
from cupy_zc import Communicator


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
