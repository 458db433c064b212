"""CuPy's ``BaseMemory``, with the types that the compiled class has no word of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cupy.cuda.memory as _memory

__all__ = ["BaseMemory"]

if TYPE_CHECKING:

    class BaseMemory:
        """Memory of a device: what ``array.data.mem`` is. Sizes in bytes."""

        ptr: int
        size: int
        device_id: int

else:
    BaseMemory = _memory.BaseMemory
