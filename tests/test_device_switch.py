"""Multicast of the device engine, from the objects to the kernels, with ordinary accesses for both.

Every rank has a device of its own, of the host driver, which makes multicast objects; the host
probe and emulated multimem instructions stand in for those of a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import collective_workers as work
import numpy as np
import pytest
from collective_memory import filled, got
from collective_workers import meet
from device_ranks import engine_of
from emulated import build_directory
from emulated_driver import EmulatedDriver, emulated_device
from multicast_workers import run_elsewhere

from cupy_zc import Communicator, MulticastUnavailableError
from cupy_zc.cli.checks import switch
from cupy_zc.collectives import device as engine_module
from cupy_zc.collectives import device_multimem, device_switch
from cupy_zc.collectives.call import Call
from cupy_zc.collectives.device import DeviceEngine
from cupy_zc.collectives.device_multimem import MULTIMEM
from cupy_zc.collectives.dtypes import DTYPES
from cupy_zc.collectives.plan import REDUCTIONS, Operation
from cupy_zc.config import multicast_refusal
from cupy_zc.driver.api import KernelName
from cupy_zc.registration import HostProbe
from cupy_zc.registration.multicast import Multicast

pytestmark = pytest.mark.timeout(200)

_SUMS = ("CUPY_ZC_ELEMENT=int", "CUPY_ZC_OPERATION=Sum", "CUPY_ZC_MULTIMEM=Emulated")
_SUMMING = ("multimem_all_reduce.cu", "multimem_reduce_scatter.cu", "multimem_ll.cu")


@pytest.fixture
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmulatedDriver]:
    """Three devices, and tables that send all but the smallest messages through the switch."""
    monkeypatch.setattr(engine_module, "DeviceProbe", lambda registry, _: HostProbe(registry))
    monkeypatch.setattr(DeviceEngine, "multicast_kind", "emulated")
    for operation in MULTIMEM:
        monkeypatch.setitem(MULTIMEM, operation, {2: 1000, 8: 1000})
    monkeypatch.setattr(device_multimem, "MULTIMEM_LL", {2: 512, 8: 512})
    with emulated_device(build_directory(request.config), devices=3) as driver:
        driver.library.prepare(
            [KernelName("multimem_move.cu", "", _SUMS[2:])]
            + [KernelName(source, "", _SUMS) for source in _SUMMING]
        )
        yield driver


@contextmanager
def ranks(driver: EmulatedDriver, **options: Any) -> Iterator[list[Communicator]]:
    options = {"register": "manual", "devices": [0, 1, 2], **options}
    with work.communicators(3, driver=driver, **options) as comms:
        yield comms


@pytest.mark.skipif(multicast_refusal() is None, reason="multicast is not switched off here")
def test_the_rest_of_this_file() -> None:
    run_elsewhere(__file__)


needs_multicast = pytest.mark.skipif(multicast_refusal() is not None, reason="switched off here")


def summed(comm: Communicator, count: int) -> str:
    """The algorithm of a sum over all ranks that came out right."""
    array = comm.empty(count, "i4")
    part = filled(comm, np.full(count, comm.rank + 1, "i4"))
    meet(comm)
    comm.all_reduce(part, array)
    meet(comm)
    np.testing.assert_array_equal(got(array), np.full(count, 6, "i4"))
    assert comm.last_transfer is not None
    return comm.last_transfer.algorithm


@needs_multicast
def test_what_is_bound_goes_through_the_switch_once_that_was_proven(device: EmulatedDriver) -> None:
    with ranks(device, multicast="require") as comms:
        assert {comm.multicast.state for comm in comms} == {"on"}
        assert {engine_of(comm)._machine.multicast for comm in comms} == {"emulated"}
        assert device.multicast_objects_created > 0
        assert {comm.last_transfer for comm in comms} == {None}

        def body(comm: Communicator) -> list[str]:
            return [summed(comm, count) for count in (10, 1000)]

        assert work.run(comms, body) == [["multimem_ll", "multimem"]] * 3


@needs_multicast
def test_each_kernel_that_plans_take_is_tried(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: set[str] = set()
    launch = EmulatedDriver.launch

    def note(driver: EmulatedDriver, number: int, *rest: Any) -> None:
        tried.add(driver.kernels[number].name.function)
        launch(driver, number, *rest)

    monkeypatch.setattr(EmulatedDriver, "launch", note)
    with ranks(device):
        pass
    assert {name for name in tried if name.startswith("multimem")} == {
        "multimem_ll", "multimem_all_reduce", "multimem_reduce_scatter", "multimem_all_gather",
        "multimem_broadcast",
    }  # fmt: skip


@needs_multicast
@pytest.mark.parametrize("odd", [0, 2])
def test_one_wrong_element_on_one_rank_sends_all_over_the_links(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, odd: int
) -> None:
    expected = device_switch._expected

    def spoilt(call: Call, rank: int, size: int) -> Any:
        wanted = expected(call, rank, size).copy()
        wanted[-1] += rank == odd and call.operation is Operation.ALL_GATHER
        return wanted

    monkeypatch.setattr(device_switch, "_expected", spoilt)
    with ranks(device) as comms:
        words = {comm.multicast.reason for comm in comms}
        assert {comm.multicast.state for comm in comms} == {"unavailable"}
        assert len(words) == 1
        assert re.fullmatch(
            rf"all_gather of [\d,]+ elements through the switch gave rank {odd} 1 wrong ones",
            words.pop(),
        )
        assert {engine_of(comm)._machine.multicast for comm in comms} == {""}
        assert set(work.run(comms, lambda comm: summed(comm, 1000))) == {"ll128"}
    with pytest.raises(MulticastUnavailableError, match="through the switch gave"):
        Communicator.in_process(3, driver=device, devices=[0, 1, 2], multicast="require")


@needs_multicast
def test_a_lane_that_is_not_bound_is_told(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Multicast, "_is_bound", lambda *_: False)
    with ranks(device) as comms:
        assert {comm.multicast.state for comm in comms} == {"unavailable"}
        assert "lane of the device engine" in comms[0].multicast.reason


@needs_multicast
def test_the_self_test_tries_all_types_and_finds_what_is_wrong(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {
        Operation.ALL_REDUCE: [("int32", "sum"), ("bool", "sum"), ("complex64", "sum")],
        Operation.REDUCE_SCATTER: [("float32", "avg"), ("float16", "sum"), ("int64", "max")],
    }
    for operation, pairs in kinds.items():
        assert set(pairs) <= {
            (DTYPES[code], REDUCTIONS[reduction]) for code, reduction in switch._kinds(operation)
        }
    all_kinds = switch._kinds
    monkeypatch.setattr(
        switch,
        "_kinds",
        lambda operation: (
            [(DTYPES.index(dtype), REDUCTIONS.index(op)) for dtype, op in kinds[operation]]
            if operation in kinds
            else all_kinds(operation)
        ),
    )
    monkeypatch.setattr(switch, "_COUNTS", (1, 1000))
    monkeypatch.setattr(device_multimem, "MULTIMEM_LL", {2: 512, 8: 512})
    for operation in MULTIMEM:
        monkeypatch.setitem(MULTIMEM, operation, {2: 0, 8: 0})
    with ranks(device, multicast="require") as comms:
        results = list(switch.try_everything(comms, device.make_current))
        assert [(each.collective, each.dtype, each.op) for each in results] == [
            ("all_reduce", "int32", "sum"),
            ("all_reduce", "bool", "sum"),
            ("all_reduce", "complex64", "sum"),
            ("broadcast", "uint8", "none"),
            ("reduce_scatter", "float32", "avg"),
            ("reduce_scatter", "float16", "sum"),
            ("reduce_scatter", "int64", "max"),
            ("all_gather", "uint8", "none"),
        ]
        assert [each.wrong for each in results] == [0] * 8
        assert [each.compared for each in results] == [3 * 1001] * 7 + [9 * 1001]
        assert results[0].algorithms == ("multimem_ll", "multimem")
        assert {each.algorithms for each in results[3:]} == {("multimem",)}

        wanted = switch._wanted
        monkeypatch.setattr(switch, "_wanted", lambda *about: wanted(*about) + 1)
        wrong = next(switch.try_everything(comms, device.make_current))
        assert (wrong.wrong, wrong.compared) == (3 * 1001, 3 * 1001)
