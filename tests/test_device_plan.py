"""The device engine without a GPU: plans and fingerprints."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_zc import kernels
from cupy_zc.collectives.call import Call
from cupy_zc.collectives.device_args import described, fingerprint
from cupy_zc.collectives.device_kernels import kernel_of, kernels_of
from cupy_zc.collectives.device_multimem import refuse_multimem
from cupy_zc.collectives.device_plan import (
    BOTH_WAYS,
    CHUNK,
    LINE_DATA,
    LINE_DATA_16,
    LINES_A_BLOCK,
    MAX_BLOCKS,
    RING_LINES,
    ROUNDS,
    Launch,
    Machine,
    device_plan,
    sizes,
)
from cupy_zc.collectives.dtypes import DTYPES, ITEMSIZES, code_of
from cupy_zc.collectives.plan import REDUCTIONS, ROLES, Operation

_machines = st.builds(
    lambda ranks, blocks, lines, multicast, deterministic, shared: Machine(
        ranks, blocks, lines, sizes(ranks), multicast, deterministic, shared=shared
    ),
    st.integers(1, 8), st.integers(1, 132), st.booleans(), st.sampled_from(["", "hardware"]),
    st.booleans(), st.booleans(),
)  # fmt: skip
_items = st.sampled_from([1, 2, 4, 8, 16])


def places_of(plan: Launch, lines: int, ranks: int) -> int:
    """The places that so many lines take in the buffer for a peer."""
    if plan.two_step:
        return 2 * -(-lines // ranks)
    ring = ROUNDS * plan.blocks * plan.threads // 8
    return min(lines, ring) if "pair" in plan.function else lines


@given(st.sampled_from(Operation), st.integers(0, 1 << 44), _items, _machines, st.booleans())
def test_a_plan_fits_the_machine_and_the_lane(
    operation: Operation, count: int, itemsize: int, machine: Machine, in_switch: bool
) -> None:
    plan = device_plan(operation, count, itemsize, machine, in_switch=in_switch)
    assert plan == device_plan(operation, count, itemsize, machine, in_switch=in_switch)
    if machine.ranks == 1:
        assert plan.algorithm == "copy"
        return
    pair = "pair" in plan.function
    twice = pair and not machine.shared  # else the rest is for blocks of another engine
    assert 1 <= plan.blocks <= min(256, machine.blocks * (2 if twice else 1))
    assert not pair or (machine.ranks == 2 and operation in BOTH_WAYS)
    assert plan.threads % 32 == 0
    assert plan.threads <= 512
    nbytes = count * itemsize
    if plan.algorithm == "ll":
        assert not machine.whole_lines
        assert -(-nbytes // 16) <= machine.sizes.ll_packs
    if plan.algorithm == "ll128":
        assert machine.whole_lines
        sixteen = itemsize == 16 and ROLES[operation].reduces
        lines = max(1, -(-nbytes // (LINE_DATA_16 if sixteen else LINE_DATA)))
        assert places_of(plan, lines, machine.ranks) <= machine.sizes.ll128_lines
    if plan.algorithm == "push_reduce":
        assert plan.blocks % 2 == 0
        return
    low_latency = plan.algorithm in ("ll", "ll128", "multimem_ll", "none")
    assert low_latency or plan.input_remote or plan.output_remote


@given(st.sampled_from(Operation), st.integers(0, 1 << 44), _items, _machines, st.booleans())
def test_a_plan_names_a_kernel_that_there_is(
    operation: Operation, count: int, itemsize: int, machine: Machine, in_switch: bool
) -> None:
    plan = device_plan(operation, count, itemsize, machine, in_switch=in_switch)
    if machine.ranks == 1:
        assert not plan.function
        return
    assert plan.source in {path.name for path in kernels.path("types.cuh").parent.glob("*.cu")}
    entry = re.search(rf"CUPY_ZC_KERNEL(_OF)?\({plan.function}\W", kernels.source(plan.source))
    assert entry is not None
    # Two blocks of it fit on a multiprocessor.
    assert bool(entry[1]) == (f"({plan.function}, cupy_zc::Args, 2)" in kernels.source(plan.source))
    assert bool(entry[1]) == ("pair" in plan.function)


@given(st.sampled_from(sorted(set(Operation) - {Operation.BARRIER})), _items, _machines)
def test_an_array_without_elements_still_has_a_plan(
    operation: Operation, itemsize: int, machine: Machine
) -> None:
    assert device_plan(operation, 0, itemsize, machine).function or machine.ranks == 1


def test_a_ring_has_the_rounds_that_the_kernels_count() -> None:
    assert f"constexpr u32 ROUNDS = {ROUNDS};" in kernels.source("line_pairs.cuh")
    assert RING_LINES == ROUNDS * MAX_BLOCKS * LINES_A_BLOCK


def test_scratch_holds_a_line_of_every_row_and_a_whole_number_of_lines() -> None:
    assert CHUNK % 128 == 0
    assert CHUNK >= 128 * 8


_calls = st.builds(
    lambda operation, code, reduction, root, columns, fortran: Call(
        operation, np.dtype(DTYPES[code] if DTYPES[code] != "bfloat16" else "f2"), code, reduction,
        root, columns, fortran, None, None, False, "",
    ),
    st.sampled_from(sorted(set(Operation) - {Operation.BARRIER})),
    st.integers(0, len(DTYPES) - 1),
    st.integers(0, len(REDUCTIONS) - 1),
    st.integers(0, 7),
    st.integers(0, 1 << 48),
    st.integers(0, 1),
)  # fmt: skip


@given(_calls, _calls)
def test_calls_that_differ_have_other_fingerprints(one: Call, other: Call) -> None:
    same = one[:1] + one[2:7] == other[:1] + other[2:7]
    assert (fingerprint(one) == fingerprint(other)) == same
    assert 0 <= fingerprint(one) < 1 << 64


@given(_calls)
def test_a_fingerprint_tells_what_was_called(call: Call) -> None:
    text = described(fingerprint(call))
    assert text.startswith(f"{call.operation.call}(count={call.columns}, dtype={DTYPES[call.code]}")
    assert (f"op={REDUCTIONS[call.reduction]!r}" in text) == ROLES[call.operation].reduces
    assert (f"root={call.root}" in text) == ROLES[call.operation].rooted


def test_a_word_that_is_no_fingerprint_is_no_error_of_its_own() -> None:
    words = np.random.default_rng(3).integers(0, 1 << 63, 200)
    told = {described(int(word)) for word in words}
    assert any(text.startswith("something that is no call") for text in told)


@pytest.mark.parametrize("bits", range(24))
def test_every_bit_of_a_fingerprint_depends_on_the_count(bits: int) -> None:
    """Lines carry 24 bits of it: calls that differ in their count alone must differ there."""
    call = Call(Operation.ALL_REDUCE, np.dtype("f4"), 11, 0, 0, 0, 0, None, None, False, "")
    values = [fingerprint(call._replace(columns=1 << shift)) >> bits & 1 for shift in range(44)]
    assert {0, 1} == set(values)


_kinds = st.sampled_from([(11, 0), (11, 3), (7, 0), (14, 1), (0, 0)])  # f4, f4 max, i8, c16, bool


@given(st.sampled_from(Operation), st.integers(0, 1 << 40), _kinds, _machines)
def test_the_kernels_to_preload_are_all_that_calls_may_need(
    operation: Operation, count: int, kind: tuple[int, int], machine: Machine
) -> None:
    code, reduction = kind
    in_switch = bool(machine.multicast) and not refuse_multimem(code, reduction)
    plan = device_plan(operation, count, ITEMSIZES[code], machine, in_switch=in_switch)
    if plan.source:
        needed = kernel_of(code, reduction, plan, machine)
        assert needed in kernels_of(code, reduction, machine)


def test_element_sizes_are_those_of_the_types() -> None:
    for name, itemsize in zip(DTYPES, ITEMSIZES, strict=True):
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        assert dtype.itemsize == itemsize
        assert code_of(dtype) == DTYPES.index(name)
