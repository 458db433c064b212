"""The kernels of the switch on GPUs without a multicast object: ordinary accesses stand in.

All else is as it is with multicast: the plan, the engine, the bits in locations, the kernels.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import collective_workers as work
import numpy as np
import pytest
from collective_memory import filled, got, put
from collective_workers import Buffers, Case, meet

import cupy_zc
from cupy_zc import Communicator, MismatchError, PeerTimeoutError
from cupy_zc.collectives import device_multimem
from cupy_zc.collectives.device_multimem import MULTIMEM
from cupy_zc.collectives.plan import Operation
from cupy_zc.driver import select

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

SIZES = [2, 4]
ALL_SIZES = {2: 0, 8: 0}


@pytest.fixture(autouse=True)
def everything_through_the_switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables that send all there is through it, whatever the size; NaN is no matter here."""
    before = select("cuda").multicast_objects_created
    for operation in MULTIMEM:
        monkeypatch.setitem(MULTIMEM, operation, ALL_SIZES)
    monkeypatch.setattr(device_multimem, "MULTIMEM_LL", {})
    monkeypatch.setattr(device_multimem, "_REFUSED", {})
    yield
    assert select("cuda").multicast_objects_created == before == 0


@contextmanager
def ranks(n: int, **options: Any) -> Iterator[list[Communicator]]:
    """Communicators whose registered arrays all count as bound to multicast."""
    with work.communicators(n, driver=select("cuda"), **{"register": "manual", **options}) as comms:
        for comm in comms:
            engine: Any = comm._engine
            engine.use_multicast("emulated", lambda *_: True)
            assert engine._machine.multicast == "emulated"
        yield comms


def test_multicast_is_not_used_where_a_lane_is_not_bound() -> None:
    with work.communicators(2, driver=select("cuda"), register="manual") as comms:
        for comm in comms:
            engine: Any = comm._engine
            engine.use_multicast("emulated", lambda *_: False)
            assert engine._machine.multicast == ""
        with pytest.MonkeyPatch.context() as later:
            for comm in comms:
                engine = comm._engine
                engine.use_multicast("emulated", lambda *_: True)
                later.setattr(engine._places, "bound", lambda *_: False)

            def body(comm: Communicator) -> str:
                engine: Any = comm._engine
                engine._open_lane(1)
                return str(engine._machine.multicast)

            assert work.run(comms, body) == ["", ""]


def switched(case: Case) -> bool:
    return case.operation in MULTIMEM


@pytest.mark.parametrize("n", SIZES)
def test_every_collective_of_the_switch_does_what_numpy_says(n: int) -> None:
    cases = [
        case
        for case in work.cases(n)
        if switched(case)
        and str(case.dtype) in {"float16", "float32", "int32"}  # each of them is compiled
        and (case.op == "sum" or (case.op == "max" and case.dtype == "i4"))
    ]
    with ranks(n) as comms:

        def body(comm: Communicator) -> set[str]:
            buffers = Buffers.of(comm)
            chosen = set()
            for case in cases:
                work.check(comm, case, buffers)
                assert comm.last_transfer is not None
                chosen.add(comm.last_transfer.algorithm)
            comm.synchronize()
            return chosen

        assert all("multimem" in chosen for chosen in work.run(comms, body))


@pytest.mark.slow
@pytest.mark.parametrize("packets", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_every_dtype_and_op_does_what_numpy_says(
    n: int, packets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packets:
        monkeypatch.setattr(device_multimem, "MULTIMEM_LL", {2: 4096, 8: 4096})
    with ranks(n, timeout=60) as comms:

        def body(comm: Communicator) -> None:
            buffers = Buffers.of(comm)
            for case in work.cases(n):
                if case.operation is Operation.ALL_REDUCE or (switched(case) and not packets):
                    work.check(comm, case, buffers)

        work.run(comms, body)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("count", [1, 1 << 12, (1 << 18) + 3, (1 << 22) + 1])
def test_arrays_of_all_sizes_go_through_the_switch(n: int, count: int) -> None:
    with ranks(n) as comms:

        def body(comm: Communicator) -> None:
            given = [np.random.default_rng(r).integers(-99, 99, count * n, "i4") for r in range(n)]
            source = filled(comm, given[comm.rank])
            target, part = comm.empty(count * n, "i4"), comm.empty(count, "i4")
            meet(comm)
            comm.all_reduce(source, target)
            meet(comm)
            total = np.sum(given, axis=0, dtype="i4")
            np.testing.assert_array_equal(got(target), total)
            comm.reduce_scatter(source, part, count)
            meet(comm)
            np.testing.assert_array_equal(
                got(part), total[count * comm.rank : count * (comm.rank + 1)]
            )
            comm.all_gather(part, target, count)
            meet(comm)
            np.testing.assert_array_equal(got(target), total)
            comm.broadcast(source, n - 1)
            meet(comm)
            np.testing.assert_array_equal(got(source), given[n - 1])
            assert comm.last_transfer is not None
            assert comm.last_transfer.algorithm == "multimem"
            assert comm.last_transfer.zero_copy, comm.last_transfer

        work.run(comms, body)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("packets", [False, True])
def test_many_reductions_in_place_with_new_data_each_time(
    n: int, packets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wear and tear of counters and packets: one that is read too early or too late shows."""
    if packets:
        monkeypatch.setattr(device_multimem, "MULTIMEM_LL", {2: 16 << 10, 8: 16 << 10})
    rounds, sizes = 3000, (7, 3000, 70000)
    with ranks(n) as comms:

        def body(comm: Communicator) -> None:
            arrays = [filled(comm, np.full(size, comm.rank + 1, "i4")) for size in sizes]
            meet(comm)
            for number in range(rounds):
                comm.all_reduce(arrays[number % 3], arrays[number % 3])
            meet(comm)
            for index, array in enumerate(arrays):
                times = len(range(index, rounds, 3))
                power = pow(n, times - 1, 1 << 32) * (n * (n + 1) // 2) % (1 << 32)
                np.testing.assert_array_equal(got(array), np.array(power, "u4").view("i4"))

        work.run(comms, body)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_an_array_that_one_rank_has_not_bound_sends_all_ranks_over_the_links(odd: int) -> None:
    with ranks(3) as comms:
        engine: Any = comms[odd]._engine
        engine._places.bound = lambda *_: False  # as if it had lost its window

        def body(comm: Communicator) -> None:
            array = filled(comm, np.full(50_000, comm.rank + 1, "f4"))
            meet(comm)
            comm.all_reduce(array, array)
            comm.broadcast(array, odd)
            meet(comm)
            np.testing.assert_array_equal(got(array), np.full(50_000, 6, "f4"))

        work.run(comms, body)


def test_bits_that_are_only_moved_stay_as_they_are() -> None:
    odd = np.array(
        [0x8000000000000000, 0x7FF0000000000001, 0xFFF8DEADBEEF0001, 1, 0x7FF0 << 48], "u8"
    )
    with ranks(2) as comms:

        def body(comm: Communicator) -> None:
            source, target = filled(comm, odd.view("f8")), comm.zeros(10, "f8")
            meet(comm)
            comm.all_gather(source, target, 5)
            meet(comm)
            np.testing.assert_array_equal(got(target).view("u8"), np.tile(odd, 2))
            comm.broadcast(source, 1)
            meet(comm)
            np.testing.assert_array_equal(got(source).view("u8"), odd)

        work.run(comms, body)


def test_deterministic_sums_stay_out_of_the_switch_and_copies_do_not() -> None:
    with ranks(2, deterministic=True) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.full(1000, comm.rank + 1, "f4"))
            comm.all_reduce(array, array)
            assert comm.last_transfer is not None
            assert comm.last_transfer.algorithm != "multimem"
            comm.broadcast(array, 0)
            assert comm.last_transfer.algorithm == "multimem"
            meet(comm)
            np.testing.assert_array_equal(got(array), np.full(1000, 3, "f4"))

        work.run(comms, body)


@pytest.mark.parametrize(("count", "kind", "op"), [(99, "f4", "sum"), (100, "i4", "max")])
def test_a_call_that_differs_is_a_mismatch_on_every_rank_and_writes_nothing(
    count: int, kind: str, op: str
) -> None:
    with ranks(3) as comms:

        def body(comm: Communicator) -> str:
            odd = comm.rank == 1
            array = comm.empty(400, "u1")
            for each, operation in (("f4", "sum"), (kind, op)):
                comm.all_reduce(array.view(each), array.view(each), operation)  # loaded
            put(array, np.full(400, 7, "u1"))
            view = array[: 4 * count].view(kind) if odd else array.view("f4")
            meet(comm)
            begin = time.monotonic()
            comm.all_reduce(view, view, op if odd else "sum")
            with pytest.raises(MismatchError) as caught:
                comm.synchronize()
            assert time.monotonic() - begin < 15
            np.testing.assert_array_equal(got(array), np.full(400, 7, "u1"))
            with pytest.raises(cupy_zc.ClosedError):
                comm.all_reduce(view, view)
            comm.close()
            return str(caught.value)

        for text in work.run(comms, body):
            assert "all_reduce(count=" in text


def test_a_rank_that_stops_calling_is_named_in_time_and_the_context_lives_on() -> None:
    with ranks(3, timeout=2) as comms:

        def body(comm: Communicator) -> None:
            array = comm.zeros(1 << 20, "f4")
            comm.all_reduce(array, array)  # compiled
            comm.synchronize()
            if comm.rank == 2:
                return
            begin = time.monotonic()
            comm.all_reduce(array, array)
            with pytest.raises(PeerTimeoutError, match="rank 2") as caught:
                comm.synchronize()
            assert caught.value.ranks == (2,)
            assert 1.5 < time.monotonic() - begin < 6
            put(array, np.ones(1 << 20, "f4"))
            np.testing.assert_array_equal(got(array), np.ones(1 << 20, "f4"))

        work.run(comms, body)
