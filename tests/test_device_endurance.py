"""The device engine for long, and with much: many calls in a row, late ranks, 5 GiB, memcheck."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import collective_workers as work
import cupy
import group_workers
import numpy as np
import pytest
from collective_memory import filled, got
from collective_workers import meet
from gpu_ranks import ranks

from cupy_zc import Communicator

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(280)]

ROOT = Path(__file__).parents[1]
#: One GPU for both ranks, or one for each.
PLACES = [
    pytest.param(None, id="one GPU"),
    pytest.param([0, 1], id="two GPUs", marks=pytest.mark.multi_gpu),
]
_DELAY = r"""
extern "C" __global__ void delay(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
"""
DELAY = cupy.RawKernel(_DELAY, "delay")


@pytest.mark.parametrize("devices", PLACES)
def test_a_hundred_thousand_reductions_in_place_with_a_rank_that_is_late_now_and_then(
    devices: list[int] | None,
) -> None:
    """A buffer that is written or read at a wrong time shows, whoever is late."""
    rounds, n = 100_000, 2
    with ranks(n, devices=devices) as comms:

        def body(comm: Communicator) -> None:
            chance = np.random.default_rng(comm.rank)
            late = set(chance.integers(0, rounds, rounds // 100).tolist())
            arrays = [
                filled(comm, np.full(size, comm.rank + 1, "u4")) for size in (7, 3000, 70_000)
            ]
            DELAY((1,), (1,), (np.uint64(1),))  # loaded before a rank waits for this one
            meet(comm)
            for number in range(rounds):
                if number in late:
                    DELAY((1,), (1,), (np.uint64(chance.integers(1000, 100_000)),))
                comm.all_reduce(arrays[number % 3], arrays[number % 3])
                if number % 1000 == 999:
                    comm.synchronize()  # the queues of a GPU are not endless
            meet(comm)
            for index, array in enumerate(arrays):
                times = len(range(index, rounds, 3))
                wanted = pow(n, times - 1, 1 << 32) * (n * (n + 1) // 2) % (1 << 32)
                np.testing.assert_array_equal(got(array), np.full(array.size, wanted, "u4"))

        work.run(comms, body)


@pytest.mark.parametrize("devices", PLACES)
def test_five_gib_of_bytes(devices: list[int] | None) -> None:
    """Counts and offsets beyond 2 ** 32."""
    count = 5 << 30
    places = (0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, count - 1)
    with ranks(2, devices=devices, timeout=120) as comms:

        def body(comm: Communicator) -> None:
            array = comm.zeros(count, "u1")
            stream = comm._driver.current_stream()
            for place in places:  # each rank gives other bytes, so that an error of place shows
                comm._driver.fill(
                    array.data.ptr + place, 1 + comm.rank + places.index(place), 1, stream
                )
            meet(comm)
            comm.all_reduce(array, array)
            meet(comm)
            for number, place in enumerate(places):
                around = array[max(0, place - 1) : place + 2]
                at = min(place, 1)
                assert int(got(around)[at]) == 3 + 2 * number
            step = 1 << 28
            nonzero = 0
            for start in range(0, count, step):
                nonzero += int(cupy.count_nonzero(array[start : start + step]))
            assert nonzero == len(places)

        work.run(comms, body)


_ONE_RANK = """
import sys
sys.path.insert(0, "tests")
import cupy, numpy as np
import collective_workers as work
from collective_processes import over_tcp
rank, port = int(sys.argv[1]), int(sys.argv[2])
cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
with over_tcp(rank, 2, port, driver="cuda", timeout=120, register="manual") as comm:
    buffers = work.Buffers.of(comm)
    for operation in work.COLLECTIVES:
        for placement in work.PLACEMENTS:
            case = work.Case(operation, np.dtype("f4"), "sum", 1, 777, placement, False, 5)
            work.check(comm, case, buffers, manual=True)
    large, other = comm.zeros(1 << 22, "f4"), comm.zeros(1 << 22, "f4")
    comm.all_reduce(large, other)
    comm.send_recv(large, other, 1 - rank)
    comm.all_gather(large[: 1 << 20], other, 1 << 20)
    comm.synchronize()
print("done")
"""


def test_no_kernel_accesses_memory_that_is_not_its_own() -> None:
    """Of both ranks, each in a process of its own: the tool may run kernels of one in turns."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    port = group_workers.free_port()
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    running: list[subprocess.Popen[str]] = [
        subprocess.Popen(
            [*command, sys.executable, "-c", _ONE_RANK, str(rank), str(port)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outcomes: list[Any] = []
    try:
        for process in running:
            output, _ = process.communicate(timeout=250)
            outcomes.append((process.returncode, output))
    finally:
        for process in running:
            process.kill()
    for code, output in outcomes:
        assert code == 0, output
        assert "done" in output
        assert "ERROR SUMMARY: 0 errors" in output
