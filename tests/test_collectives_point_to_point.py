"""send, recv and send_recv: rings, order, sizes, and what is copied."""

from __future__ import annotations

import os
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest

import cupy_zc
from cupy_zc import Communicator, MismatchError, PeerTimeoutError
from cupy_zc.driver.host import HostDriver


def _filled(comm: Communicator, value: Any, size: int = 5, dtype: Any = "i4") -> cupy.ndarray:
    array = cupy.ndarray(size, dtype, _pool(comm).malloc(size * np.dtype(dtype).itemsize))
    cupy_zc.copyto(array, value)
    return array


_pools: dict[int, cupy_zc.MemoryPool] = {}


def _pool(comm: Communicator) -> cupy_zc.MemoryPool:
    """One for each communicator, kept, for one that is dropped waits for the device."""
    return _pools.setdefault(
        id(comm), cupy_zc.MemoryPool(driver=comm._driver, segment_size=1 << 20)
    )


@pytest.fixture(autouse=True)
def _drop_pools() -> Any:
    yield
    _pools.clear()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [0, 5, 100_000])
def test_a_ring_of_sends_does_not_dead_lock(n: int, size: int) -> None:
    """Every rank sends before it receives, several times, and changes what it sent at once."""
    with work.communicators(n) as comms:

        def body(comm: Communicator) -> None:
            after, before = (comm.rank + 1) % n, (comm.rank - 1) % n
            given, taken = _filled(comm, 0, size), _filled(comm, -1, size)
            for turn in range(5):
                cupy_zc.copyto(given, 10 * comm.rank + turn)
                comm.send(given, after)
            for turn in range(5):
                comm.recv(taken, before)
                assert (cupy_zc.view(taken) == 10 * before + turn).all()
            comm.barrier()

        work.run(comms, body)


@pytest.mark.parametrize("dtype", work.DTYPES, ids=str)
def test_arrays_of_every_dtype_arrive(dtype: Any) -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            values = np.arange(-3, 4).astype(dtype)
            given, taken = (
                _filled(comm, values, 7, dtype),
                _filled(comm, np.zeros(7, dtype), 7, dtype),
            )
            comm.send(given, 1 - comm.rank)
            comm.recv(taken, 1 - comm.rank)
            np.testing.assert_array_equal(cupy_zc.view(taken), values)
            cupy_zc.copyto(taken, np.zeros(7, dtype))
            comm.send_recv(given, taken, 1 - comm.rank)
            np.testing.assert_array_equal(cupy_zc.view(taken), values)

        work.run(comms, body)


@pytest.mark.parametrize("placement", work.PLACEMENTS)
def test_a_send_recv_swaps_and_copies_only_what_is_not_registered(placement: str) -> None:
    with work.communicators(3, register="manual") as comms:

        def body(comm: Communicator) -> tuple[bool, str]:
            buffers = work.Buffers.of(comm)
            into, out_of = buffers.pick(placement, comm.rank)
            peer = (2 - comm.rank) % 3  # rank 1 with itself
            # The two directions have sizes and dtypes of their own.
            given = work.array_in(into, 3, 10 + comm.rank, np.dtype("i4"))
            taken = work.array_in(out_of, 5, 10 + peer, np.dtype("i4"))
            cupy_zc.copyto(given, comm.rank)
            for _ in range(3):
                comm.send_recv(given, taken, peer)
                assert (cupy_zc.view(taken) == peer).all()
            assert comm.last_transfer is not None
            comm.barrier()
            return comm.last_transfer.zero_copy, comm.last_transfer.reason

        told = work.run(comms, body)
        assert told[1][0]
        registered = placement in ("symmetric", "offsets")
        if placement != "mixed":  # there ranks 0 and 2 are registered
            assert [zero_copy for zero_copy, _ in (told[0], told[2])] == [registered] * 2
            assert bool(told[0][1]) != registered


def test_a_send_recv_in_place_swaps() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> bool:
            array = comm.empty(1000, "i8")
            cupy_zc.copyto(array, comm.rank)
            comm.send_recv(array, array, 1 - comm.rank)
            assert comm.last_transfer is not None
            assert not comm.last_transfer.zero_copy
            return bool((cupy_zc.view(array) == 1 - comm.rank).all())

        assert work.run(comms, body) == [True, True]


def test_a_send_recv_meets_a_send_and_a_recv() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> int:
            given, taken = comm.zeros(9, "i4"), comm.zeros(9, "i4")
            cupy_zc.copyto(given, comm.rank + 1)
            if comm.rank:
                comm.send_recv(given, taken, 0)
            else:
                comm.send(given, 1)
                comm.recv(taken, 1)
            return int(cupy_zc.asnumpy(taken)[0])

        assert work.run(comms, body) == [2, 1]


def test_what_arrives_out_of_order_is_refused_and_the_rest_still_comes() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> str:
            small, large = _filled(comm, 7, 3, "f4"), _filled(comm, 8, 9, "f4")
            if comm.rank == 0:
                comm.send(small, 1)
                comm.send(large, 1)
                return ""
            cupy_zc.copyto(large, 0)
            with pytest.raises(MismatchError) as caught:
                comm.recv(large, 0)  # the small one came first
            assert (cupy_zc.view(large) == 0).all()
            comm.recv(large, 0)
            assert (cupy_zc.view(large) == 8).all()
            return str(caught.value)

        text = work.run(comms, body)[1]
        assert "rank 0 sent 3 elements of float32 and rank 1 expects 9 elements of float32" in text
        assert "in the order" in text


@pytest.mark.parametrize("registered", [False, True])
def test_a_send_recv_that_does_not_fit_is_a_mismatch_on_both_sides(registered: bool) -> None:
    with work.communicators(2, register="manual") as comms:

        def swap(comm: Communicator) -> str:
            given, taken = _filled(comm, 1, 4, "i4"), _filled(comm, 0, 4 - comm.rank, "i4")
            if registered:
                comm.register(given)
            with pytest.raises(MismatchError) as caught:
                comm.send_recv(given, taken, 1 - comm.rank)
            assert (cupy_zc.view(taken) == 0).all()
            fits = _filled(comm, 0, 4, "i4")
            comm.send_recv(given, fits, 1 - comm.rank)
            assert (cupy_zc.view(fits) == 1).all()
            return str(caught.value)

        for text in work.run(comms, swap):
            assert "rank 0 sent 4 elements of int32 and rank 1 expects 3" in text


def test_arrays_in_fortran_order_meet_their_like_only() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            array = comm.empty((2, 3), "i4", "F" if comm.rank == 0 else "C")
            other = comm.empty((2, 3), "i4", "F")
            cupy_zc.copyto(other, np.arange(6).reshape(2, 3) * comm.rank)
            if comm.rank == 0:
                comm.send(array, 1)
                comm.send(other, 1)
            else:
                with pytest.raises(MismatchError, match="in Fortran order and rank 1 expects"):
                    comm.recv(array, 0)
                comm.recv(other, 0)
                assert (cupy_zc.view(other) == 0).all()

        work.run(comms, body)


def test_a_rank_that_receives_from_itself_without_a_send_is_told() -> None:
    with work.communicators(1) as (comm,):
        array = comm.empty(4, "i4")
        with pytest.raises(MismatchError, match="has sent nothing"):
            comm.recv(array, 0)
        comm.send(array, 0)
        with pytest.raises(MismatchError, match="4 elements of int32 and rank 0 expects 3"):
            comm.recv(comm.empty(3, "i4"), 0)
        comm.check()


def test_who_waits_for_a_message_that_never_comes_learns_it_at_the_deadline() -> None:
    with work.communicators(2, timeout=0.4) as comms:
        array = cupy.ndarray(4, "i4", _pool(comms[0]).malloc(16))
        with pytest.raises(PeerTimeoutError, match="for rank 1") as caught:
            comms[0].recv(array, 1)
        assert caught.value.ranks == (1,)
        with pytest.raises(cupy_zc.ClosedError, match="cannot be used"):
            comms[0].send(array, 1)
        with pytest.raises(PeerTimeoutError, match="rank 0 has gone"):
            comms[1].send_recv(array, cupy.ndarray(4, "i4", _pool(comms[0]).malloc(16)), 0)


def test_a_send_for_which_there_is_no_memory_leaves_the_ranks_in_step() -> None:
    driver = HostDriver(granularity=1 << 12, memory=200 << 20)
    with work.communicators(2, driver=driver, register="manual") as comms:

        def body(comm: Communicator) -> None:
            array = comm.empty(1000, "i4")
            cupy_zc.copyto(array, comm.rank)
            if comm.rank == 0:
                free = driver.memory_info(0).free
                taken = driver.create(0, free)
                with pytest.raises(cupy_zc.DriverError, match="OUT_OF_MEMORY"):
                    comm.send(array, 1)
                driver.release(taken)
                comm.send(array, 1)
            else:
                comm.recv(array, 0)
                assert (cupy_zc.view(array) == 0).all()
            comm.barrier()

        work.run(comms, body)


def test_sends_and_swaps_leave_nothing_behind(resources: Any) -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> int:
            given, taken = comm.empty(5000, "i4"), comm.empty(5000, "i4")
            for _ in range(3):
                comm.send(given, 1 - comm.rank)
                comm.recv(taken, 1 - comm.rank)
            comm.barrier()
            before = len(os.listdir("/proc/self/fd")) if comm.rank == 0 else 0  # noqa: PTH208
            comm.barrier()
            for _ in range(50):
                comm.send(given, 1 - comm.rank)
                comm.recv(taken, 1 - comm.rank)
                comm.send_recv(given, taken, 1 - comm.rank)
                comm.send_recv(given, given, 1 - comm.rank)
            comm.barrier()
            after = len(os.listdir("/proc/self/fd")) if comm.rank == 0 else 0  # noqa: PTH208
            comm.barrier()
            comm.send(given, 1 - comm.rank)  # and one that nobody receives
            comm.barrier()
            return after - before

        assert max(work.run(comms, body)) <= 0


def test_a_captured_send_sends_again_at_every_replay() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            given, taken = comm.empty(4, "i4"), comm.empty(4, "i4")
            stream = comm._driver.make_stream()
            stream.begin_capture()
            comm.send(given, 1 - comm.rank, stream=stream)
            comm.recv(taken, 1 - comm.rank, stream=stream)
            comm.send_recv(taken, given, 1 - comm.rank, stream=stream)
            graph = stream.end_capture()
            for turn in range(10):
                cupy_zc.copyto(given, 10 * turn + comm.rank)
                graph.launch(stream)
                stream.synchronize()
                assert (cupy_zc.view(taken) == 10 * turn + 1 - comm.rank).all()
                assert (cupy_zc.view(given) == 10 * turn + comm.rank).all()

        work.run(comms, body)
