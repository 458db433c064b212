"""The device engine without a GPU: collectives, mail and streams, on kernels run by the host.

The engine, its kernels and the package around them are the ones of a GPU; the driver is that of
``emulated_driver``. Ranks are threads that share a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from collective_workers import Buffers, got, meet, put
from emulated import build_directory
from emulated_driver import EmulatedDriver, emulated_device

import cupy_zc
from cupy_zc import Communicator, MemoryPool, MismatchError
from cupy_zc.collectives import device_plan
from cupy_zc.collectives.device_calls import RepeatedCall
from cupy_zc.collectives.plan import Operation
from cupy_zc.driver.api import KernelName

pytestmark = pytest.mark.timeout(200)

F4 = np.dtype("f4")
#: What this module runs, compiled side by side.
KERNELS = [
    KernelName("ll128.cu", "", ("CUPY_ZC_ELEMENT=float", "CUPY_ZC_OPERATION=Sum")),
    KernelName("mail.cu", ""),
    KernelName("pattern.cu", ""),
]
#: Thresholds in bytes, by ranks: a largest that has no row, a smallest that all have.
NONE, ALL = {8: 0}, {8: 1}


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[EmulatedDriver]:
    with emulated_device(build_directory(request.config)) as driver:
        driver.library.prepare(KERNELS)
        yield driver


@contextmanager
def ranks(n: int, driver: EmulatedDriver, **options: Any) -> Iterator[list[Communicator]]:
    with work.communicators(n, driver=driver, **{"register": "manual", **options}) as comms:
        yield comms


def filled(comm: Communicator, numbers: Any) -> cupy.ndarray:
    """A registered array with these numbers. Collective."""
    values = np.asarray(numbers)
    array = comm.empty(values.shape, values.dtype)
    put(array, values)
    return array


def choose(patch: pytest.MonkeyPatch, algorithms: str) -> None:
    """Let calls of tests go the ways of larger ones; when the lanes are made."""
    if algorithms == "small":
        return
    for table in ("LL128_ONE_STEP", "LL128_TWO_STEPS", "LL128_ROW"):
        patch.setattr(device_plan, table, NONE)
    for table in ("PUSH_REDUCE", "PUSH_REDUCE_SCATTER"):
        patch.setattr(device_plan, table, ALL if algorithms == "largest" else {8: 1 << 62})


def quick_cases(n: int) -> list[work.Case]:
    """What is moved in every type; reduced in one, by one operation, as each takes a compiler."""
    chosen = []
    for case in work.cases(n):
        reduces = case.operation in (
            Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER,
        )  # fmt: skip
        if not reduces or case.dtype == F4:
            chosen.append(case._replace(op="sum"))
        elif not case.count:
            chosen.append(case._replace(dtype=F4))
    return list(dict.fromkeys(chosen))


@pytest.mark.parametrize(
    ("n", "algorithms"), [(1, "small"), (2, "small"), (3, "small"), (2, "large"), (3, "largest")]
)
def test_every_collective_does_what_numpy_says(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, n: int, algorithms: str
) -> None:
    cases = quick_cases(n)
    with ranks(n, device) as comms:
        choose(monkeypatch, algorithms)
        assert {comm.backend for comm in comms} == {"device"}

        def body(comm: Communicator) -> set[str]:
            buffers, seen = Buffers.of(comm), set()
            for case in cases:
                work.check(comm, case, buffers)
                assert comm.last_transfer is not None
                seen.add(comm.last_transfer.algorithm)
            comm.synchronize()
            return seen

        wanted = {
            "small": {"ll128"}, "large": {"two_shot", "one_shot", "push"},
            "largest": {"push_reduce", "push"},
        }  # fmt: skip
        for seen in work.run(comms, body):
            assert n == 1 or seen >= wanted[algorithms]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("n", "algorithms"), [(2, "small"), (3, "large")])
def test_every_dtype_and_op_does_what_numpy_says(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, n: int, algorithms: str
) -> None:
    with ranks(n, device, timeout=100) as comms:
        choose(monkeypatch, algorithms)

        def body(comm: Communicator) -> None:
            buffers = Buffers.of(comm)
            for case in work.cases(n):
                work.check(comm, case, buffers)

        work.run(comms, body)
