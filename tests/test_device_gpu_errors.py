"""What goes wrong in the device engine on GPUs, with ranks in threads, and what stays behind."""

from __future__ import annotations

import time

import collective_workers as work
import numpy as np
import pytest
from collective_memory import got, put
from collective_workers import meet
from gpu_ranks import ranks

import cupy_zc
from cupy_zc import Communicator, MismatchError, PeerTimeoutError
from cupy_zc.driver import select

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    ("culprit_count", "culprit_dtype", "culprit_op"),
    [(99, "f4", "sum"), (100, "i4", "sum"), (100, "f4", "max")],
)
@pytest.mark.parametrize("size", [1, 1 << 17])
def test_a_call_that_differs_is_a_mismatch_on_every_rank_and_writes_nothing(
    culprit_count: int, culprit_dtype: str, culprit_op: str, size: int
) -> None:
    with ranks(3) as comms:

        def body(comm: Communicator) -> str:
            odd = comm.rank == 1
            count = size * (culprit_count if odd else 100)
            array = comm.empty(400 * size, "u1")
            for kind, op in (("f4", "sum"), (culprit_dtype, culprit_op)):
                warm = array[: 400 * size].view(kind)
                comm.all_reduce(warm, warm, op)  # loaded, before anybody waits
            put(array, np.full(400 * size, 7, "u1"))
            view = array[: 4 * count].view(culprit_dtype if odd else "f4")
            meet(comm)
            begin = time.monotonic()
            comm.all_reduce(view, view, culprit_op if odd else "sum")
            with pytest.raises(MismatchError) as caught:
                comm.synchronize()
            assert time.monotonic() - begin < 15
            np.testing.assert_array_equal(got(array), np.full(400 * size, 7, "u1"))
            with pytest.raises(cupy_zc.ClosedError):
                comm.all_reduce(view, view)
            comm.close()
            return str(caught.value)

        for text in work.run(comms, body):
            assert "all_reduce(count=" in text


def test_a_rank_that_stops_calling_is_named_in_time_and_the_context_lives_on() -> None:
    with ranks(3, timeout=2) as comms:

        def body(comm: Communicator) -> None:
            small, large = comm.zeros(10, "f4"), comm.zeros(1 << 21, "f4")
            comm.all_reduce(small, small)  # compiled
            comm.all_reduce(large, large)
            comm.synchronize()
            if comm.rank == 2:
                return
            begin = time.monotonic()
            comm.all_reduce(large, large)
            with pytest.raises(PeerTimeoutError, match="rank 2") as caught:
                comm.synchronize()
            assert caught.value.ranks == (2,)
            assert 1.5 < time.monotonic() - begin < 6
            with pytest.raises(cupy_zc.ClosedError):
                comm.all_reduce(small, small)
            put(small, np.ones(10, "f4"))
            np.testing.assert_array_equal(got(small), np.ones(10, "f4"))

        work.run(comms, body)


def test_two_hundred_communicators_leave_no_memory_behind() -> None:
    driver = select("cuda")
    free = []
    for number in range(200):
        with ranks(2) as comms:

            def body(comm: Communicator) -> None:
                one, other = comm.zeros(1000, "f4"), comm.zeros(1000, "f4")
                comm.all_reduce(one, one)
                comm.send(one, 1 - comm.rank)
                comm.recv(other, 1 - comm.rank)
                comm.synchronize()

            work.run(comms, body)
        if number in (40, 199):  # what CUDA allocates for a first time is there by then
            free.append(driver.memory_info(0).free)
    assert free[0] - free[1] < 32 << 20
