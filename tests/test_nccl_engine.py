"""The NCCL engine, its library played by a double, against NumPy; ranks are threads."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from collective_memory import filled, got
from collective_workers import Buffers
from device_ranks import device
from emulated_driver import EmulatedDriver
from fake_nccl import FakeNccl, FakeWorld, fake_nccl
from several_nodes import LARGE, SMALL, pretend

from cupy_zc import (
    AgreementError,
    ClosedError,
    Communicator,
    DriverError,
    Error,
    InvalidValueError,
    MismatchError,
    PeerTimeoutError,
)
from cupy_zc.collectives import device as device_engine
from cupy_zc.collectives import nccl as engine
from cupy_zc.collectives import opening
from cupy_zc.collectives.acts import Sizes
from cupy_zc.collectives.device_lane import DeviceLane
from cupy_zc.collectives.device_plan import device_plan
from cupy_zc.collectives.nccl_calls import refuse_nccl_reduction
from cupy_zc.collectives.plan import Operation
from cupy_zc.group import vote
from cupy_zc.registration import Registry

__all__ = ["device"]  # a fixture

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def nccl(device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    with fake_nccl(device) as made:
        for module in (engine, opening):
            monkeypatch.setattr(module, "load_nccl", lambda: made)
        yield made


def cases_of(size: int) -> list[work.Case]:
    """Those that NCCL can do."""
    return [
        case
        for case in work.cases(size)
        if case.op is None or not refuse_nccl_reduction(case.dtype, case.op)
    ]


@pytest.mark.parametrize(
    "node_of", [(0, 0), (0, 1), (0, 0, 1)], ids=["one node", "one rank a node", "uneven"]
)
def test_every_collective_does_what_numpy_says(
    device: EmulatedDriver, nccl: FakeNccl, node_of: tuple[int, ...]
) -> None:
    with pretend(node_of, driver=device, backend="nccl", register="manual") as comms:
        assert {comm.backend for comm in comms} == {"nccl"}

        def body(comm: Communicator) -> int:
            buffers = Buffers.of(comm)
            cases = cases_of(comm.size)
            for case in cases:
                work.check(comm, case, buffers)
            return len(cases)

        assert min(work.run(comms, body)) > 200


@pytest.mark.parametrize("sizes", [SMALL, LARGE, None], ids=["small", "large", "default"])
@pytest.mark.parametrize("node_of", [(0, 1), (0, 0, 1, 1)], ids=["2 x 1", "2 x 2"])
def test_rails_of_nccl_beside_nodes_of_kernels_do_what_numpy_says(
    device: EmulatedDriver, nccl: FakeNccl, node_of: tuple[int, ...], sizes: Sizes | None
) -> None:
    with pretend(node_of, sizes, driver=device, backend="hierarchical", register="manual") as comms:

        def body(comm: Communicator) -> None:
            buffers = Buffers.of(comm)
            for case in cases_of(comm.size)[:: 1 if comm.size < 4 else 30]:
                work.check(comm, case, buffers)

        work.run(comms, body)


def test_kernels_of_a_node_leave_multiprocessors_to_the_rails(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    """A second block of a kernel would go to each of those that the first ones left."""
    with pretend((0, 0, 1, 1), driver=device, backend="hierarchical", register="manual") as comms:
        engines: list[Any] = [comm._engine for comm in comms]
        for each in engines:
            machine = each._engine._machine
            plan = device_plan(Operation.ALL_REDUCE, 1 << 12, 4, machine)
            assert plan.function == "ll128_pair_all_reduce"
            assert plan.blocks <= machine.blocks
            alone = dataclasses.replace(machine, shared=False)
            assert device_plan(Operation.ALL_REDUCE, 1 << 12, 4, alone).blocks > plan.blocks


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1)], ids=["one node", "two nodes"])
def test_a_rank_that_does_not_come_ends_the_call_of_the_other_one(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]
) -> None:
    world = FakeWorld(device)
    monkeypatch.setattr(engine, "load_nccl", lambda: FakeNccl(world))
    with pretend(node_of, driver=device, backend="nccl", register="manual", timeout=1) as comms:
        late = comms[1]
        gone = node_of == (0, 0)

        def body(comm: Communicator) -> str:
            array = comm.empty(1000, "f4")
            comm.all_reduce(array, array)
            comm.synchronize()
            if comm is late:
                if gone:
                    comm._node.part()  # as if it had died
                return ""
            began = time.monotonic()
            with pytest.raises(PeerTimeoutError) as raised:
                comm.all_reduce(array, array)
                comm.synchronize()
            assert time.monotonic() - began < 5
            with pytest.raises(ClosedError):
                comm.all_reduce(array, array)
            return str(raised.value)

        said = work.run(comms, body)[0]
        assert ("rank 1 gone" in said) if gone else ("not over after 1 s" in said)
    world.stop()


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that do not reach each other's memory, as rank 1 finds out."""

    def try_mappings(lane: DeviceLane, registry: Registry, stream: Any) -> None:
        own = registry.channel.rank == 1
        vote(registry.channel, "reach peers", Error("another pattern came") if own else None)

    monkeypatch.setattr(device_engine, "try_mappings", try_mappings)


@pytest.mark.usefixtures("apart")
def test_gpus_that_do_not_reach_each_other_are_connected_by_nccl(
    device: EmulatedDriver, nccl: FakeNccl, caplog: pytest.LogCaptureFixture
) -> None:
    with work.communicators(2, driver=device) as comms:
        assert {comm.backend for comm in comms} == {"nccl"}

        def body(comm: Communicator) -> float:
            array = filled(comm, np.full(5, comm.rank + 1, "f4"))
            comm.all_reduce(array, array)
            comm.synchronize()
            return float(got(array)[0])

        assert work.run(comms, body) == [3.0, 3.0]
    assert "so NCCL is used: reach peers failed on rank 1" in caplog.text


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("backend", ["auto", "device"])
def test_gpus_that_do_not_reach_each_other_are_an_error_without_nccl(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    def missing() -> None:
        raise Error("NCCL is not there")

    monkeypatch.setattr(opening, "load_nccl", missing)
    with pytest.raises(AgreementError, match="reach peers failed on rank 1: Error: another"):
        Communicator.in_process(2, driver=device, backend=backend)


def test_reductions_that_nccl_has_not_are_refused_with_what_it_has(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    with pretend((0, 1), driver=device) as comms:
        assert comms[0].backend == "hierarchical"
        array = comms[0]._node.heap.allocate(16)
        shorts = cupy.ndarray(8, "i2", array)
        with pytest.raises(InvalidValueError, match="it has no int16"):
            comms[0].all_reduce(shorts, shorts)


@pytest.mark.parametrize(
    ("sizes", "late"),
    [
        pytest.param(SMALL, 1, id="small-1"),
        pytest.param(LARGE, 3, id="large-3"),
        pytest.param(SMALL, 3, id="small-3", marks=pytest.mark.slow),
        pytest.param(LARGE, 1, id="large-1", marks=pytest.mark.slow),
    ],
)
def test_no_node_takes_a_sum_that_misses_a_rank_of_another_one(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, sizes: Sizes, late: int
) -> None:
    """A kernel that gave up ended, and what it had not written went to the other nodes."""
    world = FakeWorld(device)
    monkeypatch.setattr(engine, "load_nccl", lambda: FakeNccl(world))
    options = {"driver": device, "backend": "hierarchical", "register": "manual", "timeout": 1}
    with pretend((0, 0, 1, 1), sizes, **options) as comms:

        def body(comm: Communicator) -> str:
            array = filled(comm, np.ones(96, "f4"))
            comm.all_reduce(array, array)
            comm.synchronize()
            assert (got(array) == 4).all()
            if comm.rank == late:
                return ""
            with pytest.raises((PeerTimeoutError, ClosedError)) as raised:
                comm.all_reduce(array, array)
                comm.synchronize()
            with pytest.raises(ClosedError):
                comm.all_reduce(array, array)
            return f"{type(raised.value).__name__}: {raised.value}"

        said = work.run(comms, body)
        mate = late - 1
        assert said[mate].startswith("PeerTimeoutError"), said
        assert f"rank {late % 2} did not come" in said[mate]
        assert all(text for rank, text in enumerate(said) if rank != late)
    world.stop()


def test_without_streams_that_wait_for_a_word_there_is_a_warning_and_no_gate(
    device: EmulatedDriver,
    nccl: FakeNccl,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[bool] = []

    def refuse(stream: Any, address: int) -> None:
        asked.append(device.capture_info(stream) is not None)
        if asked[-1]:
            raise DriverError("cuStreamWaitValue32", "CUDA_ERROR_NOT_SUPPORTED", 801)

    monkeypatch.setattr(device, "wait_until_zero", refuse)
    with pretend((0, 1), driver=device, backend="hierarchical") as comms:

        def body(comm: Communicator) -> float:
            array = filled(comm, np.ones(5, "f4"))
            comm.all_reduce(array, array)
            comm.synchronize()
            return float(got(array)[0])

        assert work.run(comms, body) == [2.0, 2.0]
    assert sorted(asked) == [False, False, True, True]  # tried, and not used
    assert "cannot let a stream wait: cuStreamWaitValue32" in caplog.text


@pytest.mark.parametrize("backend", ["nccl", "hierarchical"])
def test_a_message_to_itself_that_does_not_fit_ends_nothing(
    device: EmulatedDriver, nccl: FakeNccl, backend: str
) -> None:
    with pretend((0, 1), driver=device, backend=backend, register="manual") as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(5, "f4"))
            with pytest.raises(MismatchError, match="has sent nothing"):
                comm.recv(array, comm.rank)
            comm.all_reduce(array, array)
            comm.barrier()
            assert (got(array) == 2).all()

        work.run(comms, body)
