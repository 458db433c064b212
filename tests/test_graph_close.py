"""Order of death: communicators, pools, arrays and graphs."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import collective_workers as work
import pytest
from graph_workers import array_of, captured, fill, live_ties, meet, pool_of, run

import cupy_zc
from cupy_zc import Communicator, LiveGraphsError


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
        sockets: list[Any] = [
            part._talk,
            part._node.letters,
            part._bootstrap,
        ]  # which want to be closed
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
        work.collected(lambda: not live_ties())
        for each in sockets:
            each.close()
        meet(comm)

    run(2, body)
