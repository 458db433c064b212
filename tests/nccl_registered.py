"""What is registered with NCCL, as its double has it."""

from __future__ import annotations

from typing import Any

import cupy
import pytest
from emulated_driver import EmulatedDriver
from fake_nccl_data import Span
from nccl_engines import PLACES, engines_of
from several_nodes import pretend

from cupy_zc import Communicator

__all__ = ["call", "has", "held", "places", "ranks", "span_of"]

places = pytest.mark.parametrize(
    ("backend", "node_of"), PLACES.values(), ids=[name.replace(" ", "-") for name in PLACES]
)


def ranks(
    device: EmulatedDriver, node_of: tuple[int, ...] = (0, 1), backend: str = "nccl",
    **options: Any,
) -> Any:  # fmt: skip
    options.setdefault("timeout", 10)
    return pretend(node_of, driver=device, backend=backend, register="manual", **options)


def span_of(array: cupy.ndarray) -> Span:
    """Of its segment."""
    segment = array.data.mem.segment
    return Span(segment.address, segment.size)


def held(comm: Communicator) -> list[set[Span]]:
    """What is registered, of each engine."""
    found = []
    for each in engines_of(comm):
        spans = [*each._comm.registered.values(), *each._comm.windows.values()]
        assert len(set(spans)) == len(spans)
        found.append(set(spans))
    return found


def has(comm: Communicator, array: cupy.ndarray) -> bool:
    """Whether the segment of an array is registered; with all engines or with none."""
    said = {span_of(array) in each for each in held(comm)}
    assert len(said) == 1
    return said.pop()


def call(comm: Communicator, array: cupy.ndarray) -> str:
    """A call that ended, and how its array was registered."""
    comm.all_reduce(array, array)
    comm.synchronize()
    assert comm.last_transfer is not None
    return comm.last_transfer.registration
