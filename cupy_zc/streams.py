"""``Stream``: a stream of whichever driver is in use."""

from __future__ import annotations

from typing import Any

from .driver import select

__all__ = ["Stream"]


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
