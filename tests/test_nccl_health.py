"""Calls of NCCL that do not go well; ranks are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import collective_workers as work
import numpy as np
import pytest
from collective_memory import filled
from device_ranks import device
from emulated_driver import EmulatedDriver
from fake_nccl import FakeNccl
from graph_workers import captured
from nccl_engines import (
    SHORT,
    careless,
    engines_of,
    eventually,
    nccl,
    opened,
    places,
    ranks,
    within,
)

from cupy_zc import ClosedError, Communicator, DriverError, PeerTimeoutError
from cupy_zc.collectives import nccl_health

__all__ = ["careless", "device", "nccl"]  # fixtures

pytestmark = pytest.mark.timeout(60)


def is_over(comm: Communicator, array: Any) -> None:
    """Every call says that it cannot be used."""
    for call in (comm.check, comm.barrier, lambda: comm.all_reduce(array, array)):
        with pytest.raises(ClosedError):
            call()


@contextmanager
def failing(comm: Communicator, array: Any) -> Iterator[None]:
    """A block whose last call fails, or the next one does, in time; then all is over."""
    with within(SHORT + 6), pytest.raises(PeerTimeoutError):
        yield
        for _ in range(2000):
            comm.check()
            time.sleep(0.01)
    is_over(comm, array)


# What goes wrong


@places
def test_a_rank_that_never_comes_is_missed_by_all(
    device: EmulatedDriver, careless: FakeNccl, backend: str, node_of: tuple[int, ...]
) -> None:
    # Where a call is several steps, the first one takes longer.
    timeout = SHORT if backend == "nccl" else 2.0
    with ranks(device, node_of, backend, timeout=timeout) as comms:
        late = len(comms) - 1
        release = threading.Event()

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            comm.all_reduce(array, array)
            comm.synchronize()
            if comm.rank == late:
                release.wait(20)
                return
            try:
                with within(12), pytest.raises((PeerTimeoutError, ClosedError)):
                    for _ in range(2):  # another node may have got the first one, from its rail
                        comm.all_reduce(array, array)
                        comm.synchronize()
                is_over(comm, array)
            finally:
                release.set()

        work.run(comms, body)
    eventually(lambda: not careless.world.alive)


@pytest.mark.parametrize("node_of", [(0, 0), (0, 0, 1)], ids=str)
def test_a_rank_of_the_node_that_has_gone_is_found_long_before_the_timeout(
    device: EmulatedDriver, careless: FakeNccl, node_of: tuple[int, ...]
) -> None:
    with ranks(device, node_of, timeout=30) as comms:

        def body(comm: Communicator) -> str:
            array = filled(comm, np.ones(100, "f4"))
            comm.barrier()
            if comm.rank == 1:
                comm._node.part()  # as if it had died
                return ""
            if comm.rank == 2:
                return ""
            with within(5), pytest.raises(PeerTimeoutError) as caught:
                comm.all_reduce(array, array)
                comm.synchronize()
            assert caught.value.ranks == (1,)
            is_over(comm, array)
            return str(caught.value)

        assert "rank 1 gone; a call waits for it" in work.run(comms, body)[0]


def test_a_graph_that_waits_for_a_rank_that_has_gone_ends_long_before_the_timeout(
    device: EmulatedDriver, careless: FakeNccl
) -> None:
    with ranks(device, (0, 0), timeout=30) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            graph, stream = captured(comm, array)
            with comm._driver.use_device(comm._device), stream:
                comm.barrier()
                if comm.rank:
                    comm._node.part()
                    return
                graph.launch(stream)
                with within(5), pytest.raises(PeerTimeoutError, match="a graph may wait"):
                    comm.synchronize()
                    comm.check()
            del graph

        work.run(comms, body)


def test_an_error_in_the_background_is_raised_once_and_then_the_communicator_is_over(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    with ranks(device, timeout=30) as comms:

        def body(comm: Communicator) -> str:
            array = filled(comm, np.ones(100, "f4"))
            comm.barrier()
            if comm.rank == 0:
                nccl.world.async_errors[0] = "the network is down"
            else:
                nccl.world.async_errors[1] = "peer 0 closed the socket"
            eventually(lambda: engines_of(comm)[0].health.failure)
            with pytest.raises(PeerTimeoutError) as caught:
                comm.check()
            is_over(comm, array)
            return str(caught.value)

        said = work.run(comms, body)
        assert ["NCCL lost a rank: the network is down" in each for each in said] == [True, False]
        assert "peer 0 closed the socket" in said[1]
        nccl.world.async_errors.clear()


def test_a_rank_that_fails_lets_its_node_know(device: EmulatedDriver, careless: FakeNccl) -> None:
    with ranks(device, (0, 0), timeout=30) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            comm.barrier()
            if comm.rank == 0:
                careless.world.async_errors[0] = "the network is down"
                eventually(lambda: engines_of(comm)[0].health.failure)
                return
            with within(5), pytest.raises(PeerTimeoutError, match="rank 0 gone"):
                comm.all_reduce(array, array)
                comm.synchronize()

        work.run(comms, body)


def test_who_did_not_wait_is_told_once_by_the_next_call(
    device: EmulatedDriver, careless: FakeNccl
) -> None:
    with ranks(device, timeout=SHORT) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            if comm.rank:
                return
            comm.all_reduce(array, array)
            eventually(lambda: engines_of(comm)[0].health.failure)
            with pytest.raises(PeerTimeoutError, match="not over after"):
                comm.all_reduce(array, array)
            is_over(comm, array)

        work.run(comms, body)


def test_a_device_that_is_lost_is_an_error_of_the_next_call(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    with ranks(device, timeout=30) as comms:
        nccl.world.failures["async_error", 0] = ["UnhandledCudaError"]
        eventually(lambda: engines_of(comms[0])[0].health.failure)
        with pytest.raises(DriverError, match="UnhandledCudaError"):
            comms[0].check()
        with pytest.raises(ClosedError):
            comms[0].check()


def test_a_replay_whose_ranks_do_not_all_come_ends_in_time(
    device: EmulatedDriver, careless: FakeNccl
) -> None:
    with ranks(device, timeout=SHORT) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            comm.barrier()
            graph, stream = captured(comm, array)
            with comm._driver.use_device(comm._device), stream:
                comm.barrier()
                if comm.rank == 0:
                    graph.launch(stream)
                    with failing(comm, array):
                        comm.synchronize()
            del graph

        work.run(comms, body)


def test_a_replay_of_messages_that_nobody_answers_ends_in_time(
    device: EmulatedDriver, careless: FakeNccl
) -> None:
    with ranks(device, timeout=SHORT) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            stream = comm._driver.make_stream(non_blocking=True)
            with comm._driver.use_device(comm._device), stream:
                comm.barrier()
                stream.begin_capture()
                (comm.send if comm.rank else comm.recv)(array, 1 - comm.rank, stream=stream)
                graph = stream.end_capture()
                if comm.rank == 0:
                    graph.launch(stream)
                    with failing(comm, array):
                        comm.synchronize()
            del graph

        work.run(comms, body)


def test_a_replay_is_still_awaited_when_another_thread_has_waited(
    device: EmulatedDriver, careless: FakeNccl
) -> None:
    with ranks(device, timeout=SHORT) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            graph, stream = captured(comm, array)
            health = engines_of(comm)[0].health
            done = comm._driver.make_stream(non_blocking=True)
            with comm._driver.use_device(comm._device), stream:
                comm.barrier()
                if comm.rank == 0:
                    graph.launch(stream)
                    other = threading.Timer(0.2, health.wait, (done,))
                    other.start()
                    with failing(comm, array):
                        comm.synchronize()
                    other.join()
            del graph

        work.run(comms, body)


@pytest.mark.parametrize("function", ["all_reduce", "recv"])
def test_a_call_that_hangs_in_nccl_is_ended_there(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, careless: FakeNccl, function: str
) -> None:
    with ranks(device, timeout=SHORT) as comms:
        ended: list[bool] = []

        def hang(*arguments: Any) -> None:
            comm = arguments[-2]
            world = careless.world
            with world.changed:
                ended.append(world.wait(lambda: comm.aborted, seconds=10))
            raise DriverError("ncclAllReduce", "RemoteError", 6, cause="it was aborted")

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            comm.barrier()
            if comm.rank:
                return
            monkeypatch.setattr(careless, function, hang)
            with within(SHORT + 5), pytest.raises(PeerTimeoutError):
                if function == "recv":
                    comm.recv(array, 1)
                else:
                    comm.all_reduce(array, array)
            is_over(comm, array)
            cause = engines_of(comm)[0].health.failure
            assert isinstance(cause, PeerTimeoutError)
            assert "not over after" in str(cause)
            assert ended == [True]

        work.run(comms, body)


def test_who_is_about_to_call_nccl_when_it_is_aborted_does_not(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    """The double puts down a mistake where a communicator is used that was aborted."""
    with ranks(device, timeout=SHORT) as comms:
        (engine,) = engines_of(comms[0])
        engine.health.failure = failure = PeerTimeoutError("rank 0: too late", ())
        before = len(nccl.world.calls)
        with pytest.raises(PeerTimeoutError) as caught:
            engine.hand_over(nccl.all_reduce, (0, 0, 0, 0, 0), engine._driver.current_stream())
        assert caught.value is failure
        with pytest.raises(PeerTimeoutError), engine.health.calling():
            raise AssertionError
        assert engine.health.inside == 0.0
        assert len(nccl.world.calls) == before
        engine.health.failure = None


def test_a_communicator_is_not_aborted_under_a_call_that_ends_soon(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    with ranks(device, timeout=SHORT) as comms:
        (engine,) = engines_of(comms[0])
        with engine.health.calling():
            engine.fail(PeerTimeoutError("rank 0: too late", ()))
            time.sleep(nccl_health.COURTESY / 2)
            assert not engine._comm.aborted
        eventually(lambda: engine._comm.aborted)
        assert engine.health._errors() == ""  # it is not asked any more
        time.sleep(0.05)


def test_a_communicator_is_not_asked_for_errors_while_it_is_given_back(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl
) -> None:
    comms = opened(device, (0, 1), "nccl")
    asked, real = threading.Event(), nccl.async_error

    def async_error(comm: Any) -> str:
        asked.set()
        time.sleep(0.02)
        return real(comm)  # a mistake where it is gone

    monkeypatch.setattr(nccl, "async_error", async_error)
    for comm in comms:
        asked.clear()
        assert asked.wait(5)
        comm.close()
