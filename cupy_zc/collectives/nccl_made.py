"""Collectives as they were handed to NCCL, for loops that make them again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .call import Transfer

if TYPE_CHECKING:
    from .nccl import NcclEngine

__all__ = ["Made"]


class Made:
    """A collective as it was handed to NCCL, to be made again."""

    __slots__ = ("_arguments", "_divide", "_engine", "_function", "_transfer", "_version")

    def __init__(
        self,
        engine: NcclEngine,
        function: Callable[..., None],
        arguments: tuple[int, ...],
        divide: Callable[[Any], None] | None,
        transfer: Transfer,
        version: int,
    ) -> None:
        self._engine = engine
        self._function = function
        self._arguments = arguments
        self._divide = divide
        self._transfer = transfer
        self._version = version

    def launch(self, stream: Any) -> bool:
        """Make it again, eager; see :class:`~.engine.Repeat`."""
        engine = self._engine
        health, registrations = engine.health, engine.registrations
        if (
            health.failure is not None
            or registrations.stale
            or registrations.version != self._version  # it may be another transfer by now
        ):
            return False
        try:
            self.enqueue(stream)
        except BaseException as error:
            first = engine.fail(error)
            if first is not error:
                raise first from error
            raise
        health.made(stream)
        return True

    def enqueue(self, stream: Any) -> None:
        """Hand it to NCCL."""
        self._engine.hand_over(self._function, self._arguments, stream)
        if self._divide is not None:
            self._divide(stream)
        self._engine.done = self._transfer
