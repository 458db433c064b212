"""Collectives of ranks on several nodes, the host engine in place of node and rail, against NumPy."""

from __future__ import annotations

import collective_workers as work
import pytest
from collective_workers import Buffers
from several_nodes import LARGE, SMALL, pretend

from cupy_zc import Communicator
from cupy_zc.collectives.acts import Sizes

#: By name: the node of each rank.
PLACEMENTS = {
    "2 x 1": (0, 1),
    "1 x 2": (0, 0),
    "3 x 1": (0, 1, 2),
    "2 x 2": (0, 0, 1, 1),
    "2 x 3": (0, 0, 0, 1, 1, 1),
    "2 x 2, ranks in turns": (0, 1, 0, 1),
    "4 x 2": (0, 0, 1, 1, 2, 2, 3, 3),
}


@pytest.mark.parametrize("sizes", [SMALL, LARGE, None], ids=["small", "large", "default"])
@pytest.mark.parametrize("node_of", PLACEMENTS.values(), ids=PLACEMENTS)
def test_every_collective_does_what_numpy_says(
    node_of: tuple[int, ...], sizes: Sizes | None
) -> None:
    with pretend(node_of, sizes, register="manual", backend="hierarchical") as comms:
        assert {comm.backend for comm in comms} == {"hierarchical"}

        def body(comm: Communicator) -> int:
            buffers = Buffers.of(comm)
            cases = work.cases(comm.size)
            for case in cases:
                work.check(comm, case, buffers)
            return len(cases)

        assert min(work.run(comms, body)) > 300
