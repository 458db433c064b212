"""What the ``cupy_zc`` logger says of what a person may want to count."""

from __future__ import annotations

import logging

import cupy
import pytest

import cupy_zc
from cupy_zc.driver.host import HostDriver


def test_a_registration_is_one_line_of_names_and_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = HostDriver()
    pool = cupy_zc.MemoryPool(driver=driver, segment_size=4 << 20)
    with cupy.cuda.using_allocator(pool.malloc):
        array = cupy.empty(100, "u1")
    (comm,) = cupy_zc.Communicator.in_process(1, driver=driver)
    with caplog.at_level(logging.INFO, "cupy_zc"), comm, comm.register(array):
        pass
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("registered")]
    assert line == f"registered rank=0 bytes={4 << 20} by=Communicator.register"
