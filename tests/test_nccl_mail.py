"""Point-to-point calls by NCCL; ranks are threads."""

from __future__ import annotations

import threading
import time
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from collective_memory import filled, got, put
from device_ranks import device
from emulated_driver import EmulatedDriver
from fake_nccl import FakeNccl
from nccl_engines import careless, engines_of, eventually, nccl, within
from several_nodes import pretend

from cupy_zc import ClosedError, Communicator, MismatchError, PeerTimeoutError
from cupy_zc.collectives import nccl_mail

__all__ = ["careless", "device", "nccl"]  # fixtures

pytestmark = pytest.mark.timeout(60)

spread = pytest.mark.parametrize("node_of", [(0, 0), (0, 1, 2), (0, 0, 1, 1)], ids=str)


def ranks(node_of: tuple[int, ...], device: EmulatedDriver, **options: Any) -> Any:
    return pretend(node_of, driver=device, backend="nccl", register="manual", **options)


@pytest.mark.parametrize("pairs", [64, 1], ids=["connected", "more ranks than are connected"])
@spread
def test_a_ring_of_sends_before_receives_goes_round_in_order(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl,
    node_of: tuple[int, ...], pairs: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(nccl_mail, "PAIRS", pairs)
    with ranks(node_of, device) as comms:
        connected = [part for _, part in nccl.world.calls if part.function == "all_to_all"]
        assert len(connected) == (2 * len(node_of) if pairs > 1 else 0)

        def body(comm: Communicator) -> None:
            n, rank = comm.size, comm.rank
            mine, taken = filled(comm, np.zeros(300, "i4")), filled(comm, np.zeros(300, "i4"))
            for turn in range(3):
                put(mine, np.full(300, 10 * rank + turn, "i4"))
                comm.send(mine, (rank + 1) % n)
                comm.synchronize()  # it was copied, and can be written
            for turn in range(3):
                comm.recv(taken, (rank - 1) % n)
                comm.synchronize()
                assert (got(taken) == 10 * ((rank - 1) % n) + turn).all()
            assert comm.last_transfer is not None
            assert comm.last_transfer.operation == "recv"

        work.run(comms, body)


@spread
def test_exchanges_go_both_ways_at_once_also_with_one_array(
    device: EmulatedDriver, nccl: FakeNccl, node_of: tuple[int, ...]
) -> None:
    with ranks(node_of, device) as comms:

        def body(comm: Communicator) -> list[str]:
            n, rank, said = comm.size, comm.rank, []
            mine, taken = filled(comm, np.full(50, rank, "i4")), filled(comm, np.zeros(50, "i4"))
            for turn in range(2 * n):
                peer = (turn - rank) % n  # whose peer is this rank, perhaps itself
                target = mine if turn >= n else taken
                put(mine, np.full(50, rank, "i4"))
                comm.send_recv(mine, target, peer)
                comm.synchronize()
                assert (got(target) == peer).all()
                assert comm.last_transfer is not None
                said.append(comm.last_transfer.reason)
            return said

        for said in work.run(comms, body):
            half = len(said) // 2
            assert set(said[:half]) == {""}
            assert all("overlaps" in each for each in said[half:])


def test_a_rank_sends_to_itself_in_order_and_an_error_there_is_no_end(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    with ranks((0, 1), device, timeout=3) as comms:

        def body(comm: Communicator) -> None:
            mine, taken = filled(comm, np.zeros(5, "i4")), filled(comm, np.zeros(5, "i4"))
            for turn in range(3):
                put(mine, np.full(5, turn, "i4"))
                comm.send(mine, comm.rank)
            for turn in range(3):
                comm.recv(taken, comm.rank)
                comm.synchronize()
                assert (got(taken) == turn).all()
            with pytest.raises(MismatchError, match="has sent nothing"):
                comm.recv(taken, comm.rank)
            comm.send(mine, comm.rank)
            with pytest.raises(MismatchError, match=r"sent .* to itself and expects"):
                comm.recv(taken[:3], comm.rank)
            comm.all_reduce(mine, mine)
            comm.barrier()

        work.run(comms, body)


def test_eager_messages_go_beside_an_exchange_that_is_captured(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    """It is not replayed: the double runs a graph in one order, in which both would send first."""
    with ranks((0, 1), device, timeout=3) as comms:

        def body(comm: Communicator) -> None:
            (engine,) = engines_of(comm)
            peer = 1 - comm.rank
            one, two = (comm._driver.make_stream(non_blocking=True) for _ in range(2))
            given, taken = (
                filled(comm, np.full(9, comm.rank, "i4")),
                filled(comm, np.zeros(9, "i4")),
            )
            one.begin_capture()
            comm.send_recv(given, taken, peer, stream=one)
            two.begin_capture()
            comm.send_recv(given, taken, peer, stream=two)
            comm.send(given, peer)
            comm.send_recv(given, taken, peer, stream=one)
            comm.recv(taken, peer)
            graphs = [one.end_capture(), two.end_capture()]
            assert sorted(lease.calls for lease in comm.leases()) == [1, 2]
            comm.synchronize()
            assert (got(taken) == peer).all()
            assert engine._graphs.alive()
            graphs.clear()
            work.collected(lambda: not comm.leases())
            eventually(lambda: not engine._graphs.alive())
            assert engine._mail is not None
            streams = [len(each) for each in engine._mail._ahead.values()]
            one.begin_capture()
            comm.send_recv(given, taken, peer, stream=one)
            one.end_capture()
            assert [len(each) for each in engine._mail._ahead.values()] == streams

        work.run(comms, body)


def test_a_captured_send_and_a_captured_receive_meet_when_they_are_replayed(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    with ranks((0, 1), device, timeout=3) as comms:

        def body(comm: Communicator) -> None:
            peer, stream = 1 - comm.rank, comm._driver.make_stream(non_blocking=True)
            array = filled(comm, np.zeros(9, "i4"))
            stream.begin_capture()
            if comm.rank:
                comm.recv(array, peer, stream=stream)
            else:
                comm.send(array, peer, stream=stream)
                assert comm.last_transfer is not None
                assert comm.last_transfer.zero_copy
            graph = stream.end_capture()
            for turn in range(3):
                put(array, np.full(9, 5 if comm.rank else turn, "i4"))
                graph.launch(stream)
                stream.synchronize()
                assert (got(array) == turn).all()
            comm.barrier()
            del graph
            work.collected(lambda: not comm.leases())

        work.run(comms, body)


def test_a_send_that_nobody_receives_ends_in_time_whatever_comes_after_it(
    device: EmulatedDriver, careless: FakeNccl
) -> None:
    with ranks((0, 1), device, timeout=0.7) as comms:

        def body(comm: Communicator) -> type[BaseException]:
            array = filled(comm, np.zeros(9, "i4"))
            if comm.rank == 0:
                comm.send(array, 1)
            with within(5), pytest.raises((PeerTimeoutError, ClosedError)) as caught:
                for _ in range(1000):
                    comm.all_reduce(array, array)
                    comm.synchronize()
                    time.sleep(0.01)
            return caught.type

        assert work.run(comms, body)[0] is PeerTimeoutError


def test_a_receive_of_what_nobody_sends_ends_in_time(
    device: EmulatedDriver, careless: FakeNccl
) -> None:
    with ranks((0, 1), device, timeout=0.7) as comms:
        comm = comms[1]

        def body() -> None:
            array = comm._heap.reserve(64)
            taken = cupy.ndarray(8, "i4", cupy.cuda.MemoryPointer(array, 0))
            comm.recv(taken, 0)
            with within(5), pytest.raises(PeerTimeoutError, match=r"not over after 0\.7 s"):
                comm.synchronize()
            with pytest.raises(ClosedError):
                comm.recv(taken, 0)

        work.on_stream(comm, lambda _: body())


@pytest.mark.parametrize("backend", ["device", "nccl"])
def test_what_was_sent_before_close_still_arrives(
    device: EmulatedDriver, nccl: FakeNccl, backend: str
) -> None:
    sent = threading.Event()
    with pretend((0, 0), driver=device, backend=backend, register="manual") as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.full(9, comm.rank, "i4"))
            if comm.rank == 0:
                comm.send(array, 1)
                sent.set()
                comm.close()
                return
            sent.wait(10)
            time.sleep(1.5)
            comm.recv(array, 0)
            comm.synchronize()
            assert (got(array) == 0).all()

        work.run(comms, body)
