"""Collectives through the switch, tried at set-up before anything relies on them.

The probe of the registration has shown that a word stored behind a multicast object comes to all
ranks, and that a load adds up theirs. This runs what calls will run: each kind of kernel once, on a
pattern, as large as the smallest message for which a plan takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cupy
import numpy as np

from ..registration import Registry, SymmetricHeap
from .call import Call
from .device_multimem import MULTIMEM
from .device_plan import Machine, plan_of
from .device_setup import step
from .dtypes import DTYPES
from .plan import REDUCTIONS, ROLES, Operation

__all__ = ["try_switch"]

_DTYPE = np.dtype("i4")
_CODE, _SUM = DTYPES.index("int32"), REDUCTIONS.index("sum")
#: Bytes of rows that are looked at: powers of two, and then some elements, so that the end of a row
#: is no round number. A threshold is one of them.
_LEAST, _MOST, _MORE = 1 << 8, 8 << 20, 12


def _value(count: int, rank: int) -> Any:
    """What a rank gives: the sums of eight ranks are far below 2 ** 31."""
    return ((np.arange(count, dtype=np.int64) * 7919 + rank * 104729) % 65521).astype(_DTYPE)


def _calls(machine: Machine) -> Iterator[Call]:
    """A call of each kernel of the switch, without arrays; the same on all ranks."""
    known: set[str] = set()
    for operation in MULTIMEM:
        root = machine.ranks - 1 if ROLES[operation].rooted else 0
        size = _LEAST
        while size <= _MOST:
            count = (size + _MORE) // _DTYPE.itemsize
            call = Call(operation, _DTYPE, _CODE, _SUM, root, count, 0, None, None, False, "")
            plan = plan_of(call, machine)
            if plan.algorithm.startswith("multimem") and plan.function not in known:
                known.add(plan.function)
                yield call
            size *= 2


def _expected(call: Call, rank: int, ranks: int) -> Any:
    """The output of a rank."""
    rows = ranks if ROLES[call.operation].input_rows else 1
    given = [_value(rows * call.columns, peer) for peer in range(ranks)]
    if call.operation is Operation.BROADCAST:
        return given[call.root]
    if call.operation is Operation.ALL_GATHER:
        return np.concatenate(given)
    total = np.sum(given, axis=0, dtype=_DTYPE)
    return total.reshape(rows, call.columns)[rank if rows > 1 else 0]


def try_switch(
    registry: Registry,
    heap: SymmetricHeap,
    machine: Machine,
    enqueue: Callable[[Call, Any], None],
    check: Callable[[object], None],
    stream: Any,
) -> str:
    """Run each kernel of the switch that plans take here, and look at the results. Collective.

    Args:
        registry: Where the memory of peers is.
        heap: Of the arrays.
        machine: What plans are made for.
        enqueue: Puts a call at the end of a stream.
        check: Raises what went wrong in a call that ran.
        stream: Of this device.

    Returns:
        What is wrong, in words, the same on all ranks; empty where nothing is.

    Raises:
        AgreementError: a rank has no memory left, or a kernel waited in vain; on all ranks.
    """
    if not machine.multicast:
        return "the lane of the device engine is not bound to the multicast object"

    def wrong(call: Call, name: str, source: Any, target: Any) -> int:
        driver, rank, ranks = registry.driver, registry.channel.rank, machine.ranks
        driver.write(source.data.ptr, _value(source.size, rank).tobytes())
        driver.fill(target.data.ptr, 0xFF, target.nbytes, stream)
        given, taken = source, target
        if call.operation is Operation.BROADCAST:  # the root has its array alone
            given, taken = (source, None) if rank == call.root else (None, target)
        enqueue(call._replace(input=given, output=taken), stream)
        stream.synchronize()
        check(name)
        if taken is None:
            return 0
        got = np.frombuffer(driver.read(target.data.ptr, target.nbytes), _DTYPE)
        return int((got != _expected(call, rank, ranks)).sum())

    for call in _calls(machine):
        name = f"try {call.operation.call} through the switch"
        role = ROLES[call.operation]
        rows = (machine.ranks if each else 1 for each in (role.input_rows, role.output_rows))
        counts = [count * call.columns for count in rows]
        arrays = [
            cupy.ndarray(count, _DTYPE, heap.allocate(count * _DTYPE.itemsize, name))
            for count in counts
        ]
        found = step(registry, name, partial(wrong, call, name, *arrays))
        said = registry.channel.all_gather(str(found).encode(), tag=name)
        for peer, count in enumerate(map(int, said)):
            if count:
                return (
                    f"{call.operation.call} of {call.columns:,} elements through the switch gave "
                    f"rank {peer} {count:,} wrong ones"
                )
    return ""
