"""Which collectives go through the switch (NVLink SHARP), by multimem instructions, and from where.

Bytes that a link carries, in the direction that carries more, for an array of S bytes on n ranks:

==============  ==============  =======================  ==========================================
operation       over the links  through the switch       the switch has fewer
==============  ==============  =======================  ==========================================
all_reduce      2 (n - 1) / n   (n + 1) / n              from 4 ranks on
broadcast       n - 1           1                        from 3 ranks on
reduce_scatter  (n - 1) / n     1                        never: each rank gives its own row as well
all_gather      (n - 1) / n     1                        never: each rank takes its own row as well
==============  ==============  =======================  ==========================================

With two ranks the links do it all (an all_reduce of S bytes against 1.5 S). What a link saves in
time it must save beyond the entry and the last barrier, hence the least sizes below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from .dtypes import DTYPES
from .plan import REDUCTIONS, ROLES, Operation

__all__ = [
    "BLOCKS",
    "MULTIMEM",
    "MULTIMEM_LL",
    "Multicast",
    "MultimemKernel",
    "instruction",
    "multimem_kernel",
    "nothing_is_bound",
    "refuse_multimem",
]

#: How all ranks' copies are accessed at once: not at all, by multimem instructions, or one by one
#: over the links, which tests do where there is no multicast.
Multicast: TypeAlias = Literal["", "hardware", "emulated"]

#: Blocks of 512 threads, the most that kernels here have: as many threads as the 4 to 8 blocks of
#: 1,024 that are said to keep the links to a switch busy. The switch does the work, and the other
#: multiprocessors are left to other kernels.
BLOCKS = 16

# Thresholds, in bytes of a row, by ranks, as device_plan.py has them; numbers of ranks between two
# take the entry of the next, and others never go through the switch. Estimates, for nobody has
# measured them yet: where the bytes that a link of 360 GB/s need not carry outweigh 4 us for two
# barriers, against LL128 (16 bytes for 15) in two steps or from a root.

#: Smallest rows. Empty: never, by the table above; the kernels are there for tables that were
#: measured on a machine.
MULTIMEM: dict[Operation, Mapping[int, int]] = {
    Operation.ALL_REDUCE: {4: 4 << 20, 8: 2 << 20},
    Operation.BROADCAST: {3: 1 << 20, 4: 512 << 10, 8: 256 << 10},
    Operation.REDUCE_SCATTER: {},
    Operation.ALL_GATHER: {},
}
#: Largest all_reduce in packets that are stored once for all: they carry as much flag as data to
#: everyone, so this is for messages so small that the stores count and not the bytes.
MULTIMEM_LL: Mapping[int, int] = {4: 1 << 10, 8: 4 << 10}

_KERNELS: dict[Operation, tuple[str, str]] = {
    Operation.ALL_REDUCE: ("multimem_all_reduce.cu", "multimem_all_reduce"),
    Operation.REDUCE_SCATTER: ("multimem_reduce_scatter.cu", "multimem_reduce_scatter"),
    Operation.ALL_GATHER: ("multimem_move.cu", "multimem_all_gather"),
    Operation.BROADCAST: ("multimem_move.cu", "multimem_broadcast"),
}


def _of_integers(width: str, signed: bool) -> dict[str, str]:
    kind = "s" if signed else "u"
    add = f"add.{'u64' if width == '64' else kind + width}"  # there is no add.s64: the same bits
    return {"sum": add, "avg": add, "min": f"min.{kind}{width}", "max": f"max.{kind}{width}"}


def _of_halves(vector: str) -> dict[str, str]:
    add = f"add.acc::f32.{vector}"
    return {"sum": add, "avg": add, "min": f"min.{vector}", "max": f"max.{vector}"}


#: What multimem.ld_reduce is asked for, by type and reduction, as cuda/multimem.cuh has it. Complex
#: numbers are added part by part; an average is a sum, scaled.
_INSTRUCTIONS: dict[str, dict[str, str]] = {
    "bool": {"sum": "or.b64", "max": "or.b64"},
    "int32": _of_integers("32", True),
    "uint32": _of_integers("32", False),
    "int64": _of_integers("64", True),
    "uint64": _of_integers("64", False),
    "float16": _of_halves("v4.f16x2"),
    "bfloat16": _of_halves("v4.bf16x2"),
    "float32": {"sum": "add.v4.f32", "avg": "add.v4.f32"},
    "float64": {"sum": "add.f64", "avg": "add.f64"},
    "complex64": {"sum": "add.v4.f32", "avg": "add.v4.f32"},
    "complex128": {"sum": "add.f64", "avg": "add.f64"},
}

#: What the instructions would do otherwise than the other algorithms, so that they do not get it.
_NAN = "a NaN may be lost: what min and max of the switch do with one is not documented"
_REFUSED: dict[tuple[str, str], str] = {
    ("float16", "min"): _NAN,
    ("float16", "max"): _NAN,
    ("bfloat16", "min"): _NAN,
    ("bfloat16", "max"): _NAN,
    ("float16", "avg"): "the sum is rounded to float16, and may overflow, before it is divided",
}


class MultimemKernel(NamedTuple):
    """A kernel that accesses all copies at once."""

    source: str
    function: str
    #: Whether data pass through the lane, in packets.
    low_latency: bool


def instruction(code: int, reduction: int) -> str | None:
    """What multimem.ld_reduce is asked for; None where it cannot do it.

    Args:
        code: Number of the element type.
        reduction: Number of the reduction.
    """
    return _INSTRUCTIONS.get(DTYPES[code], {}).get(REDUCTIONS[reduction])


def refuse_multimem(code: int, reduction: int) -> str | None:
    """Why the switch does not reduce this; None where it does. See :func:`instruction`."""
    dtype, name = DTYPES[code], REDUCTIONS[reduction]
    if instruction(code, reduction) is None:
        return f"there is no multimem instruction for {name} of {dtype}"
    return _REFUSED.get((dtype, name))


def multimem_kernel(
    operation: Operation,
    row: int,
    ranks: int,
    least: Mapping[Operation, Mapping[int, int]],
    most_packets: Mapping[int, int],
    *,
    reducible: bool,
) -> MultimemKernel | None:
    """The kernel of a collective that goes through the switch; None for another one. Pure.

    Args:
        operation: Which collective.
        row: Bytes of a row.
        ranks: How many, all of them behind one switch.
        least: Smallest rows, as in :data:`MULTIMEM`.
        most_packets: Largest rows in packets, as in :data:`MULTIMEM_LL`.
        reducible: Whether the switch may reduce what is reduced here.
    """
    if operation is Operation.ALL_REDUCE and row <= (_at(most_packets, ranks) or -1):
        return MultimemKernel("multimem_ll.cu", "multimem_ll", True)
    smallest = _at(least.get(operation, {}), ranks)
    if smallest is None or row < smallest or (ROLES[operation].reduces and not reducible):
        return None
    return MultimemKernel(*_KERNELS[operation], False)


def nothing_is_bound(*_: int) -> bool:
    """Whether a byte, by arena and offset, is bound to multicast where there is none."""
    return False


def _at(table: Mapping[int, int], ranks: int) -> int | None:
    """The entry for so many ranks, or for the next number that has one; None outside the table."""
    if not table or not min(table) <= ranks <= max(table):
        return None
    return table[min(count for count in table if count >= ranks)]
