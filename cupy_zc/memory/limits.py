"""What a pool is told about sizes, checked: arguments in bytes, and the first limit."""

from __future__ import annotations

import operator
from typing import Any

from ..driver import Driver
from ..errors import InvalidTypeError, InvalidValueError

__all__ = ["LIMIT", "limit_bytes", "parse_limit", "whole"]

#: The first limit of every pool, as in CuPy.
LIMIT = "CUPY_GPU_MEMORY_LIMIT"


def whole(call: str, name: str, value: Any) -> int:
    """An argument in bytes, whatever kind of integer it is."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidTypeError(call, name, value, "an int, in bytes") from None
    if number < 0:
        raise InvalidValueError(call, name, value, "at least 0 bytes")
    return number


def limit_bytes(call: str, driver: Driver, device: int, size: Any, fraction: Any) -> int:
    """A limit given as bytes or as a fraction of a device's memory, in bytes; 0 for none."""
    if size is not None:
        if fraction is not None:
            raise InvalidValueError(call, "fraction", fraction, "only one of size and fraction")
        return whole(call, "size", size)
    if fraction is None:
        return 0
    if isinstance(fraction, str) or not hasattr(fraction, "__float__"):
        raise InvalidTypeError(call, "fraction", fraction, "a number from 0 to 1")
    if not 0 <= fraction <= 1:
        raise InvalidValueError(call, "fraction", fraction, "0 to 1")
    return int(float(fraction) * driver.memory_info(device).total)


def parse_limit(text: str | None) -> tuple[int | None, float | None]:
    """``CUPY_GPU_MEMORY_LIMIT`` as (size, fraction): bytes, or a percentage with ``%``."""
    if not text:
        return None, None
    try:
        if text.endswith("%"):
            return None, float(text[:-1]) / 100.0
        return int(text), None
    except ValueError:
        raise InvalidValueError(
            "MemoryPool", LIMIT, text, "a number of bytes, or a percentage"
        ) from None
