"""How the device engine tries multicast out: one store to all ranks, and one load of their sum.

Whoever made the multicast objects asks for it, before anything relies on them.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from ..driver.api import KernelDriver, KernelName, using_stream
from ..registration import Registry
from .device_kernels import launch_with

__all__ = ["DeviceProbe"]

_SOURCE = "multimem_probe.cu"


class _Target(Protocol):
    """A word of 32 bits behind a multicast object, with 12 bytes after it that nobody uses."""

    @property
    def address(self) -> int:
        """Where it is in the multicast window of this process, aligned to 16 bytes."""
        ...


class DeviceProbe:
    """Stores and reduces on one device. Both calls return when it is done.

    Args:
        registry: Of the device.
        stream: Where kernels run.
    """

    def __init__(self, registry: Registry, stream: Any) -> None:
        assert isinstance(registry.driver, KernelDriver)
        self._driver = registry.driver
        self._device = registry.device
        self._stream = stream

    def store(self, target: _Target, value: int) -> None:
        """Store a word to all ranks."""
        self._launch("store", target, value)
        self._stream.synchronize()

    def reduce(self, target: _Target) -> int:
        """The sum of the words of all ranks, modulo 2 ** 32."""
        total = self._driver.kept_memory(8)
        self._launch("reduce", target, total.ptr)
        with using_stream(self._stream, self._driver.current_stream):
            return int.from_bytes(self._driver.read(total.ptr, 8), "little")

    def _launch(self, what: str, target: _Target, value: int) -> None:
        function = self._driver.load(self._device, KernelName(_SOURCE, f"multimem_probe_{what}"))
        values = [ctypes.c_uint64(target.address), ctypes.c_uint64(value)]
        launch_with(self._driver, function, 1, 1, self._stream, values)
