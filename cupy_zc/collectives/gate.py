"""Between a step of the node and one of NCCL: data of a step that failed go to no other node.

A kernel of the node that fails ends, and what is behind it in the stream would run with data that
are not whole; the other nodes would take them for good. So the stream waits in between for as long
as the record of the lane says that a call failed. That ends when NCCL has been aborted, for which
its watching thread looks at the gate: then the step of NCCL does nothing, and the other nodes have
their timeout.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from ..driver.api import KernelDriver

__all__ = ["Gate", "gate_of"]

_log = logging.getLogger("cupy_zc")


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


def gate_of(engine: _Node, driver: KernelDriver) -> Gate | None:
    """The gate of a rank, tried out on a stream and in a graph. Local; on its device.

    Returns:
        None where the driver cannot let a stream wait for a word, which is logged.
    """
    gate = Gate(engine, driver)
    stream = driver.make_stream(non_blocking=True)
    try:
        gate.enqueue(stream, 0)
        stream.synchronize()
        stream.begin_capture()
        try:
            gate.enqueue(stream, 0)
        finally:
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    except Exception as error:  # noqa: BLE001 - whatever it is, calls can do without
        _log.warning(
            "a step of the node that fails is passed on to other nodes, where it may be taken for "
            "good before they learn of it: this driver cannot let a stream wait: %s", str(error)
        )  # fmt: skip
        return None
    return gate
