"""What goes through the switch: the table of instructions, and the plan that chooses it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_zc import kernels
from cupy_zc.collectives import device_multimem
from cupy_zc.collectives.call import BARRIER
from cupy_zc.collectives.device_args import MULTICAST, STAGED, location
from cupy_zc.collectives.device_kernels import kernel_of
from cupy_zc.collectives.device_multimem import (
    BLOCKS,
    MULTIMEM,
    MULTIMEM_LL,
    instruction,
    nothing_is_bound,
    refuse_multimem,
)
from cupy_zc.collectives.device_plan import Launch, Machine, device_plan, plan_of, sizes
from cupy_zc.collectives.dtypes import DTYPES
from cupy_zc.collectives.plan import REDUCTIONS, ROLES, Operation

#: By row, what the switch is asked for: sum, prod, min, max, avg.
TABLE: dict[str, tuple[str | None, ...]] = {
    "bool": ("or.b64", None, None, "or.b64", None),
    "int8": (None,) * 5,
    "uint8": (None,) * 5,
    "int16": (None,) * 5,
    "uint16": (None,) * 5,
    "int32": ("add.s32", None, "min.s32", "max.s32", "add.s32"),
    "uint32": ("add.u32", None, "min.u32", "max.u32", "add.u32"),
    "int64": ("add.u64", None, "min.s64", "max.s64", "add.u64"),
    "uint64": ("add.u64", None, "min.u64", "max.u64", "add.u64"),
    "float16": (
        "add.acc::f32.v4.f16x2", None, "min.v4.f16x2", "max.v4.f16x2", "add.acc::f32.v4.f16x2",
    ),
    "bfloat16": (
        "add.acc::f32.v4.bf16x2", None, "min.v4.bf16x2", "max.v4.bf16x2", "add.acc::f32.v4.bf16x2",
    ),
    "float32": ("add.v4.f32", None, None, None, "add.v4.f32"),
    "float64": ("add.f64", None, None, None, "add.f64"),
    "complex64": ("add.v4.f32", None, None, None, "add.v4.f32"),
    "complex128": ("add.f64", None, None, None, "add.f64"),
}  # fmt: skip
PAIRS = [(code, reduction) for code in range(len(DTYPES)) for reduction in range(len(REDUCTIONS))]
#: What the instructions could do, but not as the contract of min, max and avg has it.
KEPT_OUT = {
    ("float16", "min"): "NaN",
    ("float16", "max"): "NaN",
    ("bfloat16", "min"): "NaN",
    ("bfloat16", "max"): "NaN",
    ("float16", "avg"): "overflow",
}
THROUGH = ("multimem", "multimem_ll")


def machine(ranks: int, **options: Any) -> Machine:
    return Machine(ranks, 132, True, sizes(ranks), **{"multicast": "hardware", **options})


def all_reduce(
    nbytes: int, code: int = 11, reduction: int = 0, ranks: int = 8, **options: Any
) -> Launch:
    """The plan of an all_reduce of so many bytes of a type."""
    dtype = np.dtype("u2" if DTYPES[code] == "bfloat16" else DTYPES[code])
    call = BARRIER._replace(
        operation=Operation.ALL_REDUCE, dtype=dtype, code=code, reduction=reduction,
        columns=nbytes // dtype.itemsize,
    )  # fmt: skip
    return plan_of(call, machine(ranks, **options))


@pytest.mark.parametrize(("code", "reduction"), PAIRS)
def test_every_type_and_reduction_is_in_the_table_or_refused_when_it_is_planned(
    code: int, reduction: int
) -> None:
    wanted = TABLE[DTYPES[code]][reduction]
    assert instruction(code, reduction) == wanted
    refusal = refuse_multimem(code, reduction)
    out = KEPT_OUT.get((DTYPES[code], REDUCTIONS[reduction]))
    if wanted is None:
        assert refusal is not None
        assert DTYPES[code] in refusal
    else:
        assert (refusal is None) == (out is None)
        assert out is None or out in str(refusal)
    assert (all_reduce(64 << 20, code, reduction).algorithm == "multimem") == (refusal is None)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_switch_is_chosen_where_a_link_carries_fewer_bytes(ranks: int) -> None:
    links = {
        Operation.ALL_REDUCE: 2 * (ranks - 1) / ranks,
        Operation.BROADCAST: ranks - 1,
        Operation.REDUCE_SCATTER: (ranks - 1) / ranks,
        Operation.ALL_GATHER: (ranks - 1) / ranks,
    }
    switch = dict.fromkeys(links, 1.0)
    switch[Operation.ALL_REDUCE] = (ranks + 1) / ranks
    for operation in Operation:
        plan = device_plan(operation, 64 << 20, 4, machine(ranks), in_switch=True)
        saves = operation in links and switch[operation] < links[operation]
        assert (plan.algorithm == "multimem") == saves, operation


def test_two_ranks_never_take_the_switch() -> None:
    for shift in range(34):
        assert all_reduce(1 << shift, ranks=2).algorithm not in THROUGH


def test_three_ranks_reduce_over_the_links_and_broadcast_through_the_switch() -> None:
    for shift in range(34):
        assert all_reduce(1 << shift, ranks=3).algorithm not in THROUGH
    plan = device_plan(Operation.BROADCAST, 8 << 20, 1, machine(3))
    assert (plan.algorithm, plan.function, plan.typed) == ("multimem", "multimem_broadcast", False)


def test_sizes_go_from_packets_to_lines_to_the_switch() -> None:
    least, most = MULTIMEM[Operation.ALL_REDUCE][8], MULTIMEM_LL[8]
    chosen = [
        all_reduce(nbytes).algorithm for nbytes in (0, 4, most, most + 4, least - 4, least, 1 << 40)
    ]
    assert chosen == ["multimem_ll"] * 3 + ["ll128"] * 2 + ["multimem"] * 2


def test_without_multicast_nothing_takes_the_switch() -> None:
    for shift in range(34):
        assert all_reduce(1 << shift, multicast="").algorithm not in THROUGH


def test_deterministic_keeps_sums_out_of_the_switch_and_lets_copies_through() -> None:
    """The packets are reduced by every rank in the order of the ranks, so they may stay."""
    chosen = {all_reduce(1 << shift, deterministic=True).algorithm for shift in range(34)}
    assert "multimem" not in chosen
    assert "multimem_ll" in chosen
    plan = device_plan(Operation.BROADCAST, 8 << 20, 1, machine(8, deterministic=True))
    assert plan.algorithm == "multimem"


def test_few_blocks_are_enough_for_the_switch() -> None:
    assert all_reduce(1 << 30).blocks == BLOCKS
    assert all_reduce(1 << 30).threads * BLOCKS == 8 * 1024


@pytest.mark.parametrize("operation", list(MULTIMEM))
def test_a_measured_table_can_send_anything_through_the_switch(
    operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MULTIMEM, operation, {2: 0})
    monkeypatch.setattr(device_multimem, "MULTIMEM_LL", {})
    plan = device_plan(operation, 0, 4, machine(2), in_switch=True)
    assert plan.algorithm == "multimem"
    assert plan.blocks == 1
    assert (plan.input_remote, plan.output_remote) == (
        ROLES[operation].reduces,
        operation is not Operation.REDUCE_SCATTER,
    )
    assert f"CUPY_ZC_KERNEL({plan.function})" in kernels.source(plan.source)
    beyond = device_plan(operation, 1 << 30, 4, machine(8), in_switch=True)
    assert beyond.algorithm not in THROUGH


@given(st.integers(0, 1 << 20), st.integers(3, 8), st.booleans())
def test_packets_of_all_ranks_fit_the_room_of_the_lane(row: int, ranks: int, whole: bool) -> None:
    there = replace(machine(ranks), whole_lines=whole)
    plan = device_plan(Operation.ALL_REDUCE, row, 1, there)
    if plan.algorithm == "multimem_ll":
        assert -(-row // 16) <= there.sizes.ll_packs * (ranks - 1) // ranks
    text = kernels.source("types.cuh")
    assert re.search(r"multimem_packs\(.*\) \{ return packs \* \(size - 1\) / size; \}", text)


@pytest.mark.parametrize(("how", "policy"), [("hardware", "Hardware"), ("emulated", "Emulated")])
def test_a_kernel_is_compiled_for_the_way_in_which_copies_are_accessed(
    how: str, policy: str
) -> None:
    call = BARRIER._replace(operation=Operation.ALL_REDUCE, dtype=np.dtype("f4"), code=11)
    for columns in (1, 1 << 20):
        call = call._replace(columns=columns)
        there = machine(8, multicast=how)
        name = kernel_of(call.code, call.reduction, plan_of(call, there), there)
        assert f"CUPY_ZC_MULTIMEM={policy}" in name.defines
        assert "CUPY_ZC_ELEMENT=float" in name.defines
        assert f"struct {policy} {{" in kernels.source("multimem.cuh")
        without = machine(8, multicast="")
        defines = kernel_of(call.code, call.reduction, plan_of(call, without), without).defines
        assert not any("MULTIMEM" in define for define in defines)


def test_a_location_says_whether_it_is_bound_and_kernels_know_the_bit() -> None:
    assert location(3, 4096, bound=True) == MULTICAST | 3 << 48 | 4096
    assert location(3, 4096) == 3 << 48 | 4096
    assert location(0x7FFE, (1 << 48) - 1, bound=True) != STAGED
    assert "MULTICAST = 1ull << 63;" in kernels.source("types.cuh")
    assert not nothing_is_bound(0, 0)
