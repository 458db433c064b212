"""Between a step of the node and one of NCCL: data of a step that failed go to no other node.

A kernel of the node that fails ends, and what is behind it in the stream would run with data that
are not whole; the other nodes would take them for good. So the stream waits in between for as long
as the record of the lane says that a call failed. That ends when NCCL has been aborted, for which
its watching thread looks at the gate: then the step of NCCL does nothing, and the other nodes have
their timeout.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..driver.api import KernelDriver

__all__ = ["Gate"]


class _Node(Protocol):
    """What is asked of the device engine, which a machine without a GPU may be unable to import."""

    def word(self, lane: int) -> int: ...
    def is_well(self) -> bool: ...
    def release(self) -> None: ...


class Gate:
    """The gate of one rank.

    Args:
        engine: Of the node.
        driver: Of the device.
    """

    def __init__(self, engine: _Node, driver: KernelDriver) -> None:
        self._engine = engine
        self._wait = driver.wait_until_zero

    def enqueue(self, stream: Any, lane: int) -> None:
        """Let a stream wait where a call of a lane of the node has failed. It can be captured."""
        self._wait(stream, self._engine.word(lane))

    @property
    def is_shut(self) -> bool:
        """Whether a call of the node has failed. From any thread."""
        return not self._engine.is_well()

    def open(self) -> None:
        """Let streams go on: NCCL is aborted. From any thread; again is no matter."""
        self._engine.release()
