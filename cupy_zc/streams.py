"""Streams of whichever driver is in use, and work of one's own on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy

from .driver import select
from .driver.api import using_stream
from .driver.host_stream import HostStream
from .errors import InvalidTypeError

__all__ = ["Stream", "enqueue"]


def Stream(*, non_blocking: bool = False, driver: str | None = None) -> Any:  # noqa: N802
    """A new stream on the current device.

    Args:
        non_blocking: It does not wait for the legacy default stream (CUDA; no meaning on the host
            driver).
        driver: ``"cuda"``, ``"host"``, or None: the one that pools use.

    Returns:
        A ``cupy.cuda.Stream``, or a stream of the host driver with the same calls:
        ``with stream:``, ``synchronize``, ``record``, ``wait_event``, ``begin_capture`` and
        ``end_capture``.

    Raises:
        DriverError: ``driver="cuda"`` and there is no usable GPU.
    """
    return select(driver).make_stream(non_blocking=non_blocking)


def _call(work: Callable[[], object]) -> None:
    work()


def enqueue(work: Callable[[], object], stream: Any) -> None:
    """Compute on arrays in the order of a stream, or in a graph if the stream is capturing.

    On CUDA ``work`` is called now, with the stream as the current one, and what it launches goes
    there. NumPy launches nothing, so on the host driver ``work`` itself is put on the stream, and
    called when its turn comes; from a graph, each time that is replayed.

    Args:
        work: Computes with :func:`~cupy_zc.view` of arrays, and returns nothing of use.
        stream: From :func:`Stream`, or any stream of CuPy.

    Raises:
        InvalidTypeError: it is no stream.
        DriverError: the capture was invalidated.
        Exception: what ``work`` raised, where it could run at once.
    """
    if isinstance(stream, HostStream):
        stream.enqueue(lambda: _call(work))
    elif hasattr(stream, "ptr") and hasattr(stream, "use"):
        with using_stream(stream, cupy.cuda.get_current_stream):
            work()
    else:
        raise InvalidTypeError("enqueue", "stream", stream, "a stream of CuPy or the host driver")
