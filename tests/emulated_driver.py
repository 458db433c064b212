"""A GPU for tests of the device engine: memory of the host driver, kernels as grids of fibers.

What it adds to the host driver is what a GPU has and that one has not: work runs *beside* the
thread that enqueued it, kernels of ``cuda/`` are launched, and its name is "cuda", so the package
takes the same ways as on a GPU. Ranks are threads of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from emulated_kernels import EmulatedKernel, KernelLibrary

import cupy_zc.arrays
import cupy_zc.driver
from cupy_zc.collectives import device_mail, device_plan, device_setup, device_tables, local
from cupy_zc.collectives.device_args import MAX_RANKS
from cupy_zc.collectives.device_plan import KEPT_FREE
from cupy_zc.driver.api import KernelName
from cupy_zc.driver.host import HostDriver
from cupy_zc.driver.host_graph import GraphBody
from cupy_zc.driver.host_plain import HostPlainMemory
from cupy_zc.driver.host_queue import Point, Work, run_queues
from cupy_zc.driver.host_result import Result, refused
from cupy_zc.driver.host_stream import HostStream

__all__ = ["EmulatedDriver", "emulated_device"]

#: Threads of a block where tests make them few. Kernels ask for a multiple of 32.
THREADS = 32
#: Where algorithms change over, in bytes: smaller than on a GPU, in the same order. The self-test
#: of lines has rows of 64 KiB.
SIZES = {
    "LL128_ONE_STEP": 64 << 10, "LL128_TWO_STEPS": 128 << 10, "LL128_ROW": 64 << 10,
    "LL128_REDUCE_SCATTER": 64 << 10, "LL128_BROADCAST": 64 << 10,
    "LL_ONE_STEP": 16 << 10, "PUSH_REDUCE": 512 << 10, "PUSH_REDUCE_SCATTER": 256 << 10,
    "CHUNK": 64 << 10,
}  # fmt: skip


class _Workers:
    """Threads that run work of streams; as many as there is work at once."""

    def __init__(self) -> None:
        self._idle: deque[queue.SimpleQueue[Work]] = deque()

    def run(self, work: Work) -> None:
        """Run work in a thread that is free, or a new one."""
        try:
            self._idle.pop().put(work)
        except IndexError:
            own: queue.SimpleQueue[Work] = queue.SimpleQueue()
            own.put(work)
            threading.Thread(target=self._serve, args=(own,), daemon=True).start()

    def _serve(self, own: queue.SimpleQueue[Work]) -> None:
        while True:
            own.get()()
            self._idle.append(own)


_workers = _Workers()


def _tell_of_launch(work: Any) -> None:
    """Call ``launched()`` of work, and of all work of a graph, that wants to know its turn."""
    body = getattr(work, "__self__", None)
    if isinstance(body, GraphBody):
        for node in body.nodes:
            _tell_of_launch(node)
    elif hasattr(work, "launched"):
        work.launched()


class DeviceStream(HostStream):
    """A stream whose work runs in other threads; what was captured in one of them as a whole."""

    def submit(self, call: str, work: Work) -> None:
        """Put work in; it is not waited for."""
        start: Callable[[], None]
        with self.streams.changed:
            if self.capture is not None:
                self.capture.record(call, self, work)
                return
            _tell_of_launch(work)
            end = Point(self.streams.changed)
            start = functools.partial(_workers.run, functools.partial(self._carry_out, work, end))
            at_once = self._queue.claim(start)
            self._queue.put_wait(end)
        if at_once:
            self._queue.run_claimed(start)
        else:
            self._queue.run()

    def _carry_out(self, work: Work, end: Point) -> None:
        try:
            work()
        except Exception as error:  # the next synchronize() raises it
            with self.streams.changed:
                self._queue._errors.append(error)
        run_queues(end.reach())


class EmulatedDriver(HostDriver):
    """Fulfils :class:`~cupy_zc.driver.api.KernelDriver`.

    Args:
        cache: Where compiled kernels are kept.
        multiprocessors: Of each device.
        devices: How many.
    """

    name = "cuda"

    def __init__(self, cache: Path, *, multiprocessors: int = 20, devices: int = 1) -> None:
        super().__init__(granularity=1 << 12, memory=1 << 34, devices=devices)
        self.library = KernelLibrary(cache)
        self._multiprocessors = multiprocessors
        self._loaded: dict[KernelName, int] = {}
        self._seeds = itertools.count()
        #: Kernels that were loaded, by the number that a launch takes.
        self.kernels: dict[int, EmulatedKernel] = {}
        self._made: weakref.WeakValueDictionary[int, DeviceStream] = weakref.WeakValueDictionary()

    # Kernels

    def load(self, device: int, name: KernelName) -> int:
        """The function of a kernel; the same on all devices."""
        del device
        kernel = self.library.load(name)
        number = self._loaded.setdefault(name, 1 + len(self._loaded))
        self.kernels.setdefault(number, kernel)
        return number

    def launch(
        self, function: int, blocks: int, threads: int, stream: Any, parameters: int
    ) -> None:
        """Launch; the arguments are copied now."""
        call, kernel = "cuLaunchKernel", self.kernels[function]
        stream = self._streams.resolve(call, stream)
        detail = f"{kernel.name.function}, blocks={blocks}, threads={threads}, {stream!r}"
        if stream.device_id != self.current_device():
            cause = f"device {self.current_device()} is current"
            raise refused(call, Result.INVALID_CONTEXT, detail, cause)
        if blocks < 1 or not 1 <= threads <= 1024:
            raise refused(call, Result.INVALID_VALUE, detail, "there is no such grid")
        arguments = kernel.arguments(parameters)
        stream.submit(
            call, functools.partial(kernel.run, blocks, threads, arguments, next(self._seeds))
        )

    def multiprocessors(self, device: int) -> int:
        """How many multiprocessors a device has."""
        self._check_device("cuDeviceGetAttribute", device)
        return self._multiprocessors

    def wait_until_zero(self, stream: Any, address: int) -> None:
        """In the order of the stream, for a minute at most."""
        stream = self._streams.resolve("cuStreamWaitValue32", stream)
        stream.submit("cuStreamWaitValue32", functools.partial(_wait_until_zero, address))

    # Streams

    def make_stream(self, *, non_blocking: bool = False) -> DeviceStream:
        """A new stream on the current device."""
        stream = DeviceStream(self._streams, self.current_device(), non_blocking=non_blocking)
        self._made[stream.ptr] = stream
        return stream

    def stream_at(self, address: int, device: int) -> HostStream | None:
        """The stream with this ``ptr``; 0 is the null stream of the device."""
        return self._made.get(address) if address else self._streams.null[device]

    # Memory and bytes

    def mapped_memory(self, size: int) -> HostPlainMemory:
        """Zeroed memory of the host, which kernels reach."""
        return HostPlainMemory(size, self.current_device())

    kept_memory = mapped_memory

    def plain_memory(self, size: int) -> HostPlainMemory:
        """As of the host driver, and of this one by name."""
        memory = super().plain_memory(size)
        memory.driver_name = self.name
        return memory

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        """Copy in the order of a stream."""
        stream = self._streams.resolve("cudaMemcpyAsync", stream)
        stream.submit("cudaMemcpyAsync", lambda: _do(ctypes.memmove, target, source, size))

    def fill(self, address: int, value: int, size: int, stream: Any) -> None:
        """Set bytes in the order of a stream."""
        stream = self._streams.resolve("cudaMemsetAsync", stream)
        stream.submit("cudaMemsetAsync", lambda: _do(ctypes.memset, address, value, size))

    def read(self, address: int, size: int) -> bytes:
        """Copy memory of any kind to bytes, after all work of the current stream."""
        self._settle("cuMemcpyDtoHAsync")
        return ctypes.string_at(address, size)

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to memory of any kind, after all work of the current stream."""
        self._settle("cuMemcpyHtoDAsync")
        ctypes.memmove(address, data, len(data))

    def _settle(self, call: str) -> None:
        stream = self.current_stream()
        if self.capture_info(stream) is not None:
            cause = "the stream is capturing"
            raise refused(call, Result.STREAM_CAPTURE_UNSUPPORTED, repr(stream), cause)
        stream.synchronize()


def _wait_until_zero(address: int) -> None:
    word, until = ctypes.c_uint32.from_address(address), time.monotonic() + 60
    while word.value:
        assert time.monotonic() < until, "nobody has opened a gate"
        time.sleep(0.001)


def _do(function: Callable[..., Any], *arguments: int) -> None:
    function(*arguments)


@contextlib.contextmanager
def emulated_device(cache: Path, *, devices: int = 1) -> Iterator[EmulatedDriver]:
    """Devices for up to three ranks of two blocks each, which is the CUDA driver for all who ask.

    Blocks have few threads, each of which is a fiber, and lanes are small. ``view``, ``asnumpy``
    and ``copyto`` reach its arrays as those of the host.
    """
    driver = EmulatedDriver(cache, multiprocessors=KEPT_FREE + 6, devices=devices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy_zc.driver, "_cuda", lambda: driver)
        patch.setattr(cupy_zc.arrays, "on_host", lambda array: True)
        for module in (device_mail, device_plan, device_setup, local):
            patch.setattr(module, "THREADS", THREADS)
        for name, value in SIZES.items():
            module = device_plan if name == "CHUNK" else device_tables
            patch.setattr(module, name, value if name == "CHUNK" else {MAX_RANKS: value})
        yield driver
