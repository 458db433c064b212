"""The kernels of the switch under the device engine, without a GPU and without a multicast object.

Ordinary accesses stand in for the instructions. All else is as it is with multicast: the plan, the
engine, the bits in locations, the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import collective_workers as work
import numpy as np
import pytest
from collective_memory import filled, got
from collective_workers import Buffers, meet
from device_ranks import device, engine_of, ranks
from emulated_driver import EmulatedDriver

from cupy_zc import Communicator
from cupy_zc.collectives import device_multimem
from cupy_zc.collectives.device_multimem import MULTIMEM
from cupy_zc.driver.api import KernelName

__all__ = ["device"]  # a fixture

pytestmark = pytest.mark.timeout(120)

ALL_SIZES = {2: 0, 8: 0}
_SUMS = ("CUPY_ZC_ELEMENT=float", "CUPY_ZC_OPERATION=Sum", "CUPY_ZC_MULTIMEM=Emulated")
_SUMMING = ("multimem_all_reduce.cu", "multimem_reduce_scatter.cu", "multimem_ll.cu")


@pytest.fixture(autouse=True)
def everything_through_the_switch(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Tables that send all there is through it, whatever the size."""
    device.library.prepare(
        [KernelName("multimem_move.cu", "", _SUMS[2:])]
        + [KernelName(source, "", _SUMS) for source in _SUMMING]
    )
    for operation in MULTIMEM:
        monkeypatch.setitem(MULTIMEM, operation, ALL_SIZES)
    monkeypatch.setattr(device_multimem, "MULTIMEM_LL", {})
    yield
    assert device.multicast_objects_created == 0


@contextmanager
def switched(n: int, driver: EmulatedDriver, **options: Any) -> Iterator[list[Communicator]]:
    """Communicators whose registered arrays all count as bound to multicast."""
    with ranks(n, driver, **options) as comms:
        for comm in comms:
            engine_of(comm).use_multicast("emulated", lambda *_: True)
            assert engine_of(comm)._machine.multicast == "emulated"
        yield comms


@pytest.mark.parametrize(("n", "packets"), [(2, False), (3, False), (3, True)])
def test_every_collective_of_the_switch_does_what_numpy_says(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, n: int, packets: bool
) -> None:
    if packets:
        monkeypatch.setattr(device_multimem, "MULTIMEM_LL", {2: 4096, 8: 4096})
    cases = [
        case._replace(op="sum", dtype=np.dtype("f4"))
        for case in work.cases(n)
        if case.operation in MULTIMEM and (str(case.dtype) == "float32" or not case.count)
    ]
    with switched(n, device) as comms:

        def body(comm: Communicator) -> set[str]:
            buffers = Buffers.of(comm)
            seen = set()
            for case in dict.fromkeys(cases):
                work.check(comm, case, buffers)
                assert comm.last_transfer is not None
                seen.add(comm.last_transfer.algorithm)
            return seen

        wanted = {"multimem", "multimem_ll"} if packets else {"multimem"}
        assert all(seen == wanted for seen in work.run(comms, body))


@pytest.mark.parametrize("odd", [0, 2])
def test_an_array_that_one_rank_has_not_bound_sends_all_ranks_over_the_links(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, odd: int
) -> None:
    with switched(3, device) as comms:
        monkeypatch.setattr(engine_of(comms[odd])._places, "bound", lambda *_: False)

        def body(comm: Communicator) -> None:
            array = filled(comm, np.full(50_000, comm.rank + 1, "f4"))
            meet(comm)
            comm.all_reduce(array, array)
            comm.broadcast(array, odd)
            meet(comm)
            np.testing.assert_array_equal(got(array), np.full(50_000, 6, "f4"))

        work.run(comms, body)


def test_multicast_is_not_used_where_the_lane_of_a_graph_is_not_bound(
    device: EmulatedDriver,
) -> None:
    with switched(2, device) as comms:

        def body(comm: Communicator) -> None:
            engine = engine_of(comm)
            engine.use_multicast("emulated", lambda arena, _: arena == 0)
            array = filled(comm, np.full(1000, comm.rank + 1, "f4"))
            comm.all_reduce(array, array)
            assert comm.last_transfer is not None
            assert comm.last_transfer.algorithm == "multimem"
            made = engine.repeat()
            assert made is not None
            engine._places.bound = lambda *_: False
            stream = device.make_stream(non_blocking=True)
            stream.begin_capture()
            comm.all_reduce(array, array, stream=stream)
            graph = stream.end_capture()
            assert engine._machine.multicast == ""
            meet(comm)
            graph.launch(stream)
            stream.synchronize()
            assert not made.launch(device.current_stream())
            comm.all_reduce(array, array)
            meet(comm)
            assert comm.last_transfer.algorithm == "ll128"
            assert (got(array) == 12).all()

        work.run(comms, body)


def test_deterministic_sums_stay_out_of_the_switch_and_copies_do_not(
    device: EmulatedDriver,
) -> None:
    with switched(2, device, deterministic=True) as comms:

        def body(comm: Communicator) -> list[str]:
            array = filled(comm, np.full(1000, comm.rank + 1, "f4"))
            seen = []
            comm.all_reduce(array, array)
            assert comm.last_transfer is not None
            seen.append(comm.last_transfer.algorithm)
            comm.broadcast(array, 0)
            assert comm.last_transfer is not None
            seen.append(comm.last_transfer.algorithm)
            meet(comm)
            np.testing.assert_array_equal(got(array), np.full(1000, 3, "f4"))
            return seen

        assert work.run(comms, body) == [["ll128", "multimem"]] * 2
