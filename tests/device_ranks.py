"""What tests of the device engine without a GPU share: a device, and ranks that share it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from collective_workers import put
from emulated import build_directory
from emulated_driver import EmulatedDriver, emulated_device

from cupy_zc import Communicator
from cupy_zc.driver.api import KernelName

__all__ = ["device", "filled", "ranks"]

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
    with work.communicators(n, driver=driver, **{"register": "manual", **options}) as comms:
        yield comms


def filled(comm: Communicator, numbers: Any) -> cupy.ndarray:
    """A registered array with these numbers. Collective."""
    values = np.asarray(numbers)
    array = comm.empty(values.shape, values.dtype)
    put(array, values)
    return array
