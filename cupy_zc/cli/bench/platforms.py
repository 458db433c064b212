"""The machine under the engines: arrays, and how calls are repeated and timed.

On CUDA a figure is that of a graph or of eager calls. The calls of a graph are captured and timed
with events. The graph is launched twice, and the second launch is timed: the first one lines the
ranks up on the device, so neither the skew between the processes nor the launch from Python is in
the figure. Eager calls are repeated by Python, and a clock runs until the stream is done, as in
nccl-tests: the launches are in the figure, as far as the device has to wait for them.

Without a GPU the calls are repeated by Python and timed with a clock in either case; the figures
include the skew.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

__all__ = ["CudaPlatform", "HostPlatform", "Platform", "driver_version", "open_platform", "repeat"]

_DRIVER = Path("/proc/driver/nvidia/version")


class Platform(Protocol):
    """What the harness needs."""

    name: str
    #: The array module: ``cupy`` or ``numpy``.
    xp: ModuleType
    #: The stream that engines enqueue on; None without a GPU.
    stream: Any

    def describe(self) -> dict[str, object]:
        """Devices and versions, for the report."""
        ...

    def synchronize(self) -> None:
        """Wait for what was enqueued."""
        ...

    def capture(self, call: Callable[[], object], calls: int) -> Callable[[], object]:
        """So many calls as one thing that can be replayed."""
        ...

    def microseconds(self, replay: Callable[[], object]) -> float:
        """How long a replay takes on this rank, all ranks replaying at once."""
        ...

    def eager_microseconds(self, loop: Callable[[], object]) -> float:
        """How long eager calls take, from the first of them to the end of the last."""
        ...


class HostPlatform:
    """NumPy and a clock."""

    name = "host"
    xp: ModuleType = np
    stream: Any = None

    def describe(self) -> dict[str, object]:
        """NumPy's version."""
        return {"numpy": np.__version__}

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""

    def capture(self, call: Callable[[], object], calls: int) -> Callable[[], object]:
        """A loop."""
        return repeat(call, calls)

    def microseconds(self, replay: Callable[[], object]) -> float:
        """Wall clock."""
        start = time.perf_counter()
        replay()
        return (time.perf_counter() - start) * 1e6

    def eager_microseconds(self, loop: Callable[[], object]) -> float:
        """The same."""
        return self.microseconds(loop)


class CudaPlatform:
    """CuPy, one device, one stream.

    Args:
        device: The ordinal of the GPU of this process.
    """

    name = "cuda"

    def __init__(self, device: int) -> None:
        import cupy

        self.xp: ModuleType = cupy
        cupy.cuda.Device(device).use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    def describe(self) -> dict[str, object]:
        """Names of all GPUs, and versions."""
        runtime = self.xp.cuda.runtime
        names = [
            runtime.getDeviceProperties(device)["name"].decode()
            for device in range(runtime.getDeviceCount())
        ]
        return {
            "gpus": names,
            "nvidia_driver": driver_version(_DRIVER),
            "cuda": runtime.driverGetVersion(),
            "cupy": self.xp.__version__,
        }

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.stream.synchronize()

    def capture(self, call: Callable[[], object], calls: int) -> Callable[[], object]:
        """A CUDA graph, already uploaded."""
        self.stream.begin_capture()
        try:
            for _ in range(calls):
                call()
        except BaseException:
            # The capture is broken already, and the error on its way says more than this one.
            with contextlib.suppress(self.xp.cuda.runtime.CUDARuntimeError):
                self.stream.end_capture()
            raise
        graph = self.stream.end_capture()
        graph.upload(self.stream)

        def replay() -> None:
            graph.launch(self.stream)

        return replay

    def microseconds(self, replay: Callable[[], object]) -> float:
        """Event to event around the second of two launches."""
        replay()
        self._start.record(self.stream)
        replay()
        self._end.record(self.stream)
        self._end.synchronize()
        return float(self.xp.cuda.get_elapsed_time(self._start, self._end)) * 1e3

    def eager_microseconds(self, loop: Callable[[], object]) -> float:
        """Wall clock, until the stream is done."""
        start = time.perf_counter()
        loop()
        self.stream.synchronize()
        return (time.perf_counter() - start) * 1e6


def repeat(call: Callable[[], object], calls: int) -> Callable[[], object]:
    """So many calls, one after the other."""

    def loop() -> None:
        for _ in range(calls):
            call()

    return loop


def driver_version(file: Path) -> str:
    """The version of the kernel driver as NVIDIA counts it, such as 580.159; empty if unknown."""
    if not file.is_file():
        return ""
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", file.read_text(encoding="utf-8"))
    return found[0] if found else ""


def open_platform(name: str, rank: int) -> Platform:
    """The platform of a rank: ``"cuda"`` (device ``rank``) or ``"host"``."""
    return CudaPlatform(rank) if name == "cuda" else HostPlatform()
