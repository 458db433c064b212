"""Collectives as calls of NCCL: what they make of memory is what NumPy says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import collective_workers as work
import cupy
import ml_dtypes
import numpy as np
import pytest
from collective_memory import got
from collective_workers import COLLECTIVES, DTYPES, REDUCTIONS, Buffers, Case
from emulated_driver import EmulatedDriver, emulated_device
from fake_nccl import FakeNccl, fake_nccl
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_ranks import Rank, each_rank

from cupy_zc.collectives.call import BARRIER, Call
from cupy_zc.collectives.checks import Checker
from cupy_zc.collectives.dtypes import code_of
from cupy_zc.collectives.local import HostLocal
from cupy_zc.collectives.nccl_calls import BYTES, nccl_call, refuse_nccl_reduction
from cupy_zc.collectives.plan import ROLES, Operation
from cupy_zc.errors import InvalidValueError

pytestmark = pytest.mark.timeout(120)

REDUCING = [each for each in COLLECTIVES if ROLES[each].reduces]
#: What NCCL reduces, by type: ``ncclDataType_t``, and how many of it an element is.
KINDS = {
    "bool": (1, 1), "int8": (0, 1), "uint8": (1, 1), "int32": (2, 1), "uint32": (3, 1),
    "int64": (4, 1), "uint64": (5, 1), "float16": (6, 1), "bfloat16": (9, 1), "float32": (7, 1),
    "float64": (8, 1), "complex64": (7, 2), "complex128": (8, 2),
}  # fmt: skip
SUM, PROD, MAX, MIN, AVG = range(5)
#: Elements of a row, at most.
LARGEST = 64
#: Bytes of each of two buffers of a rank.
ROOM = 1 << 13


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedDriver]:
    with emulated_device(tmp_path_factory.mktemp("kernels")) as driver:
        yield driver


def allowed(dtype: np.dtype[Any], op: str) -> bool:
    """Whether NCCL can reduce it."""
    no_prod = dtype.kind == "c" and op == "prod"
    return work.allowed(dtype, op) and dtype.name in KINDS and not no_prod


# Memory


def buffers_of(rank: Rank) -> Buffers:
    """The memory of a rank as two buffers, for an input and for an output."""
    memory = rank.driver.plain_memory(2 * ROOM)
    both = [cupy.ndarray(ROOM, "u1", cupy.cuda.MemoryPointer(memory, start)) for start in (0, ROOM)]
    pair = (both[0], both[1])
    return Buffers(pair, pair, pair, ())


def call_of(checker: Checker, case: Case, source: Any, target: Any) -> Call:
    """A call, as it is checked."""
    match case.operation:
        case Operation.ALL_REDUCE:
            return checker.all_reduce(source, target, case.op)
        case Operation.REDUCE:
            return checker.reduce(source, target, case.root, case.op)
        case Operation.BROADCAST:
            return checker.broadcast(target if source is None else source, case.root)
        case Operation.REDUCE_SCATTER:
            return checker.reduce_scatter(source, target, case.count, case.op)
        case Operation.ALL_GATHER:
            return checker.all_gather(source, target, case.count)
        case Operation.GATHER:
            return checker.gather(source, target, case.root)
        case Operation.SCATTER:
            return checker.scatter(source, target, case.root)
        case _:
            rows = [each.reshape(checker.size, case.count) for each in (source, target)]
            return checker.all_to_all(*rows)


def check(rank: Rank, case: Case, buffers: Buffers, *, sharp: bool) -> None:
    """Do it on one rank, and compare."""
    size, number, told = rank.comm.size, rank.number, f"{case}, rank {rank.number}"
    source, target = work.arrays(case, size, number, buffers)
    before = None if source is None else got(source)
    checker = Checker(number, size, 0, host=False, refuses=refuse_nccl_reduction)
    call = call_of(checker, case, source, target)
    anywhere = buffers.symmetric[0].data.ptr
    places = [anywhere if each is None else each.data.ptr for each in (source, target)]
    said = nccl_call(call, size, *places, sharp=sharp)
    getattr(rank.nccl, said.function)(*said.arguments, rank.comm, rank.stream.ptr)
    if said.divisor > 1:
        assert target is not None
        local = HostLocal(rank.driver)
        local.divide(target.data.ptr, case.count, call.code, said.divisor, rank.stream)
    rank.stream.synchronize()
    wanted = work.expected(case, size)[number]
    if target is not None and wanted is not None:
        work._assert_near(got(target), wanted, err_msg=told)
    if source is not None and not (case.in_place and target is not None):
        np.testing.assert_array_equal(got(source), before, err_msg=told)
    for buffer in buffers.symmetric:
        inside = [each for each in (source, target) if each is not None]
        work._check_surroundings(buffer, inside, told)


def run(nccl: FakeNccl, size: int, cases: Sequence[Case], *, sharp: bool) -> None:
    def body(rank: Rank) -> None:
        buffers = buffers_of(rank)
        for case in cases:
            check(rank, case, buffers, sharp=sharp)

    each_rank(nccl, size, body, sharp=sharp)


def cases_of(size: int, *, only: str = "") -> list[Case]:
    """Every operation, dtype and reduction, in place and not, each root now and then.

    ``only``: of one reduction, what reduces.
    """
    chosen: list[Case] = []
    counts = itertools.cycle((1, 5, 16, 3 * size + 1))
    for operation, dtype, in_place in itertools.product(COLLECTIVES, DTYPES, (False, True)):
        if in_place and operation is Operation.ALL_TO_ALL:
            continue  # a communicator copies first, as NCCL cannot
        for op in REDUCTIONS if ROLES[operation].reduces else ("sum",):
            if not ROLES[operation].reduces or allowed(dtype, op):
                root = len(chosen) % size if ROLES[operation].rooted else 0
                where = (next(counts), "symmetric", in_place, 3)
                chosen.append(Case(operation, dtype, op, root, *where))
    return [case for case in chosen if not only or case.op == only]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective_gives_what_numpy_says(device: EmulatedDriver, size: int) -> None:
    with fake_nccl(device) as nccl:
        run(nccl, size, cases_of(size), sharp=False)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_averages_are_what_numpy_says_where_sharp_sums(device: EmulatedDriver, size: int) -> None:
    with fake_nccl(device) as nccl:
        run(nccl, size, cases_of(size, only="avg"), sharp=True)


@st.composite
def some_cases(draw: st.DrawFn) -> tuple[int, list[Case]]:
    size = draw(st.integers(1, 4))
    chosen = []
    for _ in range(draw(st.integers(1, 4))):
        operation = draw(st.sampled_from(COLLECTIVES))
        reduces, rooted = ROLES[operation].reduces, ROLES[operation].rooted
        kinds = [each for each in DTYPES if each.name in KINDS or not reduces]
        dtype = draw(st.sampled_from(kinds))
        ops = [op for op in REDUCTIONS if allowed(dtype, op)]
        op = draw(st.sampled_from(ops)) if reduces else "sum"
        root = draw(st.integers(0, size - 1)) if rooted else 0
        in_place = operation is not Operation.ALL_TO_ALL and draw(st.booleans())
        count, lead = draw(st.integers(1, LARGEST)), draw(st.integers(0, 9))
        chosen.append(Case(operation, dtype, op, root, count, "symmetric", in_place, lead))
    return size, chosen


@settings(max_examples=40)
@given(chosen=some_cases(), sharp=st.booleans())
def test_calls_of_any_size_one_after_another(
    device: EmulatedDriver, chosen: tuple[int, list[Case]], sharp: bool
) -> None:
    with fake_nccl(device) as nccl:
        run(nccl, *chosen, sharp=sharp)


def test_a_root_that_broadcasts_has_its_own_array_as_output() -> None:
    array = object()
    call = BARRIER._replace(operation=Operation.BROADCAST, columns=5, input=array, root=1)
    assert nccl_call(call, 2, 64, 4096, sharp=False).arguments == (64, 64, 5, BYTES, 1)
    call = call._replace(input=None, output=array)
    assert nccl_call(call, 2, 64, 4096, sharp=False).arguments == (64, 4096, 5, BYTES, 1)


# What is said


def by_hand(
    operation: Operation, dtype: Any, op: str = "sum", *, root: bool = True, columns: int = 6
) -> Call:
    """A call of a rank that is the root, or is not."""
    kind = np.dtype(dtype)
    code = code_of(kind)
    assert code is not None
    there = object()
    gives = root or operation not in (Operation.BROADCAST, Operation.SCATTER)
    gets = root or operation not in (Operation.REDUCE, Operation.GATHER)
    return Call(
        operation, kind, code, REDUCTIONS.index(op), 1, columns, 0,
        there if gives else None, there if gets else None, False, "",
    )  # fmt: skip


def test_the_reductions_of_these_tests_are_numbered_as_those_of_calls() -> None:
    from cupy_zc.collectives.plan import REDUCTIONS as NUMBERED

    assert NUMBERED == REDUCTIONS


@given(
    operation=st.sampled_from(COLLECTIVES),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(REDUCTIONS),
    columns=st.integers(1, 1 << 40),
    size=st.integers(1, 72),
    sharp=st.booleans(),
)
def test_all_ranks_say_the_same_but_for_addresses(
    operation: Operation, dtype: np.dtype[Any], op: str, columns: int, size: int, sharp: bool
) -> None:
    if ROLES[operation].reduces and not allowed(dtype, op):
        return
    one, other = (
        nccl_call(
            by_hand(operation, dtype, op, root=root, columns=columns), size, 64, 128, sharp=sharp
        )
        for root in (True, False)
    )
    assert one.function == other.function == operation.call
    assert one.arguments[2:] == other.arguments[2:]
    if ROLES[operation].rooted:
        assert one.arguments[-1] == 1


@pytest.mark.parametrize("operation", set(COLLECTIVES) - set(REDUCING), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_moved_goes_as_bytes(operation: Operation, dtype: np.dtype[Any]) -> None:
    said = nccl_call(by_hand(operation, dtype), 4, 64, 128, sharp=False)
    assert said.arguments[2:4] == (6 * dtype.itemsize, BYTES)
    assert said.divisor == 1


@pytest.mark.parametrize("operation", REDUCING, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_reduced_goes_as_numbers(operation: Operation, name: str) -> None:
    kind, parts = KINDS[name]
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    for op in REDUCTIONS:
        if allowed(dtype, op):
            said = nccl_call(by_hand(operation, dtype, op), 4, 64, 128, sharp=False)
            assert said.arguments[2:4] == (6 * parts, kind)


@pytest.mark.parametrize(
    ("op", "number"), [("sum", MAX), ("prod", MIN), ("min", MIN), ("max", MAX)]
)
def test_bools_are_bytes_of_which_the_larger_is_the_sum(op: str, number: int) -> None:
    said = nccl_call(by_hand(Operation.ALL_REDUCE, "?", op), 4, 64, 128, sharp=False)
    assert said.arguments[3:] == (BYTES, number)


@pytest.mark.parametrize("sharp", [False, True], ids=["plain", "sharp"])
@pytest.mark.parametrize("name", [name for name in KINDS if name != "bool"])
def test_an_average_is_a_sum_and_a_divisor_where_nccl_has_none(name: str, sharp: bool) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    said = nccl_call(by_hand(Operation.REDUCE, dtype, "avg"), 4, 64, 128, sharp=sharp)
    divided = (sharp and dtype.itemsize > 2) or dtype.kind in "iu"  # halves would overflow
    assert (said.arguments[4], said.divisor) == ((SUM, 4) if divided else (AVG, 1))
    elsewhere = by_hand(Operation.REDUCE, dtype, "avg", root=False)
    assert nccl_call(elsewhere, 4, 64, 128, sharp=sharp).divisor == 1


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_other_reductions_have_numbers_and_no_divisor(op: str) -> None:
    said = nccl_call(by_hand(Operation.ALL_REDUCE, "i8", op), 4, 64, 128, sharp=True)
    number = {"sum": SUM, "prod": PROD, "min": MIN, "max": MAX}[op]
    assert (said.arguments[4], said.divisor) == (number, 1)


# What is refused


def test_what_nccl_can_reduce_is_not_refused() -> None:
    for dtype, op in itertools.product(DTYPES, REDUCTIONS):
        assert (refuse_nccl_reduction(dtype, op) is None) == allowed(dtype, op), (dtype, op)


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("name", ["int16", "uint16"])
def test_integers_of_16_bits_are_refused_with_the_list_of_types(name: str, op: str) -> None:
    allowed = refuse_nccl_reduction(np.dtype(name), op)
    assert allowed is not None
    assert allowed.endswith(f"it has no {name}")
    assert ", ".join(sorted(KINDS)) == ", ".join(
        sorted(allowed.partition(", of ")[2].partition(";")[0].split(", "))
    )


@pytest.mark.parametrize("name", ["complex64", "complex128"])
@pytest.mark.parametrize(
    ("op", "words"), [("prod", "NCCL sums their parts"), ("min", "which have no order")]
)
def test_products_and_orders_of_complex_numbers_are_refused(name: str, op: str, words: str) -> None:
    allowed = refuse_nccl_reduction(np.dtype(name), op)
    assert allowed is not None
    assert allowed.endswith(words)
    assert allowed.startswith("'sum'")


def test_an_average_of_bools_is_refused() -> None:
    allowed = refuse_nccl_reduction(np.dtype("?"), "avg")
    assert allowed is not None
    assert "for bool arrays" in allowed


def test_a_refusal_is_an_error_of_the_call(device: EmulatedDriver) -> None:
    memory = device.plain_memory(64)
    array = cupy.ndarray(4, "i2", cupy.cuda.MemoryPointer(memory, 0))
    checker = Checker(0, 2, 0, host=False, refuses=refuse_nccl_reduction)
    with pytest.raises(InvalidValueError, match=r"rank 0 of 2.*op='sum'.*it has no int16"):
        checker.all_reduce(array, array, "sum")
    assert checker.broadcast(array, 0).columns == 4
