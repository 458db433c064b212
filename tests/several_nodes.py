"""Ranks on nodes that a test pretends: how ranks are placed, and where algorithms change over."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import collective_workers as work
import pytest

from cupy_zc import Communicator
from cupy_zc.collectives import hierarchical, opening
from cupy_zc.collectives.acts import Sizes
from cupy_zc.group import Topology

__all__ = ["LARGE", "SMALL", "pretend"]

#: Where all takes the way of small arrays, and where all takes that of large ones, in many chunks.
SMALL = Sizes(leaders=1 << 30, piece=1 << 20, scratch=1 << 20)
LARGE = Sizes(leaders=1, piece=48, scratch=1)


@contextlib.contextmanager
def pretend(
    node_of: Sequence[int], sizes: Sizes | None = None, **options: Any
) -> Iterator[list[Communicator]]:
    """Communicators in threads; ``node_of`` has the node of each rank."""
    with pytest.MonkeyPatch.context() as patch:
        topology = Topology(0, tuple(node_of), (0,) * len(node_of))
        patch.setattr(
            opening, "discover", lambda ranks: dataclasses.replace(topology, rank=ranks.rank)
        )
        if sizes is not None:
            patch.setattr(hierarchical, "Sizes", functools.partial(lambda: sizes))
        with work.communicators(len(node_of), **options) as comms:
            yield comms
