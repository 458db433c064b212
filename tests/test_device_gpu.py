"""The device engine on GPUs, with ranks in threads: collectives, mail, streams and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable

import collective_workers as work
import cupy
import numpy as np
import pytest
from collective_memory import filled, got, put
from collective_workers import Buffers, meet
from gpu_ranks import SIZES, TYPES, ranks

import cupy_zc
from cupy_zc import Communicator

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


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


@pytest.mark.parametrize("in_place", [(), (0,), (0, 1)])
def test_large_arrays_of_two_ranks_are_reduced_where_they_are(in_place: tuple[int, ...]) -> None:
    """In one hop; at an odd element, and in place on some ranks."""
    count = (40 << 20) // 4 + 12_345
    given = [np.arange(count, dtype="f4") % (1009 + rank) for rank in range(2)]
    wanted = given[0] + given[1]
    with ranks(2, strict=True) as comms:
        kept = [[_of_cuda_malloc(4 * count + 16) for _ in range(2)] for _ in comms]

        def body(comm: Communicator) -> None:
            source, target = (each[4 : 4 + 4 * count].view("f4") for each in kept[comm.rank])
            output = source if comm.rank in in_place else target
            for _ in range(3):
                put(source, given[comm.rank])
                put(target, np.full(count, np.nan, "f4"))
                meet(comm)
                comm.all_reduce(source, output)
                meet(comm)
                np.testing.assert_array_equal(got(output), wanted)
                transfer = comm.last_transfer
                assert transfer is not None
                assert (transfer.algorithm, transfer.zero_copy) == ("push_reduce", True)

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
