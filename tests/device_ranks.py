"""What tests of the device engine without a GPU share: a device, and ranks that share it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import collective_workers as work
import pytest
from emulated import build_directory
from emulated_driver import EmulatedDriver, emulated_device

from cupy_zc import Communicator
from cupy_zc.collectives.device import DeviceEngine
from cupy_zc.driver.api import KernelName
from cupy_zc.memory.pool import reap

__all__ = ["device", "engine_of", "ranks", "zero_copy"]

#: What most tests run, compiled side by side.
KERNELS = [
    KernelName("ll128.cu", "", ("CUPY_ZC_ELEMENT=float", "CUPY_ZC_OPERATION=Sum")),
    KernelName("mail.cu", ""),
    KernelName("pattern.cu", ""),
]


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[EmulatedDriver]:
    with emulated_device(build_directory(request.config)) as driver:
        driver.library.prepare(KERNELS)
        yield driver


@contextmanager
def ranks(n: int, driver: EmulatedDriver, **options: Any) -> Iterator[list[Communicator]]:
    """Ranks, after pools of earlier tests are gone: to release them later waits for the device."""
    gc.collect()
    reap()
    with work.communicators(n, driver=driver, **{"register": "manual", **options}) as comms:
        yield comms


def engine_of(comm: Communicator) -> DeviceEngine:
    engine = comm._engine
    assert isinstance(engine, DeviceEngine)
    return engine


def zero_copy(comm: Communicator) -> bool:
    """Whether no rank staged in the last call, which must have ended."""
    transfer = comm.last_transfer
    assert transfer is not None
    assert transfer.zero_copy == (not transfer.reason)
    return transfer.zero_copy
