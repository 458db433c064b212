"""Every collective, dtype, op, root, placement and in-place-ness on 1 to 8 ranks, against NumPy."""

from __future__ import annotations

from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from collective_workers import Buffers, Case
from hypothesis import given, settings
from hypothesis import strategies as st

import cupy_zc
from cupy_zc import MismatchError
from cupy_zc.collectives import plan as planning
from cupy_zc.collectives import reductions
from cupy_zc.collectives.plan import ROLES, Capabilities, Operation, plan
from cupy_zc.driver.host import HostDriver


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_every_collective_does_what_numpy_says(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SCRATCH_BYTES", 1 << 12)
    with work.communicators(n, register="manual") as comms:

        def body(comm: cupy_zc.Communicator) -> int:
            buffers = Buffers.of(comm)
            cases = work.cases(n)
            for case in cases:
                work.check(comm, case, buffers)
            return len(cases)

        assert min(work.run(comms, body)) > 300


def test_the_matrix_has_every_value_with_every_collective() -> None:
    cases = work.cases(3)
    for operation in work.COLLECTIVES:
        mine = [case for case in cases if case.operation is operation]
        assert {case.dtype for case in mine} == set(work.DTYPES)
        assert {(case.placement, case.in_place) for case in mine if case.count} == {
            (placement, in_place) for placement in work.PLACEMENTS for in_place in (False, True)
        }
        if ROLES[operation].reduces:
            assert {case.op for case in mine} == set(work.REDUCTIONS)
        if ROLES[operation].rooted:
            assert {case.root for case in mine} == {0, 1, 2}


_SHAPES = st.builds(
    Case,
    operation=st.sampled_from(work.COLLECTIVES),
    dtype=st.sampled_from(work.DTYPES),
    op=st.sampled_from(["sum", "prod"]),
    root=st.integers(0, 2),
    count=st.integers(0, 700),
    placement=st.sampled_from(work.PLACEMENTS),
    in_place=st.booleans(),
    lead=st.integers(0, 300),
)


@settings(max_examples=25, deadline=None)
@given(
    batch=st.lists(_SHAPES, min_size=6, max_size=6),
    scratch=st.sampled_from([48, 200, 1 << 10, 1 << 14]),
    block=st.sampled_from([7, 64, 1 << 16]),
)
def test_any_count_offset_and_chunk_gives_the_same_bytes_staged_or_not(
    batch: list[Case], scratch: int, block: int
) -> None:
    """Scratch smaller than the data makes many chunks; bits must not depend on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "SCRATCH_BYTES", scratch)
        patch.setattr(reductions, "BLOCK", block)
        with work.communicators(3, register="manual") as comms:

            def body(comm: cupy_zc.Communicator) -> list[set[bytes]]:
                buffers = Buffers.of(comm)
                return [
                    {
                        work.check(comm, case._replace(placement=placement), buffers)
                        for placement in (case.placement, "symmetric", "unregistered")
                    }
                    for case in batch
                ]

            results = work.run(comms, body)
    for number, case in enumerate(batch):
        assert all(len(result[number]) == 1 for result in results), case
        if case.operation is Operation.ALL_REDUCE:
            assert len(set.union(*(result[number] for result in results))) == 1


@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f4", "f8", "c8"])
def test_sums_that_round_are_bitwise_equal_on_all_ranks_and_in_both_ways(dtype: str) -> None:
    kind = (
        next(each for each in work.DTYPES if each.name == np.dtype(dtype).name)
        if dtype != "bfloat16"
        else work.DTYPES[10]
    )
    with work.communicators(4, register="manual") as comms:

        def body(comm: cupy_zc.Communicator) -> set[bytes]:
            buffers = Buffers.of(comm)
            results = set()
            for placement in ("symmetric", "unregistered", "mixed"):
                into, out_of = buffers.pick(placement, comm.rank)
                source, target = (work.array_in(each, 0, 3001, kind) for each in (into, out_of))
                noise = np.random.default_rng(comm.rank).standard_normal(3001)
                cupy_zc.view(source)[:] = (noise * 10.0**comm.rank).astype(kind)
                comm.all_reduce(source, target)
                results.add(cupy_zc.asnumpy(target).tobytes())
            return results

        assert len(set.union(*work.run(comms, body))) == 1


def test_halves_are_summed_in_single_precision() -> None:
    with work.communicators(3) as comms:

        def body(comm: cupy_zc.Communicator) -> float:
            array = comm.empty(1, "f2")
            cupy_zc.copyto(array, [2048.0, 1.0, 1.0][comm.rank])
            comm.all_reduce(array, array)
            return float(cupy_zc.asnumpy(array)[0])

        assert work.run(comms, body) == [2050.0] * 3  # in half precision 2048 + 1 is 2048


def test_overflow_and_nan_are_results_and_no_warnings() -> None:
    with work.communicators(2) as comms:

        def body(comm: cupy_zc.Communicator) -> list[list[float]]:
            rows = []
            for op in ("sum", "prod", "min", "max", "avg"):
                array = comm.empty(3, "f2")
                cupy_zc.copyto(array, np.array([65504, np.nan, -0.0], "f2"))
                comm.all_reduce(array, array, op)
                rows.append([float(v) for v in cupy_zc.asnumpy(array)])
            return rows

        for rows in work.run(comms, body):
            assert rows[0][0] == rows[1][0] == np.inf
            assert all(np.isnan(row[1]) for row in rows)
            assert np.signbit(rows[0][2])


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_any_shape_go_in_the_order_of_memory(order: str) -> None:
    with work.communicators(2) as comms:

        def body(comm: cupy_zc.Communicator) -> bool:
            array, out = comm.empty((3, 4), "i4", order), comm.empty((3, 4), "i4", order)
            cupy_zc.copyto(array, np.arange(12).reshape(3, 4) * (comm.rank + 1))
            comm.all_reduce(array, out)
            return bool((cupy_zc.asnumpy(out) == np.arange(12).reshape(3, 4) * 3).all())

        assert work.run(comms, body) == [True, True]


@pytest.mark.parametrize("placement", ["symmetric", "unregistered"])
def test_arrays_that_overlap_elsehow_are_copied_and_right(placement: str) -> None:
    """Input and output share bytes, other than in place: shifted by one element."""
    with work.communicators(3, register="manual") as comms:

        def body(comm: cupy_zc.Communicator) -> list[Any]:
            buffers = Buffers.of(comm)
            buffer = buffers.pick(placement, comm.rank)[0]
            found: list[Any] = []
            for operation in work.COLLECTIVES:
                if operation is Operation.BROADCAST:
                    continue
                case = Case(operation, np.dtype("i4"), "sum", 1, 50, placement, False)
                source_rows, target_rows = case.rows(3)
                has_source, has_target = case.has(comm.rank)
                source = work.array_in(buffer, 1, 50 * source_rows, case.dtype)
                target = work.array_in(buffer, 9, 50 * target_rows, case.dtype)
                if has_source:
                    cupy_zc.copyto(source, work.values(case, 3, comm.rank))
                work.invoke(comm, case, source, target)
                if has_target:
                    wanted = work.expected(case, 3)[comm.rank]
                    np.testing.assert_array_equal(cupy_zc.view(target), wanted, str(case))
                assert comm.last_transfer is not None
                assert not comm.last_transfer.zero_copy
                found.append(comm.last_transfer.reason)
            return found

        assert "overlaps" in work.run(comms, body)[1][0]


def _variants(rank: int) -> dict[str, Case]:
    base = Case(Operation.ALL_REDUCE, np.dtype("f4"), "sum", 0, 10, "symmetric", False)
    other = rank == 2
    return {
        "count=11": base._replace(count=11) if other else base,
        "float64": base._replace(dtype=np.dtype("f8")) if other else base,
        "op='max'": base._replace(op="max") if other else base,
        "root=1": base._replace(operation=Operation.REDUCE, root=int(other)),
        "all_gather": base._replace(operation=Operation.ALL_GATHER) if other else base,
    }


@pytest.mark.parametrize("placement", ["symmetric", "unregistered", "mixed"])
def test_ranks_that_differ_all_get_a_mismatch_and_can_go_on(placement: str) -> None:
    names = list(_variants(0))
    with work.communicators(3, register="manual") as comms:

        def body(comm: cupy_zc.Communicator) -> list[str]:
            buffers = Buffers.of(comm)
            texts = []
            for name in names:
                case = _variants(comm.rank)[name]._replace(placement=placement)
                source, target = work.arrays(case, 3, comm.rank, buffers)
                with pytest.raises(MismatchError) as caught:
                    work.invoke(comm, case, source, target)
                texts.append(str(caught.value))
                for output in (target, buffers.pick(placement, comm.rank)[1]):
                    if output is not None:
                        assert (cupy_zc.view(output).view("u1") == work.FILL).all()
                good = Case(Operation.ALL_REDUCE, np.dtype("i4"), "sum", 0, 7, placement, False)
                work.check(comm, good, buffers)
            return texts

        texts = work.run(comms, body)
    assert texts[0] == texts[1] == texts[2]
    for name, text in zip(names, texts[0], strict=True):
        assert "ranks 0, 1 are at" in text or "rank 0 is at" in text
        assert "rank 2 is at" in text
        assert name in text
        assert "nothing was written" in text


def test_a_barrier_against_a_collective_is_a_mismatch() -> None:
    with work.communicators(2) as comms:

        def body(comm: cupy_zc.Communicator) -> None:
            array = comm.empty(4, "i4")
            with pytest.raises(MismatchError, match=r"rank 0 is at barrier\(\)"):
                if comm.rank:
                    comm.reduce(array, array)
                else:
                    comm._line.counts.numbered += (
                        1  # as if it had been numbered, to get to the engine
                    )
                    comm._registry.at_call(1)
                    comm.barrier()
            comm.barrier()

        work.run(comms, body)


def test_the_plan_is_a_function_of_what_ranks_share() -> None:
    shared = Capabilities(scratch=1 << 10, staged=True)
    assert plan(Operation.ALL_REDUCE, 1000, 4, 4, shared).columns == 256
    assert plan(Operation.ALL_TO_ALL, 1000, 4, 4, shared).columns == 64
    assert plan(Operation.GATHER, 1000, 4, 4, shared).columns == 64
    assert plan(Operation.ALL_GATHER, 1000, 4, 4, shared).columns == 256
    assert plan(Operation.ALL_REDUCE, 10, 4, 4, shared).columns == 10
    direct = Capabilities(scratch=1 << 10, staged=False)
    assert plan(Operation.ALL_REDUCE, 10**9, 4, 4, direct).columns == 10**9
    assert plan(Operation.BARRIER, 0, 1, 4, direct).algorithm == "none"


def test_ranks_that_share_a_segment_of_another_driver_still_work() -> None:
    """Memory that can never be registered is staged, and the reason says so."""
    other = cupy_zc.MemoryPool(driver=HostDriver(granularity=1 << 12), segment_size=1)
    with work.communicators(2) as comms:

        def body(comm: cupy_zc.Communicator) -> tuple[int, str]:
            array = cupy.ndarray(8, "i4", other.malloc(32))
            cupy_zc.copyto(array, comm.rank + 1)
            for _ in range(5):
                comm.all_reduce(array, array, "max")
            assert comm.last_transfer is not None
            return int(cupy_zc.asnumpy(array)[0]), comm.last_transfer.reason

        for value, reason in work.run(comms, body):
            assert value == 2
            assert "staged" in reason
