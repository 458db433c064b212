"""What the ``cupy_zc`` logger says of what a person may want to count."""

from __future__ import annotations

import logging

import collective_workers as work
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


def test_what_is_staged_is_said_once_and_its_registration_when_it_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = HostDriver()
    pool = cupy_zc.MemoryPool(driver=driver, segment_size=4 << 20)
    comms = cupy_zc.Communicator.in_process(2, driver=driver)
    with caplog.at_level(logging.INFO, "cupy_zc"):
        with cupy.cuda.using_allocator(pool.malloc):
            arrays = [cupy.empty(100, "f4") for _ in comms]

        def run(comm: cupy_zc.Communicator) -> None:
            for _ in range(5):
                comm.all_reduce(arrays[comm.rank], arrays[comm.rank])
            comm.close()

        work.run(comms, run)
    lines = [record.getMessage() for record in caplog.records]
    staged = [line for line in lines if line.startswith("staged rank=0 call=all_reduce reason=")]
    assert len(staged) == 1
    assert "is not registered" in staged[0]
    assert f"registered rank=0 bytes={4 << 20} by=collective call 1" in lines


def test_the_lease_of_a_graph_is_said_at_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    driver = HostDriver()
    (comm,) = cupy_zc.Communicator.in_process(1, driver=driver)
    stream = driver.make_stream()
    with caplog.at_level(logging.INFO, "cupy_zc"), comm:
        array = comm.zeros(10, "i4")
        with stream:
            stream.begin_capture()
            comm.all_reduce(array, array)
            graph = stream.end_capture()
        number = comm.leases()[0].graph
        del graph
        work.collected(lambda: not comm.leases())
    lines = [record.getMessage() for record in caplog.records]
    assert f"leased rank=0 graph={number}" in lines
    assert f"released rank=0 graph={number}" in lines
