"""Memory that qualifies for sharing, registration and multicast, behind CuPy's allocator."""

from __future__ import annotations

from .install import install, installed_pool, uninstall
from .pool import MemoryPool
from .pooled import PooledMemory
from .recording import Recording
from .snapshot import PoolStatistics, SegmentInfo, render

__all__ = [
    "MemoryPool",
    "PoolStatistics",
    "PooledMemory",
    "Recording",
    "SegmentInfo",
    "install",
    "installed_pool",
    "render",
    "uninstall",
]
