"""What an array of the pool holds: ``array.data.mem``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cupy.cuda.memory as _memory
from cupy.cuda import memory_hook

from ..base_memory import BaseMemory
from ..errors import InvalidValueError
from .blocks import Block, Segment

__all__ = ["NoMemory", "PooledMemory", "active_hooks", "hand_over"]

_has_hooks = memory_hook._has_memory_hooks
_MemoryPointer = _memory.MemoryPointer


class PooledMemory(BaseMemory):
    """One block in the user's hands; what ``array.data.mem`` is. Made by the pool only.

    Dropping it appends the block to a list and does nothing else, so it may happen anywhere: in
    the garbage collector, in another thread, inside ``malloc``. Where memory hooks are installed in
    the dropping thread, they are called around that, as CuPy does.
    """

    __slots__ = ("_block",)

    if TYPE_CHECKING:
        _block: Block

    @property
    def segment(self) -> Segment:
        """The segment the block lies in.

        Raises:
            InvalidValueError: the memory was freed.
        """
        try:
            block = self._block
        except AttributeError:
            raise InvalidValueError("PooledMemory", "memory", self, "memory not freed") from None
        return block.segment

    @property
    def driver_name(self) -> str:
        """``"cuda"`` or ``"host"``."""
        return self.segment.home.pool.driver.name

    def free(self) -> None:
        """Give the block back to the pool now; again does nothing."""
        try:
            block = self._block
            del self._block  # of two threads, one gets past this
        except AttributeError:
            return
        pointer, self.ptr = self.ptr, 0
        hooks = active_hooks()
        if not hooks:
            block.bin.append(block)
            return
        identity, region = id(self), block.segment.home.pool.region
        if region.mine:  # the collector runs inside the pool; hooks are user code and wait
            region.afterwards(lambda: _free_with_hooks(hooks, block, pointer, identity))
        else:
            _free_with_hooks(hooks, block, pointer, identity)

    def __del__(self, has_hooks: Callable[[], bool] = _has_hooks) -> None:
        if has_hooks():
            self.free()
            return
        try:
            block = self._block
        except AttributeError:
            return  # freed before
        block.bin.append(block)


def active_hooks() -> list[Any]:
    """CuPy's memory hooks of the calling thread."""
    # Asking for them makes a dict, after which CuPy says that there are hooks, so ask that first.
    return list(memory_hook.get_memory_hooks().values()) if _has_hooks() else []


def _free_with_hooks(hooks: list[Any], block: Block, pointer: int, identity: int) -> None:
    what = {
        "device_id": block.segment.home.pool.device,
        "mem_size": block.size,
        "mem_ptr": pointer,
        "pmem_id": identity,
    }
    try:
        for hook in hooks:
            hook.free_preprocess(**what)
    finally:  # whatever a hook raises, the block is not lost
        block.bin.append(block)
        for hook in hooks:
            hook.free_postprocess(**what)


class NoMemory(BaseMemory):
    """The memory of an array without bytes."""

    __slots__ = ("driver_name",)

    def __init__(self, device: int, driver_name: str) -> None:
        self.ptr = 0
        self.size = 0
        self.device_id = device
        self.driver_name = driver_name


def hand_over(block: Block, device: int) -> Any:
    """A ``MemoryPointer`` to a block, which comes back to ``block.bin`` when it is dropped."""
    memory = PooledMemory()
    memory.ptr = block.ptr
    memory.size = block.size
    if device:
        memory.device_id = device
    memory._block = block
    block.uses += 1
    return _MemoryPointer(memory, 0)
