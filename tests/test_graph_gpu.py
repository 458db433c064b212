"""Graphs with collectives, on every engine: what a replay reads and writes, and who is told.

Ranks are threads. On the host driver the same tests run without a GPU. No multicast object is made.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from collective_workers import collected
from graph_ranks import BACKENDS, Rank, emulated, make, on_all, run

import cupy_zc
from cupy_zc import (
    ClosedError,
    MismatchError,
    enqueue,
    view,
)
from cupy_zc.memory.graphs import settle

__all__ = ["emulated"]  # a fixture

pytestmark = [BACKENDS, pytest.mark.usefixtures("emulated")]


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
        rank.meet()  # all kernels are loaded: no replay keeps a rank of the same GPU from that
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
        rank.comm.preload(eager.dtype, "max")  # a replay may wait for this rank when it is called
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


def test_a_collective_in_a_graph_waits_for_work_of_several_streams(backend: str) -> None:
    """One kernel before it is of its own stream, which it may overlap, the other is not."""

    def body(rank: Rank) -> None:
        one, two, three = (rank.empty() for _ in range(3))
        for value, array in enumerate((one, two, three), 1):
            rank.fill(array, value)
        rank.stream.synchronize()
        with rank.capturing() as made:
            rank.comm.all_reduce(one, one)
            rank.other.wait_event(rank.stream.record())
            enqueue(lambda: view(two).__iadd__(view(one)), rank.other)
            rank.comm.all_reduce(three, three)
            rank.stream.wait_event(rank.other.record())
            rank.comm.all_reduce(two, two)
        rank.meet()  # all kernels are loaded
        graph = made.pop()
        for wanted in ((2, 8, 6), (4, 24, 12), (8, 64, 24)):
            graph.launch(rank.stream)
            assert [set(rank.read(each).tolist()) for each in (one, two, three)] == [
                {value} for value in wanted
            ]
        rank.meet()

    on_all(backend, body)


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


def test_messages_of_a_graph_are_not_passed_after_a_forced_close(backend: str) -> None:
    """Nor is memory of the peer touched, which is gone by then."""

    def body(rank: Rank) -> None:
        given, taken = rank.empty(), rank.empty()
        rank.fill(given, 5)
        rank.stream.synchronize()
        graphs = []
        for call in (
            lambda: rank.comm.send_recv(given, taken, 1 - rank.rank),
            lambda: rank.comm.recv(taken, 1 - rank.rank),
            lambda: rank.comm.send(given, 1 - rank.rank),
        ):
            with rank.capturing() as made:
                call()
            graphs += made
        exchange, recv, send = graphs
        for turn in (exchange, send, recv, exchange):
            rank.fill(taken, 7)
            turn.launch(rank.stream)
            if turn is not send:
                assert (rank.read(taken) == 5).all()
        rank.fill(taken, 7)
        rank.stream.synchronize()
        rank.meet()
        rank.comm.close(force=True)
        for graph in graphs:
            with contextlib.suppress(ClosedError):  # the host driver can tell
                graph.launch(rank.stream)
        with contextlib.suppress(ClosedError):
            rank.stream.synchronize()
        assert (rank.read(taken) == 7).all()

    on_all(backend, body)


@pytest.mark.parametrize("call", ["all_reduce", "send_recv"])
def test_a_graph_keeps_what_it_reads_though_its_communicator_is_gone(
    backend: str, call: str
) -> None:
    """Ends: kernels of a replay read words in memory that others had got meanwhile."""

    def body(rank: Rank) -> Any:
        given, taken = rank.empty(), rank.empty()
        with rank.capturing() as made:
            if call == "all_reduce":
                rank.comm.all_reduce(given, taken)
            else:
                rank.comm.send_recv(given, taken, 1 - rank.rank)
        rank.comm.close(force=True)
        return made.pop()

    try:
        comms = make(backend, 2, timeout=20)
        engines = [weakref.ref(comm._engine) for comm in comms]
        graphs = run(comms, body)
        del comms
        gc.collect()
        assert all(engine() is not None for engine in engines)
        graphs.clear()

        def gone() -> bool:
            settle()  # as every request for memory does
            return all(engine() is None for engine in engines)

        collected(gone)
    finally:
        cupy_zc.uninstall()
