"""A driver that fails when told to, and counts what it is asked."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cupy_zc import DriverError

OUT_OF_MEMORY = ("CUDA_ERROR_OUT_OF_MEMORY", 2)
UNKNOWN = ("CUDA_ERROR_UNKNOWN", 999)


class FaultyDriver:
    """Everything of ``driver``, but ``fail[call]`` makes the next calls of that name raise.

    What is set on it stands in for what the driver has.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.calls: Counter[str] = Counter()
        self.fail: dict[str, list[tuple[str, int]]] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._driver, name)
        if name.startswith("_") or not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            results = self.fail.get(name)
            if results:
                result, code = results.pop(0)
                raise DriverError(
                    name, result, code, detail="injected", cause="a test asked for it"
                )
            return value(*args, **kwargs)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
