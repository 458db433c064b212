"""What goes wrong in the device engine, without a GPU: every rank learns what it was, in time."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import time
from typing import Any

import collective_workers as work
import group_workers
import numpy as np
import pytest
from collective_memory import filled, got, put
from collective_workers import meet
from device_ranks import device, ranks
from emulated_driver import EmulatedDriver

from cupy_zc import AgreementError, ClosedError, Communicator, MismatchError, PeerTimeoutError
from cupy_zc.collectives import opening
from cupy_zc.group import in_process

__all__ = ["device"]  # a fixture

pytestmark = pytest.mark.timeout(120)


def made(n: int, driver: EmulatedDriver) -> list[Any]:
    """What it gives to each rank to make a communicator: that, or an error."""
    group = in_process(n)
    options = dataclasses.replace(
        opening.Options.of("test", driver=driver, timeout=20.0), threads=True
    )
    return group_workers.in_threads(
        n, lambda rank: opening.start(Communicator, group[rank], options)
    )


def close_all(comms: list[Communicator]) -> None:
    """Without force, and in any order."""
    for comm in comms:
        comm.close()
        comm.close()
        with pytest.raises(ClosedError, match="is closed"):
            comm.barrier()


@pytest.mark.usefixtures("resources")
def test_memory_that_is_not_shared_is_an_agreement_error_on_every_rank(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = threading.Lock()

    def launch(function: int, blocks: int, threads: int, stream: Any, parameters: int) -> None:
        EmulatedDriver.launch(device, function, blocks, threads, stream, parameters)
        name = device.kernels[function].name.function
        if name == "pattern_write" and spoilt.acquire(blocking=False):
            at = ctypes.c_uint64.from_address(ctypes.c_uint64.from_address(parameters).value)
            device.copy(at.value, at.value + 4, 4, stream)

    monkeypatch.setattr(device, "launch", launch)
    outcomes = made(3, device)
    for outcome in outcomes:
        assert isinstance(outcome, AgreementError)
        assert "reads 1 of 16,384 words wrong that" in str(outcome)
        assert "do not share memory as they say" in str(outcome)
    monkeypatch.undo()
    comms = made(3, device)  # nothing of the failure is left
    close_all(comms)


@pytest.mark.usefixtures("resources")
def test_a_kernel_that_cannot_be_had_is_an_agreement_error_on_every_rank(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = threading.Lock()

    def load(number: int, name: Any) -> int:
        if name.function == "mail" and once.acquire(blocking=False):
            raise RuntimeError("no compiler")
        return EmulatedDriver.load(device, number, name)

    monkeypatch.setattr(device, "load", load)
    for outcome in made(2, device):
        assert isinstance(outcome, AgreementError)
        assert "set up mail" in str(outcome)
        assert "no compiler" in str(outcome)


@pytest.mark.parametrize(
    ("culprit_count", "culprit_dtype", "culprit_op", "told"),
    [
        (99, "f4", "sum", "count=99, dtype=float32"),
        (100, "i4", "sum", "count=100, dtype=int32"),
        (100, "f4", "max", "op='max'"),
    ],
)
def test_a_call_that_differs_is_a_mismatch_on_every_rank_and_writes_nothing(
    device: EmulatedDriver, culprit_count: int, culprit_dtype: str, culprit_op: str, told: str
) -> None:
    with ranks(3, device) as comms:

        def body(comm: Communicator) -> str:
            odd = comm.rank == 1
            array = filled(comm, np.full(400, 7, "u1"))
            view = array[: 4 * (culprit_count if odd else 100)].view(culprit_dtype if odd else "f4")
            meet(comm)
            begin = time.monotonic()
            comm.all_reduce(view, view, culprit_op if odd else "sum")
            with pytest.raises(MismatchError) as caught:
                comm.synchronize()
            assert time.monotonic() - begin < 15
            np.testing.assert_array_equal(got(array), np.full(400, 7, "u1"))
            with pytest.raises(ClosedError) as later:
                comm.all_reduce(view, view)
            assert later.value.__cause__ is caught.value
            return str(caught.value)

        for rank, text in enumerate(work.run(comms, body)):
            assert told in text
            assert "op='sum'" in text
            assert f"and rank {rank} is at all_reduce(" in text
            assert "rank 1 is at all_reduce(" in text
        close_all(comms)


def test_another_collective_is_a_mismatch_on_every_rank_and_names_both(
    device: EmulatedDriver,
) -> None:
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> str:
            array = filled(comm, np.full(100, comm.rank, "f4"))
            meet(comm)
            with pytest.raises(MismatchError) as caught:
                if comm.rank:
                    comm.barrier()
                else:
                    comm.broadcast(array, 1)
                    comm.synchronize()
            assert (got(array) == comm.rank).all()
            return str(caught.value)

        for text in work.run(comms, body):
            assert "broadcast(count=100, dtype=float32" in text
            assert "barrier" in text
        close_all(comms)


def test_a_rank_that_does_not_come_is_named_in_time(device: EmulatedDriver) -> None:
    with ranks(3, device, timeout=1) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            comm.all_reduce(array, array)
            meet(comm)
            if comm.rank == 2:
                return
            begin = time.monotonic()
            comm.all_reduce(array, array)
            with pytest.raises(PeerTimeoutError, match="rank 2 did not come") as caught:
                comm.synchronize()
            assert caught.value.ranks == (2,)
            assert 0.8 < time.monotonic() - begin < 8
            with pytest.raises(ClosedError, match="rank 2 did not come"):
                comm.all_reduce(array, array)
            put(array, np.zeros(100, "f4"))
            assert not got(array).any()

        work.run(comms, body)
        close_all(comms)


def test_a_message_that_does_not_come_is_named_in_time(device: EmulatedDriver) -> None:
    with ranks(2, device, timeout=1) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            meet(comm)
            if comm.rank:
                return
            comm.recv(array, 1)
            with pytest.raises(PeerTimeoutError, match="rank 1 did not come") as caught:
                comm.synchronize()
            assert caught.value.ranks == (1,)
            assert got(array).all()

        work.run(comms, body)
        close_all(comms)


@pytest.mark.parametrize("late", [0.0, 1.5])
def test_a_rank_that_closes_is_not_waited_for_until_the_time_is_up(
    device: EmulatedDriver, late: float
) -> None:
    """It ends the blame of a rank that came, and had gone because of the one that did not."""
    with ranks(3, device, timeout=60) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            meet(comm)
            if comm.rank == 2:
                comm.close()
                return
            time.sleep(late * comm.rank)  # until rank 0 has gone as well
            begin = time.monotonic()
            comm.all_reduce(array, array)
            with pytest.raises(PeerTimeoutError, match="rank 2 ended and cannot come"):
                comm.synchronize()
            assert time.monotonic() - begin < 15

        work.run(comms, body)
        close_all(comms[:2])
