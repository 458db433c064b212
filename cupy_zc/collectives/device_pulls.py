"""Large rows that a captured call fetches from its peers by copy engines.

Copy engines fill a link better than kernels do, and leave the multiprocessors to others. But they
must be told where the peers' arrays are, which an eager call finds out on the device alone. Ranks
that capture compare the call on the host (``captured.py``), and the lease of the graph keeps the
arrays where they are. So each rank copies what it gets, between two barriers: behind the first all
inputs are there, behind the second nobody reads them any more.

A rank writes to its own output only. Where a peer does not come, its arrays are as it left them,
and what this rank copied is garbage of a call that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ..driver.api import KernelDriver
from .call import Call
from .device_calls import Shape
from .device_plan import Launch, Machine
from .device_tables import at
from .engine import Agreed
from .plan import Operation

__all__ = ["MEETING", "Pulls", "can_pull", "pulls_of"]

#: What all ranks pass before and behind.
MEETING = Launch("copy_engines", "barrier.cu", "barrier", False, 1, 32, False, False, False)
_FROM_ROOT = (Operation.BROADCAST, Operation.SCATTER)


class Pull(NamedTuple):
    """One copy; addresses in this process."""

    target: int
    source: int
    nbytes: int


def can_pull(
    call: Call, plan: Launch, machine: Machine, inputs: Mapping[int, tuple[int, int]]
) -> bool:
    """Whether copy engines carry a captured call. The same on all ranks.

    Args:
        call: Nobody stages in it.
        plan: What kernels would do.
        machine: What the ranks share.
        inputs: Where the inputs of ranks are that all reach.
    """
    row = call.columns * call.dtype.itemsize
    if plan.algorithm != "push" or row < at(machine.thresholds.copy_engines, machine.ranks):
        return False
    givers = (call.root,) if call.operation in _FROM_ROOT else range(machine.ranks)
    return all(rank in inputs for rank in givers)


def pulls_of(
    call: Call, rank: int, ranks: int, address: Callable[[int], int]
) -> tuple[list[Pull], list[Pull]]:
    """What a rank copies from its peers, and from its own input.

    Args:
        call: A collective that only moves data.
        rank: This one.
        ranks: How many.
        address: Where the input of a rank starts in this process.
    """
    output = call.written
    if output is None or (call.operation is Operation.BROADCAST and rank == call.root):
        return [], []
    row = call.columns * call.dtype.itemsize
    base: int = output.data.ptr
    row_each = call.operation in (Operation.SCATTER, Operation.ALL_TO_ALL)

    def pull(giver: int) -> Pull:
        place = base if call.operation in _FROM_ROOT else base + giver * row
        return Pull(place, address(giver) + (rank * row if row_each else 0), row)

    if call.operation in _FROM_ROOT:
        found = [pull(call.root)]
        return ([], found) if rank == call.root else (found, [])
    # Every rank starts with another one, so that none is read by all at once.
    return [pull((rank + i) % ranks) for i in range(1, ranks)], [pull(rank)]


class Pulls:
    """Records copies.

    Args:
        driver: Of the streams.
        rank: This one.
        ranks: How many.
        address: Where a byte of a rank is in this process, by rank, arena and offset.
    """

    def __init__(
        self,
        driver: KernelDriver,
        rank: int,
        ranks: int,
        address: Callable[[int, int, int], int],
    ) -> None:
        self._driver = driver
        self._rank = rank
        self._ranks = ranks
        self._address = address
        #: A stream for each lane, as captures that are under way at once must not meet.
        self._beside: dict[int, Any] = {}

    def enqueue(self, call: Call, agreed: Agreed, stream: Any, lane: int, shape: Shape) -> None:
        """Record a call that :func:`can_pull` allows.

        Args:
            call: The call.
            agreed: What the ranks know of it.
            stream: It is capturing.
            lane: Of its graph.
            shape: Of :data:`MEETING`.
        """
        driver, own_input = self._driver, call.input
        meet = partial(shape.launch, shape.function, 1, MEETING.threads, stream, shape.parameters)
        agreed.keep_windows()

        def address(rank: int) -> int:
            if rank == self._rank:
                return int(own_input.data.ptr)
            return self._address(rank, *agreed.inputs[rank])

        remote, own = pulls_of(call, self._rank, self._ranks, address)
        own = [pull for pull in own if pull.target != pull.source]
        meet()
        if own:  # while the links are busy
            beside = self._beside.get(lane)
            if beside is None:
                beside = self._beside[lane] = driver.make_stream(non_blocking=True)
            driver.follow(beside, stream)
            for pull in own:
                driver.copy(*pull, beside)
        for pull in remote:
            driver.copy(*pull, stream)
        if own:
            driver.follow(stream, beside)
        meet()
