"""The device engine without a GPU: collectives, mail and streams, on kernels run by the host.

The engine, its kernels and the package around them are the ones of a GPU; the driver is that of
``emulated_driver``. Ranks are threads that share a device.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from collective_memory import filled, got, put
from collective_workers import Buffers, meet
from device_ranks import device, engine_of, ranks, zero_copy
from emulated_driver import EmulatedDriver

from cupy_zc import Communicator, MemoryPool
from cupy_zc.collectives import device_kernels, device_tables
from cupy_zc.collectives.device_args import Args
from cupy_zc.collectives.plan import Operation
from cupy_zc.driver.api import KernelName

__all__ = ["device"]  # a fixture

pytestmark = pytest.mark.timeout(200)

F4 = np.dtype("f4")
#: Thresholds in bytes, by ranks: a largest that has no row, a smallest that all have.
NONE, ALL = {8: 0}, {8: 1}


def choose(patch: pytest.MonkeyPatch, algorithms: str) -> None:
    """Let calls of tests go the ways of larger ones; when the lanes are made."""
    if algorithms == "small":
        return
    for table in (name for name in vars(device_tables) if name.startswith("LL128")):
        patch.setattr(device_tables, table, NONE)
    for table in ("PUSH_REDUCE", "PUSH_REDUCE_SCATTER"):
        patch.setattr(device_tables, table, ALL if algorithms == "largest" else {8: 1 << 62})


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


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("count", [1000, 20_000, 33_003, 75_001, 200_000])
def test_arrays_of_all_sizes_are_reduced_gathered_and_exchanged(
    device: EmulatedDriver, n: int, count: int
) -> None:
    """Each size another algorithm, whole grids and several chunks."""
    with ranks(n, device) as comms:

        def body(comm: Communicator) -> set[str]:
            given = [
                np.random.default_rng(r).integers(-99, 99, count * n).astype("f4") for r in range(n)
            ]
            source, seen = filled(comm, given[comm.rank]), set()
            target, part = comm.empty(count * n, "f4"), comm.empty(count, "f4")

            def compare(array: cupy.ndarray, wanted: Any) -> None:
                meet(comm)
                np.testing.assert_array_equal(got(array), wanted)
                assert zero_copy(comm)
                assert comm.last_transfer is not None
                seen.add(comm.last_transfer.algorithm)

            meet(comm)
            comm.all_reduce(source, target)
            total = np.sum(given, axis=0)
            compare(target, total)
            mine = slice(count * comm.rank, count * (comm.rank + 1))
            comm.all_reduce(source[:count], part)
            compare(part, total[:count])
            comm.reduce_scatter(source, part, count)
            compare(part, total[mine])
            comm.all_gather(part, target, count)
            compare(target, total)
            comm.all_to_all(source, target)
            compare(target, np.concatenate([each[mine] for each in given]))
            comm.broadcast(source, n - 1)
            compare(source, given[n - 1])
            return seen

        seen = set.union(*work.run(comms, body))
        large = {"two_shot", "one_shot", "push"} if count < 100_000 else {"push_reduce", "push"}
        assert seen == {"ll128"} if count < 10_000 else seen & large


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("n", "algorithms"), [(2, "small"), (3, "large")])
def test_every_dtype_and_op_does_what_numpy_says(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, n: int, algorithms: str
) -> None:
    device.library.prepare(
        KernelName(
            "ll128.cu", "", (f"CUPY_ZC_ELEMENT={element}", f"CUPY_ZC_OPERATION={op.title()}")
        )
        for element, dtype in zip(device_kernels._ELEMENTS, work.DTYPES, strict=True)
        for op in work.REDUCTIONS
        if work.allowed(dtype, op)
    )
    with ranks(n, device) as comms:
        choose(monkeypatch, algorithms)

        def body(comm: Communicator) -> None:
            buffers = Buffers.of(comm)
            for case in work.cases(n):
                work.check(comm, case, buffers)

        work.run(comms, body)


def test_where_lines_do_not_come_whole_another_protocol_is_taken(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends a warning that could not be worded, so that no communicator was made at all."""
    spoilt = threading.Lock()

    def launch(function: int, blocks: int, threads: int, stream: Any, parameters: int) -> None:
        EmulatedDriver.launch(device, function, blocks, threads, stream, parameters)
        name = device.kernels[function].name.function
        if name == "ll128_all_gather" and spoilt.acquire(blocking=False):
            args = Args.from_address(ctypes.c_uint64.from_address(parameters).value)
            row = args.output + (1 - args.rank) * args.count
            device.copy(row + 4, row, 8, stream)

    monkeypatch.setattr(device, "launch", launch)
    with ranks(2, device) as comms:
        monkeypatch.undo()
        assert "do not keep lines of 128 bytes whole (rank" in caplog.text
        assert {engine_of(comm)._machine.whole_lines for comm in comms} == {False}
        cases = [case for case in quick_cases(2) if case.count]

        def body(comm: Communicator) -> set[str]:
            buffers, seen = Buffers.of(comm), set()
            for case in cases[::3]:
                work.check(comm, case, buffers)
                assert comm.last_transfer is not None
                seen.add(comm.last_transfer.algorithm)
            return seen

        for seen in work.run(comms, body):
            assert seen == {"ll", "two_shot", "one_shot", "push"}


def test_the_ranks_of_a_split_call_each_other(device: EmulatedDriver) -> None:
    with ranks(3, device) as comms:

        def body(comm: Communicator) -> None:
            part = comm.split(comm.rank // 2, -comm.rank)
            assert part is not None
            assert part.backend == "device"
            with part:
                array = filled(part, np.full(100, comm.rank + 1, "f4"))
                whole = filled(comm, np.full(100, comm.rank + 1, "f4"))
                meet(comm)
                part.all_reduce(array, array)
                comm.all_reduce(whole, whole)
                part.synchronize()
                meet(comm)
                assert (got(array) == 3).all()  # 1 + 2, and the third by itself
                assert (got(whole) == 6).all()
                assert part.rank == (1 - comm.rank if comm.rank < 2 else 0)

        work.run(comms, body)


# Calls that are made again


def test_a_loop_repeats_its_call_until_registrations_change(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another ends where peers still find an array at the place where it was staged before."""
    with ranks(2, device) as comms:
        choose(monkeypatch, "large")

        def body(comm: Communicator) -> None:
            pool = MemoryPool(driver=device, segment_size=1 << 16)
            array = cupy.ndarray(3000, "f4", pool.malloc(12000))
            put(array, np.full(3000, comm.rank + 1, "f4"))
            stream = device.current_stream()

            def again() -> bool:
                repeat = engine_of(comm).repeat()
                return repeat is not None and repeat.launch(stream)

            meet(comm)
            comm.all_reduce(array, array)
            assert again()
            comm.all_reduce(array, array)
            meet(comm)
            assert (got(array) == 12).all()
            assert not zero_copy(comm)
            with comm.register(array):
                assert not again()
                comm.all_reduce(array, array)
                assert again()
                meet(comm)
                assert zero_copy(comm)
                assert (got(array) == 48).all()
            comm.collect()
            assert not again()
            comm.all_reduce(array, array)
            meet(comm)
            assert not zero_copy(comm)
            assert (got(array) == 96).all()

        work.run(comms, body)


@pytest.mark.parametrize(
    ("register", "registered"), [("manual", ()), ("manual", (0,)), ("manual", (0, 1)), ("auto", ())]
)
def test_two_ranks_reduce_large_arrays_of_any_memory_without_a_copy(
    device: EmulatedDriver,
    monkeypatch: pytest.MonkeyPatch,
    register: str,
    registered: tuple[int, ...],
) -> None:
    """It is registered on its own all the same: in two hops some sizes are quicker."""
    count = 30_001
    with ranks(2, device, strict=True, register=register) as comms:
        choose(monkeypatch, "largest")

        def body(comm: Communicator) -> None:
            pool = MemoryPool(driver=device, segment_size=1 << 18)
            given = [np.arange(count, dtype="f4") % (7 + rank) for rank in range(2)]
            source, target = (cupy.ndarray(count, "f4", pool.malloc(4 * count)) for _ in range(2))
            other = cupy.ndarray(1, "f4", pool.malloc(1 << 18))  # of another segment
            if registered:
                comm.register(target if comm.rank in registered else other)
            for output in (target, source):  # in place as well
                put(source, given[comm.rank])
                put(target, np.full(count, np.nan, "f4"))
                meet(comm)
                comm.all_reduce(source, output)
                meet(comm)
                np.testing.assert_array_equal(got(output), given[0] + given[1])
                assert zero_copy(comm)
                assert comm.last_transfer is not None
                assert comm.last_transfer.algorithm == "push_reduce"
                there = comm._registry.locate(output)[2]
                assert there == (register == "auto" or comm.rank in registered)

        work.run(comms, body)


def test_loops_over_several_arrays_of_one_shape_do_not_mix_them_up(device: EmulatedDriver) -> None:
    """They share the arguments of a kernel, which a loop over one of them fills only once."""
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            arrays = [filled(comm, np.full(100, comm.rank + each, "f4")) for each in range(3)]
            for turn in (0, 1, 1, 0, 0, 2, 2, 1, 2, 0):
                comm.all_reduce(arrays[turn], arrays[turn])
            comm.all_reduce(arrays[1], arrays[2])  # never made before
            comm.all_reduce(arrays[1], arrays[1])
            meet(comm)
            # The first call adds up both ranks, each later one doubles what they have alike.
            assert (got(arrays[0]) == 1 * 2**3).all()
            assert (got(arrays[1]) == 3 * 2**3).all()
            assert (got(arrays[2]) == 3 * 2**3).all()

        work.run(comms, body)


def test_more_arenas_than_the_first_table_has_are_reached(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks(2, device) as comms:
        choose(monkeypatch, "large")

        def body(comm: Communicator) -> None:
            first = filled(comm, np.full(50, comm.rank + 1, "f4"))
            comm.all_reduce(first, first)
            meet(comm)
            table = engine_of(comm)._windows
            before, small = table.address, table.arenas
            pools = [MemoryPool(driver=device, segment_size=1 << 12) for _ in range(small + 3)]
            arrays = [cupy.ndarray(50, "f4", pool.malloc(200)) for pool in pools]
            for array in arrays:
                comm.register(array)
            for number, array in enumerate(arrays):
                put(array, np.full(50, number + comm.rank, "f4"))
            meet(comm)
            for array in arrays:
                comm.all_reduce(array, array)
            comm.all_reduce(first, first)
            meet(comm)
            assert zero_copy(comm)
            assert table.arenas > small
            assert table.address != before
            for number, array in enumerate(arrays):
                assert (got(array) == 2 * number + 1).all()
            assert (got(first) == 6).all()

        work.run(comms, body)


# Streams


def test_calls_on_two_streams_come_one_after_the_other(device: EmulatedDriver) -> None:
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            one, other = (device.make_stream() for _ in range(2))
            array = filled(comm, np.full(5000, comm.rank + 1, "f4"))
            meet(comm)
            for _ in range(10):
                comm.all_reduce(array, array, stream=one)
                comm.all_reduce(array, array, stream=other)
            meet(comm)
            np.testing.assert_array_equal(got(array), np.full(5000, 3 * 2**19, "f4"))

        work.run(comms, body)


def test_ranks_that_share_a_device_may_use_the_null_stream(device: EmulatedDriver) -> None:
    with ranks(2, device) as comms:
        null = device._streams.null[0]

        def body(comm: Communicator) -> None:
            array = filled(comm, np.full(1000, comm.rank + 1, "f4"))
            meet(comm)
            for _ in range(5):
                comm.all_reduce(array, array, stream=null)
            assert (got(array) == 48).all()
            meet(comm)

        work.run(comms, body)
