"""Calls of NCCL in graphs, its library played by a double; ranks are threads."""

from __future__ import annotations

import threading
from typing import Any

import collective_workers as work
import numpy as np
import pytest
from collective_memory import filled, got, put
from device_ranks import device
from emulated_driver import EmulatedDriver
from fake_nccl import FakeNccl
from graph_workers import array_of, captured, pool_of
from nccl_engines import careless, engines_of, eventually, nccl, places, ranks, watchers, within
from several_nodes import LARGE, SMALL

from cupy_zc import (
    AgreementError,
    ClosedError,
    Communicator,
    DriverError,
    LiveGraphsError,
    MismatchError,
)
from cupy_zc.collectives.acts import Sizes

__all__ = ["careless", "device", "nccl"]  # fixtures

pytestmark = pytest.mark.timeout(60)


def meet(comm: Communicator) -> None:
    """The hosts of all ranks."""
    comm._bootstrap.all_gather(b"")


def works(comm: Communicator) -> None:
    """The next call, and the next capture, are as the first ones; nothing is left of others."""
    assert comm.leases() == ()
    comm.collect()
    assert comm._registry.lanes.held == ()
    for engine in engines_of(comm):
        eventually(lambda engine=engine: not engine._graphs.alive())
    array = filled(comm, np.full(10, comm.rank + 1, "i4"))
    total = sum(range(1, comm.size + 1))
    graph, stream = captured(comm, array)
    meet(comm)
    graph.launch(stream)
    stream.synchronize()
    assert (got(array) == total).all()
    comm.all_reduce(array, array)
    comm.synchronize()
    assert (got(array) == total * comm.size).all()
    meet(comm)
    del graph
    work.collected(lambda: not comm.leases())


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@places
def test_replays_carry_fresh_data(
    device: EmulatedDriver, nccl: FakeNccl, backend: str, node_of: tuple[int, ...], sizes: Sizes
) -> None:
    if backend == "nccl" and sizes is LARGE:
        pytest.skip("it knows no sizes")
    with ranks(device, node_of, backend, sizes) as comms:

        def body(comm: Communicator) -> str:
            n, rank, pool = comm.size, comm.rank, pool_of(comm)
            one, summed = array_of(pool, 60, "f4"), array_of(pool, 60, "f4")
            rows, mine = array_of(pool, 60 * n, "f4"), array_of(pool, 60, "f4")
            gathered, spread = array_of(pool, 60 * n, "f4"), array_of(pool, 60, "f4")
            swapped = array_of(pool, 60 * n, "f4")
            stream = comm._driver.make_stream(non_blocking=True)
            stream.begin_capture()
            comm.all_reduce(one, summed, "avg", stream=stream)
            comm.reduce_scatter(rows, mine, 60, stream=stream)
            comm.all_gather(one, gathered, 60, stream=stream)
            comm.broadcast(spread, n - 1, stream=stream)
            comm.all_to_all(rows, swapped, stream=stream)
            said = comm.last_transfer
            graph = stream.end_capture()
            assert said is not None
            eager = filled(comm, np.ones(5, "i4"))
            for turn in range(3):
                data = np.arange(60, dtype="f4") + 100 * turn
                put(one, data + rank)
                put(rows, np.arange(60 * n, dtype="f4") * (rank + 1) + turn)
                put(spread, np.full(60, rank + turn, "f4"))
                meet(comm)
                graph.launch(stream)
                comm.all_reduce(eager, eager)
                stream.synchronize()
                np.testing.assert_allclose(got(summed), data + (n - 1) / 2, rtol=1e-6)
                at, scale = np.arange(60 * n)[60 * rank : 60 * rank + 60], n * (n + 1) // 2
                np.testing.assert_allclose(got(mine), at * scale + turn * n)
                np.testing.assert_array_equal(
                    got(gathered), np.concatenate([data + each for each in range(n)])
                )
                assert (got(spread) == n - 1 + turn).all()
                np.testing.assert_array_equal(
                    got(swapped), np.concatenate([at * (each + 1) + turn for each in range(n)])
                )
            comm.synchronize()
            assert (got(eager) == n**3).all()
            meet(comm)
            del graph
            work.collected(lambda: not comm.leases())
            works(comm)
            return said.registration

        said = set(work.run(comms, body))
        assert said == {"graph"} or backend == "hierarchical"


@places
def test_lanes_are_used_again(
    device: EmulatedDriver, nccl: FakeNccl, backend: str, node_of: tuple[int, ...]
) -> None:
    with ranks(device, node_of, backend) as comms:

        def body(comm: Communicator) -> list[int | None]:
            array, lanes = filled(comm, np.ones(20, "i4")), []
            for _ in range(3):
                graph, stream = captured(comm, array)
                lanes.append(comm.leases()[0].lane)
                meet(comm)
                graph.launch(stream)
                stream.synchronize()
                meet(comm)
                del graph
                work.collected(lambda: not comm.leases())
                comm.collect()
            works(comm)
            return lanes

        for lanes in work.run(comms, body):
            assert len(set(lanes)) == 1


@places
def test_captured_calls_that_differ_are_a_mismatch_and_recorded_nowhere(
    device: EmulatedDriver, nccl: FakeNccl, backend: str, node_of: tuple[int, ...]
) -> None:
    with ranks(device, node_of, backend) as comms:
        odd = len(comms) - 1

        def body(comm: Communicator) -> str:
            array = filled(comm, np.ones(100, "i4"))
            stream = comm._driver.make_stream(non_blocking=True)
            meet(comm)
            before = len(nccl.world.calls)
            meet(comm)
            stream.begin_capture()
            with within(5), pytest.raises(MismatchError) as caught:
                comm.all_reduce(array[: 50 + (comm.rank == odd)], array, stream=stream)
            stream.end_capture()
            meet(comm)
            assert len(nccl.world.calls) == before
            work.collected(lambda: not comm.leases())
            meet(comm)
            works(comm)
            return str(caught.value)

        for text in work.run(comms, body):
            assert "count=50" in text
            assert "count=51" in text


def test_a_lane_that_cannot_be_opened_on_one_node_is_opened_on_none(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl
) -> None:
    with ranks(device, (0, 0, 1, 1), "hierarchical") as comms:
        real = device.make_stream

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(20, "i4"))
            stream = real(non_blocking=True)
            if comm.rank == 3:
                broken = comm._engine

                def open_tiers(*_: Any) -> None:
                    raise DriverError("cuStreamCreate", "CUDA_ERROR_OUT_OF_MEMORY", 2)

                broken._open_tiers = open_tiers
            stream.begin_capture()
            with within(5), pytest.raises(AgreementError, match="OUT_OF_MEMORY"):
                comm.all_reduce(array, array, stream=stream)
            stream.end_capture()
            if comm.rank == 3:
                del comm._engine._open_tiers
            work.collected(lambda: not comm.leases())
            works(comm)

        work.run(comms, body)


# Closing


@places
def test_closing_beside_a_graph_is_refused_and_can_be_forced(
    device: EmulatedDriver, careless: FakeNccl, backend: str, node_of: tuple[int, ...]
) -> None:
    with ranks(device, node_of, backend) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.full(20, comm.rank, "f4"))
            graph, stream = captured(comm, array)
            with pytest.raises(LiveGraphsError):
                comm.close()
            put(array, np.full(20, comm.rank, "f4"))
            meet(comm)
            graph.launch(stream)
            stream.synchronize()
            assert (got(array) == sum(range(comm.size))).all()
            put(array, np.full(20, 7, "f4"))
            meet(comm)
            with within(5):
                comm.close(force=True)
            with pytest.raises(ClosedError):
                comm.all_reduce(array, array)

        work.run(comms, body)
    eventually(lambda: not careless.world.alive)


def test_a_forced_close_does_not_wait_for_the_graphs_and_replays_do_nothing_then(
    device: EmulatedDriver, careless: FakeNccl
) -> None:
    kept: list[Any] = []
    with ranks(device) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.full(20, 7, "f4"))
            graph, stream = captured(comm, array)
            kept.append((graph, stream, array))
            meet(comm)
            with within(5):
                comm.close(force=True)
            meet_all.wait(10)
            graph.launch(stream)
            stream.synchronize()
            assert (got(array) == 7).all()

        meet_all = threading.Barrier(2)
        work.run(comms, body)
        waiting = [each for each in watchers() if each.name == "cupy-zc nccl abort"]
        assert waiting  # NCCL's own call goes on
        kept.clear()
        work.collected(lambda: not any(each.is_alive() for each in waiting))
    assert not careless.world.alive


def test_a_replay_that_hangs_does_not_keep_a_forced_close(
    device: EmulatedDriver, careless: FakeNccl
) -> None:
    with ranks(device, timeout=1) as comms:
        closed = threading.Event()

        def body(comm: Communicator) -> None:
            array = filled(comm, np.full(20, 7, "f4"))
            graph, stream = captured(comm, array)
            comm.barrier()
            if comm.rank:
                closed.wait(10)  # it never replays
            else:
                graph.launch(stream)
                with within(8):
                    comm.close(force=True)
                assert stream.done
                assert (got(array) == 7).all()
                closed.set()
            del graph

        work.run(comms, body)


def test_a_graph_that_is_gone_is_no_reason_not_to_close(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    with ranks(device) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(20, "f4"))
            graph, stream = captured(comm, array)
            meet(comm)
            graph.launch(stream)
            stream.synchronize()
            comm.barrier()
            del graph
            comm.close()

        work.run(comms, body)
        assert {each.state for each in nccl.world.made} == {"destroyed"}
