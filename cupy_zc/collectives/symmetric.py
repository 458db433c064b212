"""Arrays of a communicator: ``empty`` and ``zeros``, at one offset on every rank."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from ..driver.api import Driver
from ..errors import InvalidTypeError, InvalidValueError
from ..registration import SymmetricHeap

if TYPE_CHECKING:
    from .checks import Checker
    from .engine import Engine
    from .ordering import Line

__all__ = ["SymmetricArrays"]


class SymmetricArrays(ABC):
    """The part of a communicator that makes arrays."""

    _checker: Checker
    _driver: Driver
    _heap: SymmetricHeap
    _engine: Engine
    _line: Line

    @abstractmethod
    def _everywhere(self, step: str) -> AbstractContextManager[None]:
        """A block that fails on all nodes where it fails on one."""

    def empty(self, shape: Any, dtype: Any = float, order: str = "C") -> cupy.ndarray:
        """An array at the same offset on every rank, registered by nature. Collective.

        Args:
            shape: An int or ints, as for ``cupy.empty``; as many bytes on all ranks.
            dtype: Its type.
            order: "C" or "F".

        Raises:
            InvalidValueError: a negative length, or another order.
            MismatchError: ranks ask for different sizes; on all of them.
            AgreementError: a rank has no memory left; on all of them.
        """
        return self._symmetric("empty", shape, dtype, order)

    def zeros(self, shape: Any, dtype: Any = float, order: str = "C") -> cupy.ndarray:
        """As :meth:`empty`, filled with zeros."""
        array = self._symmetric("zeros", shape, dtype, order)
        # No kernel of CuPy: to load it, CUDA may wait for one of another rank in this process.
        with self._line.turn("zeros"):
            stream = self._driver.current_stream()
            self._driver.fill(array.data.ptr, 0, array.nbytes, stream)
        return array

    def _symmetric(self, call: str, shape: Any, dtype: Any, order: str) -> cupy.ndarray:
        try:
            lengths = tuple(map(operator.index, shape)) if np.iterable(shape) else (int(shape),)
        except TypeError:
            allowed = "an int or a tuple of ints"
            raise InvalidTypeError(self._checker.name(call), "shape", shape, allowed) from None
        if min(lengths, default=0) < 0:
            raise InvalidValueError(self._checker.name(call), "shape", shape, "lengths from 0")
        if order not in ("C", "F"):
            raise InvalidValueError(self._checker.name(call), "order", order, "'C' or 'F'")
        kind = np.dtype(dtype)
        with self._line.turn(call), self._everywhere(call):
            nbytes = math.prod(lengths) * kind.itemsize
            memory = self._heap.allocate(nbytes, f"Communicator.{call}")
            if nbytes:
                self._engine.adopt(memory.mem.segment)
            return cupy.ndarray(lengths, kind, memory, order=order)
