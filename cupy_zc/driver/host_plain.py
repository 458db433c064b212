"""Memory of the host driver that belongs to no segment."""

from __future__ import annotations

import ctypes
import mmap

from ..base_memory import BaseMemory

__all__ = ["HostPlainMemory"]


class HostPlainMemory(BaseMemory):
    """``size`` bytes of this process alone, zeroed; given back when the object is dropped."""

    __slots__ = ("_bytes", "driver_name")

    def __init__(self, size: int, device: int) -> None:
        self._bytes = (ctypes.c_char * size).from_buffer(mmap.mmap(-1, size))
        self.ptr = ctypes.addressof(self._bytes)
        self.size = size
        self.device_id = device
        self.driver_name = "host"
