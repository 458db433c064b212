"""Waiting for a device without harm to what others are doing on it.

``cuCtxSynchronize`` would not do. While a stream of the device is being captured, in whichever mode
and thread, it fails *and* invalidates that capture, also when it is asked in relaxed mode. Freeing
memory waits just as well and harms no capture (both measured with driver 580; a test on GPUs
repeats it). The memory to free is allocated ahead, because waiting is what a pool does when there
is none left.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from ..errors import DriverError
from .cuda_calls import Contexts, call, relaxed_capture

__all__ = ["SPARE", "Waiting"]

#: Bytes of what is freed; as much as when it was measured.
SPARE = 2 << 20


class Waiting:
    """Waits for devices; thread-safe."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        #: Device memory whose only purpose is to be freed; several pieces where threads waited at
        #: once, each of which has put one back.
        self._spare: defaultdict[int, deque[Any]] = defaultdict(deque)

    def prepare(self, device: int) -> None:
        """Allocate what :meth:`wait` will free, if that was not done and there is memory for it.

        Raises:
            DriverError: the driver refused for another reason than memory.
        """
        if not self._spare[device]:
            with self._contexts.current(device), relaxed_capture():
                self._allocate(device)

    def wait(self, device: int) -> None:
        """Wait until all work enqueued on the device is done.

        Raises:
            DriverError: an earlier kernel failed; or there is not even the memory to free, and a
                stream of the device is being captured.
        """
        detail = f"device={device}"
        with self._contexts.current(device), relaxed_capture():
            memory = self._take(device)
            if memory is None:
                self._allocate(device)
                memory = self._take(device)
            if memory is None:
                call("cuCtxSynchronize", detail=detail)
                return
            call("cuMemFree", memory, detail=detail)
            if not self._spare[device]:
                self._allocate(device)

    def _take(self, device: int) -> Any:
        try:
            return self._spare[device].pop()
        except IndexError:  # none, or another thread waits with it
            return None

    def _allocate(self, device: int) -> None:
        detail = f"device={device}, size={SPARE}"
        try:
            self._spare[device].append(call("cuMemAlloc", SPARE, detail=detail))
        except DriverError as error:
            if not error.out_of_memory:
                raise
