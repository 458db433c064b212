"""The NCCL engine, its library played by a double, against NumPy; ranks are threads."""

from __future__ import annotations

import time
from collections.abc import Iterator

import collective_workers as work
import pytest
from collective_workers import Buffers
from device_ranks import device
from emulated_driver import EmulatedDriver
from fake_nccl import FakeNccl, FakeWorld, fake_nccl
from several_nodes import LARGE, SMALL, pretend

from cupy_zc import ClosedError, Communicator, PeerTimeoutError
from cupy_zc.collectives import nccl as engine
from cupy_zc.collectives.acts import Sizes
from cupy_zc.collectives.nccl_calls import refuse_nccl_reduction

__all__ = ["device"]  # a fixture

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def nccl(device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    with fake_nccl(device) as made:
        monkeypatch.setattr(engine, "load_nccl", lambda: made)
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
