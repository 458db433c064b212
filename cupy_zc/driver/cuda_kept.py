"""Memory of CUDA that kernels are told things through, and that may be dropped anywhere.

CUDA frees memory of ``cudaMalloc`` and ``cudaHostAlloc`` when all kernels that run are done. Where
the garbage collector dropped the last reference, in the middle of a call, the thread would wait for
kernels that may themselves wait for what it was about to launch. So what is dropped is kept here,
and used again once somebody waited for its device.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Keeper", "KeptMemory"]

#: What kind of memory, of which device, and how many bytes.
_Key: TypeAlias = tuple[str, int, int]
_LEAST = 512


class _Block(NamedTuple):
    key: _Key
    ptr: int


class KeptMemory:
    """A block; dropped without any call of CUDA.

    Attributes:
        ptr: Its address.
    """

    __slots__ = ("_block", "_dropped", "ptr")

    def __init__(self, block: _Block, dropped: collections.deque[_Block]) -> None:
        self._block = block
        self._dropped = dropped
        self.ptr = block.ptr

    def __del__(self) -> None:
        self._dropped.append(self._block)


class Keeper:
    """All such memory of a driver; thread-safe, without locks."""

    def __init__(self) -> None:
        #: Where kernels that are under way may still use it.
        self._dropped: collections.deque[_Block] = collections.deque()
        self._free: dict[_Key, collections.deque[_Block]] = {}
        #: What was allocated, and is never freed. Blocks do not have it: what is reached from a
        #: dropped block alone the collector finalizes, though the block be kept.
        self._made: list[Any] = []

    def take(self, kind: str, device: int, size: int, make: Callable[[int], Any]) -> KeptMemory:
        """A block of ``size`` bytes or more, with anything in it.

        Args:
            kind: Blocks of one kind are all made alike.
            device: Whose kernels use it.
            size: Bytes.
            make: Allocates so many bytes, where there is no block to use again.
        """
        size = max(_LEAST, 1 << (size - 1).bit_length())
        key = (kind, device, size)
        try:
            block = self._free[key].popleft()
        except (KeyError, IndexError):  # none, or another thread has the last one
            memory = make(size)
            self._made.append(memory)
            block = _Block(key, memory.ptr)
        return KeptMemory(block, self._dropped)

    @contextmanager
    def waiting(self, device: int) -> Iterator[None]:
        """A block that waits for all work of a device; then what was dropped before is free."""
        before: list[_Block] = []
        with suppress(IndexError):  # none is left: other threads take some as well
            for _ in range(len(self._dropped)):
                before.append(self._dropped.popleft())  # noqa: PERF401
        try:
            yield
        except BaseException:
            self._dropped.extend(before)
            raise
        for block in before:
            if block.key[1] == device:
                self._free.setdefault(block.key, collections.deque()).append(block)
            else:
                self._dropped.append(block)
