"""How a collective is carried out on GPUs: a pure function of what all ranks share.

==============  ================  =================  ==============================================
operation       small and middle  large              largest
==============  ================  =================  ==============================================
all_reduce      ll128, or ll      two_shot           push_reduce: rings of the peers, stores alone
reduce          ll128             two_shot           push_reduce
reduce_scatter  ll128             one_shot           push_reduce
others          ll128             push: store into the outputs of the peers
==============  ================  =================  ==============================================

The low-latency algorithms need no registration, as data pass through buffers of the lane on their
way; so does the input of push_reduce, and all that two ranks send where an output of their
all_reduce is not registered. The others read or write the arrays of peers, which must be registered
or are staged. Between two ranks, what goes both ways goes through a ring in those buffers
(cuda/line_pairs.cuh), whatever its size.

In a graph, copy engines can move large rows of what only moves data (device_pulls.py).

Where the ranks have multicast, all_reduce and broadcast go through the switch instead where that
saves time (device_multimem.py): multimem, and multimem_ll for the smallest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from .call import Call
from .device_args import Sizes
from .device_multimem import BLOCKS, Multicast, multimem_kernel, refuse_multimem
from .device_tables import Tables, at
from .plan import ROLES, Operation

__all__ = ["DeviceAlgorithm", "Launch", "Machine", "device_plan", "plan_of", "sizes"]

DeviceAlgorithm: TypeAlias = Literal[
    "ll128", "ll", "two_shot", "one_shot", "push_reduce", "push", "copy_engines", "multimem",
    "multimem_ll", "copy", "none",
]  # fmt: skip

#: Bytes of a scratch buffer, of which a lane has four: large enough to hide the barriers between
#: chunks, and for the rings of push_reduce.
CHUNK = 8 << 20
#: Threads of a block, and blocks that the barriers have room for.
THREADS, MAX_BLOCKS = 512, 256
#: Multiprocessors of a GPU whose room no collective needs: a ``send`` that is larger than its
#: channel waits on the GPU for its receiver, and a collective behind it must fit all the same.
KEPT_FREE = 8
#: Data bytes of a line of 128. Those with elements of 16 bytes have one element less.
LINE_DATA, LINE_DATA_16 = 120, 112
#: Bytes of the rows that set-up sends in lines, whatever calls do.
PATTERN_BYTES = 1 << 16
#: Lines for which a block of LL128 has lanes at a time; bytes that a block of others handles.
LINES_A_BLOCK, BYTES_A_BLOCK = 64, 16 << 10
#: What goes both ways: between two ranks two blocks of its kernels fit on a multiprocessor, and it
#: needs no more lines of a buffer than a ring has.
BOTH_WAYS = frozenset(
    {Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.ALL_TO_ALL}
)
#: Lines of a ring for each group of lanes, and of all rings of the largest grid.
ROUNDS = 4
RING_LINES = ROUNDS * MAX_BLOCKS * LINES_A_BLOCK


@dataclass(frozen=True, slots=True)
class Machine:
    """What all ranks share."""

    ranks: int
    #: Blocks that a launch may have, of kernels that fill a multiprocessor: as many of these as
    #: there are, fewer where ranks share a GPU.
    blocks: int
    #: Whether the links keep lines of 128 bytes in order, which set-up tests.
    whole_lines: bool
    sizes: Sizes
    #: How the copies of all ranks are accessed at once, the lanes among them.
    multicast: Multicast = ""
    #: Whether sums must be the same from run to run, which those of the switch are not.
    deterministic: bool = False
    #: From where an algorithm takes over; None: as in the package.
    tables: Tables | None = None
    #: Whether multiprocessors are left to another engine, whose blocks need more than half of one.
    shared: bool = False

    @property
    def thresholds(self) -> Tables:
        """From where an algorithm takes over."""
        return self.tables or Tables.own()


class Launch(NamedTuple):
    """Which kernel, in which shape."""

    algorithm: DeviceAlgorithm
    source: str
    function: str
    #: Whether it is compiled for an element type and a reduction.
    typed: bool
    blocks: int
    threads: int
    two_step: bool
    #: Whether peers read the input, or write the output, so that it must be registered or staged.
    input_remote: bool
    output_remote: bool
    #: Whether an output that is not registered is no matter: data come through rings to where its
    #: own rank writes it.
    output_any: bool = False

    @property
    def uses_rings(self) -> bool:
        """Whether data pass through scratch, whoever is registered."""
        return self.algorithm == "push_reduce"


def _is_pair(operation: Operation, ranks: int) -> bool:
    """Whether it has kernels of its own for so many ranks, with rings (cuda/line_pairs.cuh)."""
    return ranks == 2 and operation in BOTH_WAYS


def sizes(ranks: int, tables: Tables | None = None) -> Sizes:
    """Capacities of the lanes of so many ranks."""
    ranks, tables = max(2, ranks), tables or Tables.own()
    lines = -(-PATTERN_BYTES // LINE_DATA_16)
    for operation in Operation:
        needed = -(-at(tables.ll128(operation), ranks) // LINE_DATA_16)
        if operation is Operation.ALL_REDUCE:
            steps = 2 * -(-at(tables.ll128_two_steps, ranks) // (LINE_DATA_16 * ranks)) + 2
            needed = max(needed, steps)
        lines = max(lines, min(needed, RING_LINES) if _is_pair(operation, ranks) else needed)
    packs = -(-at(tables.ll_one_step, ranks) // 16)
    # Those of the switch have places for the rank itself as well: multimem_packs of types.cuh.
    switched = -(-max(tables.multimem_ll.values(), default=0) // 16)
    packs = max(packs, -(-switched * ranks // (ranks - 1)))
    return Sizes(lines, packs, CHUNK)


def plan_of(call: Call, machine: Machine) -> Launch:
    """The plan of a call; see :func:`device_plan`."""
    in_switch = bool(machine.multicast) and not refuse_multimem(call.code, call.reduction)
    return device_plan(
        call.operation, call.columns, call.dtype.itemsize, machine, in_switch=in_switch
    )


def device_plan(
    operation: Operation, count: int, itemsize: int, machine: Machine, *, in_switch: bool = False
) -> Launch:
    """Choose kernel and launch shape. Pure, and so the same on all ranks.

    Args:
        operation: Which collective.
        count: Elements of a row.
        itemsize: Bytes of an element.
        machine: What the ranks share.
        in_switch: Whether the switch reduces elements of this type in this way.
    """
    if machine.ranks == 1:
        return Launch("copy", "", "", False, 0, 0, False, False, False)
    if operation is Operation.BARRIER:
        return Launch("none", "barrier.cu", "barrier", False, 1, 32, False, False, False)
    quick = _through_switch(operation, count * itemsize, machine, in_switch) or _low_latency(
        operation, count, itemsize, machine
    )
    if quick is not None:
        return quick
    role = ROLES[operation]
    row = count * itemsize
    rows = machine.ranks if role.input_rows or role.output_rows else 1
    blocks = max(1, min(machine.blocks, -(-rows * row // BYTES_A_BLOCK)))
    if not role.reduces:
        return Launch("push", "push.cu", operation.call, False, blocks, THREADS, False, False, True)
    pushes = machine.blocks > 1  # half of them send
    if operation is Operation.REDUCE_SCATTER:
        if pushes and row >= at(machine.thresholds.push_reduce_scatter, machine.ranks):
            return _push_reduce("push_reduce_scatter", machine, False)
        return Launch(
            "one_shot", "reduce_scatter.cu", "reduce_scatter", True, blocks, THREADS, False,
            True, False,
        )  # fmt: skip
    if pushes and row >= at(machine.thresholds.push_reduce, machine.ranks):
        whole = operation is Operation.ALL_REDUCE and machine.ranks == 2
        return _push_reduce("push_reduce", machine, True, output_any=whole)
    return Launch("two_shot", "two_shot.cu", "two_shot", True, blocks, THREADS, False, True, True)


def _push_reduce(
    function: str, machine: Machine, output_remote: bool, *, output_any: bool = False
) -> Launch:
    blocks = machine.blocks // 2 * 2
    return Launch(
        "push_reduce", "push_reduce.cu", function, True, blocks, THREADS, False, False,
        output_remote, output_any,
    )  # fmt: skip


def _through_switch(
    operation: Operation, row: int, machine: Machine, in_switch: bool
) -> Launch | None:
    """The plan of a collective that goes through the switch; None for another one."""
    reducible = in_switch and not machine.deterministic
    kernel = None
    if machine.multicast:
        tables = machine.thresholds
        kernel = multimem_kernel(
            operation, row, machine.ranks, tables.multimem, tables.multimem_ll, reducible=reducible
        )
    if kernel is None:
        return None
    role = ROLES[operation]
    if kernel.low_latency:
        blocks = max(1, min(machine.blocks, row // 16 // THREADS))
        return Launch("multimem_ll", *kernel[:2], True, blocks, THREADS, False, False, False)
    blocks = max(1, min(machine.blocks, BLOCKS, -(-row // BYTES_A_BLOCK)))
    return Launch(
        "multimem", *kernel[:2], role.reduces, blocks, THREADS, False, role.reduces,
        operation is not Operation.REDUCE_SCATTER,
    )  # fmt: skip


def _low_latency(
    operation: Operation, count: int, itemsize: int, machine: Machine
) -> Launch | None:
    """The plan of a small message; None for one that is none."""
    row, ranks, reduces = count * itemsize, machine.ranks, ROLES[operation].reduces
    tables = machine.thresholds
    all_reduce = operation is Operation.ALL_REDUCE
    if not machine.whole_lines:
        if not all_reduce or row > at(tables.ll_one_step, ranks):
            return None
        blocks = max(1, min(machine.blocks, row // 16 // THREADS))
        return Launch("ll", "ll.cu", "ll", True, blocks, THREADS, False, False, False)
    one = at(tables.ll128(operation), ranks)
    two = at(tables.ll128_two_steps, ranks) if all_reduce else one
    if row > max(one, two):
        return None
    pair = _is_pair(operation, ranks)
    two_step = row > one and not pair
    lines = -(-row // (LINE_DATA_16 if reduces and itemsize == 16 else LINE_DATA))
    # A second block goes to a multiprocessor when all have one.
    twice = pair and not machine.shared
    most = min(2 * machine.blocks, MAX_BLOCKS) if twice else machine.blocks
    blocks = max(1, min(most, -(-lines // LINES_A_BLOCK)))
    source, function = "ll128_move.cu", f"ll128_{operation.call}"
    if pair:
        source = "ll128_pair.cu" if reduces else "ll128_pair_move.cu"
        function = f"ll128_pair_{operation.call}"
    elif all_reduce:
        source, function = "ll128.cu", "ll128"
    elif reduces:
        source = f"{function}.cu"
    return Launch("ll128", source, function, reduces, blocks, THREADS, two_step, False, False)
