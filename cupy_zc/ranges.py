"""NVTX ranges around the calls of communicators, so that Nsight Systems names them.

They are there where the process was started with ``CUPY_ZC_NVTX=1``, and CuPy has NVTX: the methods
are wrapped once, when the package is imported. Otherwise nothing is, so that a call costs nothing
more, on its long way and on its short one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["CALLS", "wrap"]

_log = logging.getLogger("cupy_zc")

#: The methods that get a range: what enqueues, and what waits for other ranks.
CALLS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "reduce_scatter",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "send",
    "recv",
    "send_recv",
    "barrier",
    "register",
    "empty",
    "zeros",
    "collect",
    "split",
    "close",
    "synchronize",
)


def wrap(kind: type, names: Iterable[str] = CALLS) -> bool:
    """Put a range around methods of a class, for good; whether CuPy has NVTX."""
    from cupy.cuda import nvtx

    if not getattr(nvtx, "available", False):
        _log.warning("CUPY_ZC_NVTX=1 has no effect: this CuPy was built without NVTX")
        return False
    for name in names:
        setattr(kind, name, _ranged(getattr(kind, name), f"cupy_zc.{name}", nvtx))
    return True


def _ranged(method: Callable[..., Any], text: str, nvtx: Any) -> Callable[..., Any]:
    push, pop = nvtx.RangePush, nvtx.RangePop

    @functools.wraps(method)
    def ranged(*arguments: Any, **named: Any) -> Any:
        push(text)
        try:
            return method(*arguments, **named)
        finally:
            pop()

    return ranged
