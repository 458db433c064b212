"""The device engine on GPUs, with ranks in threads: collectives, mail, streams and errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from collective_workers import Buffers, got, meet, put

import cupy_zc
from cupy_zc import Communicator, MismatchError, PeerTimeoutError
from cupy_zc.driver import select

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

SIZES = [2, 3, 4, 8]
#: What the quick run compiles kernels for; the emulation covers all of them.
TYPES = {"bool", "int8", "float16", "float32", "int64", "complex128"}


@contextmanager
def ranks(n: int, **options: Any) -> Iterator[list[Communicator]]:
    with work.communicators(n, driver=select("cuda"), **{"register": "manual", **options}) as comms:
        yield comms


def filled(comm: Communicator, numbers: Any) -> cupy.ndarray:
    """A registered array with these numbers. Collective."""
    values = np.asarray(numbers)
    array = comm.empty(values.shape, values.dtype)
    put(array, values)
    return array


@pytest.mark.parametrize("n", [1, *SIZES])
def test_every_collective_does_what_numpy_says(n: int) -> None:
    cases = [
        case
        for case in work.cases(n)
        if str(case.dtype) in TYPES and (case.op in ("sum", "avg") or case.dtype == "f4")
    ]
    with ranks(n) as comms:
        assert {comm.backend for comm in comms} == {"device"}

        def body(comm: Communicator) -> None:
            buffers = Buffers.of(comm)
            for case in cases:
                work.check(comm, case, buffers)
            comm.synchronize()

        work.run(comms, body)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_every_dtype_and_op_does_what_numpy_says(n: int) -> None:
    with ranks(n, timeout=60) as comms:

        def body(comm: Communicator) -> None:
            buffers = Buffers.of(comm)
            for case in work.cases(n):
                work.check(comm, case, buffers)

        work.run(comms, body)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("count", [1 << 12, (1 << 18) + 3, (1 << 22) + 1, 3 << 22])
def test_arrays_of_all_sizes_are_reduced_gathered_and_exchanged(n: int, count: int) -> None:
    """Each size another algorithm, whole grids and several chunks."""
    with ranks(n) as comms:

        def body(comm: Communicator) -> None:
            rng = np.random.default_rng(comm.rank)
            given = [np.random.default_rng(r).integers(-99, 99, count * n, "i4") for r in range(n)]
            source = filled(comm, rng.integers(-99, 99, count * n, "i4"))
            target, part = comm.empty(count * n, "i4"), comm.empty(count, "i4")
            meet(comm)
            comm.all_reduce(source, target)
            meet(comm)
            total = sum(given)
            np.testing.assert_array_equal(got(target), total)
            comm.reduce_scatter(source, part, count)
            meet(comm)
            mine = slice(count * comm.rank, count * (comm.rank + 1))
            np.testing.assert_array_equal(got(part), total[mine])
            comm.all_gather(part, target, count)
            meet(comm)
            np.testing.assert_array_equal(got(target), total)
            comm.all_to_all(source, target)
            meet(comm)
            rows = [each.reshape(n, count)[comm.rank] for each in given]
            np.testing.assert_array_equal(got(target), np.concatenate(rows))
            comm.broadcast(target, n - 1)
            meet(comm)
            rows = [each.reshape(n, count)[n - 1] for each in given]
            np.testing.assert_array_equal(got(target), np.concatenate(rows))
            assert comm.last_transfer is not None
            assert comm.last_transfer.zero_copy, comm.last_transfer

        work.run(comms, body)


@pytest.mark.parametrize("n", [2, 4])
def test_many_reductions_in_place_with_new_data_each_time(n: int) -> None:
    """The wear and tear of low-latency buffers: one that is read too early or too late shows."""
    rounds = 3000
    with ranks(n) as comms:

        def body(comm: Communicator) -> None:
            arrays = [filled(comm, np.full(size, comm.rank + 1, "i4")) for size in (7, 3000, 70000)]
            meet(comm)
            for number in range(rounds):
                comm.all_reduce(arrays[number % 3], arrays[number % 3])
            meet(comm)
            for index, array in enumerate(arrays):
                times = len(range(index, rounds, 3))
                first = n * (n + 1) // 2
                with np.errstate(over="ignore"):
                    power = pow(n, times - 1, 1 << 32) * first % (1 << 32)
                np.testing.assert_array_equal(got(array), np.array(power, "u4").view("i4"))

        work.run(comms, body)


def test_bits_that_are_only_moved_stay_as_they_are() -> None:
    odd = np.array(
        [0x8000000000000000, 0x7FF0000000000001, 0xFFF8DEADBEEF0001, 1, 0x7FF0 << 48], "u8"
    )
    with ranks(2) as comms:

        def body(comm: Communicator) -> None:
            source = filled(comm, odd.view("f8"))
            target = comm.zeros(10, "f8")
            meet(comm)
            comm.all_gather(source, target, 5)
            meet(comm)
            np.testing.assert_array_equal(got(target).view("u8"), np.tile(odd, 2))
            comm.broadcast(source, 1)
            meet(comm)
            np.testing.assert_array_equal(got(source).view("u8"), odd)

        work.run(comms, body)


# Memory of every kind


def _of_cuda_malloc(nbytes: int) -> cupy.ndarray:
    return cupy.ndarray(nbytes, "u1", cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0))


def _managed(nbytes: int) -> cupy.ndarray:
    return cupy.ndarray(nbytes, "u1", cupy.cuda.malloc_managed(nbytes))


def _of_cupy_s_pool(nbytes: int) -> cupy.ndarray:
    return cupy.ndarray(nbytes, "u1", cupy.get_default_memory_pool().malloc(nbytes))


def _by_dlpack(nbytes: int) -> cupy.ndarray:
    return cupy.from_dlpack(_of_cuda_malloc(nbytes))


@pytest.mark.parametrize("make", [_of_cuda_malloc, _managed, _of_cupy_s_pool, _by_dlpack])
def test_arrays_of_any_memory_take_part(make: Callable[[int], cupy.ndarray]) -> None:
    counts = (5, 1000, 1 << 21)
    with ranks(2) as comms:
        kept = [[(make(8 * c + 16), make(4 * c + 16)) for c in counts] for _ in comms]

        def body(comm: Communicator) -> None:
            for count, (large, small) in zip(counts, kept[comm.rank], strict=True):
                source = small[4 : 4 + 4 * count].view("f4")
                target = large[12 : 12 + 8 * count].view("f4")
                put(source, np.full(count, comm.rank + 2, "f4"))
                meet(comm)
                comm.all_gather(source, target, count)
                comm.all_reduce(source, source)
                meet(comm)
                np.testing.assert_array_equal(got(source), np.full(count, 5, "f4"))
                np.testing.assert_array_equal(got(target), np.repeat(np.array([2, 3], "f4"), count))

        work.run(comms, body)


# Streams


def test_calls_on_two_streams_come_one_after_the_other() -> None:
    with ranks(2) as comms:

        def body(comm: Communicator) -> None:
            one, other = (cupy_zc.Stream(non_blocking=True, driver="cuda") for _ in range(2))
            array = filled(comm, np.full(100_000, comm.rank + 1, "i8"))
            meet(comm)
            for _ in range(20):
                comm.all_reduce(array, array, stream=one)
                comm.all_reduce(array, array, stream=other)
            meet(comm)
            np.testing.assert_array_equal(got(array), np.full(100_000, 3 * 2**39, "i8"))

        work.run(comms, body)


def test_a_stream_of_somebody_else_is_not_touched_after_the_call() -> None:
    """Its owner may destroy it: what the communicator needs of it is an event."""
    with ranks(2) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.full(1000, comm.rank + 1, "i4"))
            meet(comm)
            owner = cupy_zc.Stream(non_blocking=True, driver="cuda")
            with pytest.deprecated_call():
                foreign = cupy.cuda.ExternalStream(owner.ptr)
            comm.all_reduce(array, array, stream=foreign)
            owner.synchronize()
            del owner
            comm.all_reduce(array, array)
            meet(comm)
            np.testing.assert_array_equal(got(array), np.full(1000, 6, "i4"))

        work.run(comms, body)


@pytest.mark.multi_gpu
def test_ranks_of_one_process_may_have_a_gpu_each() -> None:
    with ranks(2, devices=[1, 0]) as comms:

        def body(comm: Communicator) -> None:
            with cupy.cuda.Device(comm._device), cupy_zc.Stream(driver="cuda"):
                buffers = Buffers.of(comm)
                for case in work.cases(2)[::7]:
                    work.check(comm, case, buffers)

        work.run(comms, body)


def test_ranks_that_share_a_gpu_may_use_the_null_stream() -> None:
    with ranks(2) as comms:
        arrays = [_of_cuda_malloc(4000).view("f4") for _ in comms]
        done = []

        def run(rank: int) -> None:
            with cupy.cuda.Stream.null:
                put(arrays[rank], np.full(1000, rank + 1, "f4"))
                for _ in range(5):
                    comms[rank].all_reduce(arrays[rank], arrays[rank])
                done.append(got(arrays[rank])[0])

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert done == [48, 48]


# Point to point


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("count", [0, 3, 5000, 1 << 20])
def test_a_ring_of_sends_before_any_receive_does_not_dead_lock(n: int, count: int) -> None:
    with ranks(n) as comms:

        def body(comm: Communicator) -> None:
            right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
            sent = [filled(comm, np.full(count, 10 * comm.rank + i, "f4")) for i in range(20)]
            taken = [comm.empty(count, "f4") for _ in sent]
            meet(comm)
            for array in sent:
                comm.send(array, right)
                array.data.memset_async(0, array.nbytes, cupy.cuda.get_current_stream())
            for array in taken:
                comm.recv(array, left)
            meet(comm)
            for i, array in enumerate(taken):
                np.testing.assert_array_equal(got(array), np.full(count, 10 * left + i, "f4"))

        work.run(comms, body)


@pytest.mark.parametrize("count", [0, 1, 2047, 2049, 300_001, 9 << 20])
def test_send_recv_exchanges_arrays_and_meets_a_send_and_a_recv(count: int) -> None:
    with ranks(2) as comms:

        def body(comm: Communicator) -> None:
            source = filled(comm, np.arange(count, dtype="f4") + comm.rank)
            target = comm.empty(count, "f4")
            meet(comm)
            comm.send_recv(source, target, 1 - comm.rank)
            meet(comm)
            np.testing.assert_array_equal(got(target), np.arange(count, dtype="f4") + 1 - comm.rank)
            if comm.rank:
                comm.send_recv(source, target, 0)
            else:
                comm.send(source, 1)
                comm.recv(target, 1)
            meet(comm)
            np.testing.assert_array_equal(got(target), np.arange(count, dtype="f4") + 1 - comm.rank)

        work.run(comms, body)


@pytest.mark.parametrize("count", [100, 3 << 20])
def test_what_goes_to_one_peer_keeps_its_order_whatever_calls_it_goes_by(count: int) -> None:
    """A send is pushed by itself; a send_recv right behind it must not overtake it."""
    with ranks(2) as comms:

        def body(comm: Communicator) -> None:
            peer = 1 - comm.rank
            sent = [filled(comm, np.full(count, 10 * comm.rank + i, "f4")) for i in range(6)]
            taken = [comm.empty(count, "f4") for _ in sent]
            meet(comm)
            for i in (0, 2, 4):
                comm.send(sent[i], peer)
                if i:  # the peer's half of it comes later than its sends
                    comm.recv(taken[i - 2], peer)
                    comm.recv(taken[i - 1], peer)
                comm.send(sent[i + 1], peer)
            comm.recv(taken[4], peer)
            comm.recv(taken[5], peer)
            comm.send(sent[0], peer)
            comm.recv(taken[0], peer)
            comm.send_recv(sent[1], taken[1], peer)
            meet(comm)
            for i, array in enumerate(taken):
                np.testing.assert_array_equal(got(array), np.full(count, 10 * peer + i, "f4"))

        work.run(comms, body)


def test_a_rank_sends_to_itself() -> None:
    with ranks(2) as comms:

        def body(comm: Communicator) -> None:
            one, other = filled(comm, np.arange(9)), comm.zeros(9, "i8")
            comm.send(one, comm.rank)
            put(one, np.zeros(9, "i8"))
            comm.recv(other, comm.rank)
            np.testing.assert_array_equal(got(other), np.arange(9))
            comm.send(one, comm.rank)
            with pytest.raises(MismatchError, match="8 elements of int64"):
                comm.recv(other[:8], comm.rank)
            with pytest.raises(MismatchError, match="has sent nothing"):
                comm.recv(other, comm.rank)

        work.run(comms, body)


def test_a_receiver_that_expects_another_array_is_told_and_nothing_is_written() -> None:
    with ranks(2) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.full(50, comm.rank, "f4"))
            meet(comm)
            if comm.rank:
                comm.recv(array[:40], 0)
                with pytest.raises(MismatchError, match="rank 0 has 50 elements of float32"):
                    comm.synchronize()
                np.testing.assert_array_equal(got(array), np.ones(50, "f4"))
            else:
                comm.send(array, 1)

        work.attempt(comms, body)


# Errors


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


# Life


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
