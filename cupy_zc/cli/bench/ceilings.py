"""What the link between two GPUs can do: kernels that read or write the peer, and copy engines.

One process drives both devices, so "both at once" needs no agreement between processes. Peer
access is opened for the measurement and closed again. Without a GPU it is what ``memcpy`` does.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...driver.api import using_stream
from .group import Group
from .report import Row, ceiling

__all__ = ["NBYTES", "measure", "measure_host"]

#: What is copied at a time: 256 MiB, in gulps of 64 bytes a thread.
NBYTES = 256 << 20
_HOST_BYTES = 32 << 20
_REPEATS = 10
_ROUNDS = 7
_THREADS = 512
_BLOCKS_PER_MULTIPROCESSOR = 4

#: 16-byte accesses, four in flight for each thread; the size is a multiple of what a step takes.
_SOURCE = """
extern "C" __global__ void copy16(const uint4* __restrict__ from, uint4* __restrict__ to,
                                  unsigned long long count) {
  const unsigned long long stride = 1ull * gridDim.x * blockDim.x;
  unsigned long long at = 1ull * blockIdx.x * blockDim.x + threadIdx.x;
  for (; at + 3 * stride < count; at += 4 * stride) {
    const uint4 a = from[at], b = from[at + stride];
    const uint4 c = from[at + 2 * stride], d = from[at + 3 * stride];
    to[at] = a;
    to[at + stride] = b;
    to[at + 2 * stride] = c;
    to[at + 3 * stride] = d;
  }
  for (; at < count; at += stride) to[at] = from[at];
}
"""


@dataclass(frozen=True, slots=True)
class _Side:
    """A device with a stream, a source and a destination of :data:`NBYTES`."""

    device: int
    stream: Any
    source: Any
    target: Any
    start: Any
    end: Any


@contextlib.contextmanager
def _peer_access(cupy: Any, devices: tuple[int, int]) -> Iterator[None]:
    """Open each device's view of the other."""
    runtime = cupy.cuda.runtime
    with contextlib.ExitStack() as undo:
        for device, peer in (devices, devices[::-1]):
            if not runtime.deviceCanAccessPeer(device, peer):
                raise RuntimeError(f"device {device} has no peer access to device {peer}")
            with cupy.cuda.Device(device):
                runtime.deviceEnablePeerAccess(peer)
            undo.callback(_close, cupy, device, peer)
        yield


def _close(cupy: Any, device: int, peer: int) -> None:
    with cupy.cuda.Device(device):
        cupy.cuda.runtime.deviceDisablePeerAccess(peer)


def _side(cupy: Any, device: int) -> _Side:
    with cupy.cuda.Device(device), cupy.cuda.using_allocator(None):
        source, target = cupy.zeros(NBYTES, "u1"), cupy.zeros(NBYTES, "u1")
        cupy.cuda.Device(device).synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        return _Side(device, stream, source, target, cupy.cuda.Event(), cupy.cuda.Event())


def _seconds(cupy: Any, copy: Callable[[_Side, _Side], None], pairs: list[Any]) -> float:
    """Seconds of one copy, the slower side's, with all pairs at it."""
    for side, peer in pairs:
        chosen = using_stream(side.stream, cupy.cuda.get_current_stream)
        with cupy.cuda.Device(side.device), chosen:
            side.start.record(side.stream)
            for _ in range(_REPEATS):
                copy(side, peer)
            side.end.record(side.stream)
    for side, _ in pairs:
        side.end.synchronize()
    slowest: float = max(cupy.cuda.get_elapsed_time(s.start, s.end) for s, _ in pairs)
    return slowest / 1e3 / _REPEATS


def measure_host(group: Group) -> list[Row]:
    """Copies between two arrays of NumPy: of one rank, and of all at once. Collective.

    Returns:
        A ceiling on rank 0, nothing elsewhere.
    """
    source, target = np.ones(_HOST_BYTES, np.uint8), np.zeros(_HOST_BYTES, np.uint8)
    rates = []
    for first in (1, group.size):
        times = []
        for _ in range(_ROUNDS):
            group.barrier()
            start = time.perf_counter()
            if group.rank < first:
                np.copyto(target, source)
            times.append(time.perf_counter() - start)
        slowest = map(max, *group.all_gather(times)[:first], [0.0] * _ROUNDS)
        rates.append(_HOST_BYTES / statistics.median(slowest) / 1e9)
    return [ceiling("memory copy", _HOST_BYTES, *rates)] if group.rank == 0 else []


def measure(cupy: Any, devices: tuple[int, int] = (0, 1)) -> list[Row]:
    """Measure between two devices; takes a second or two.

    Raises:
        RuntimeError: they have no peer access to each other.
    """
    multiprocessors = cupy.cuda.Device(devices[0]).attributes["MultiProcessorCount"]
    grid = (multiprocessors * _BLOCKS_PER_MULTIPROCESSOR,)
    kernel = cupy.RawKernel(_SOURCE, "copy16")
    copy_engine = cupy.cuda.runtime.memcpyPeerAsync

    def read(side: _Side, peer: _Side) -> None:
        kernel(grid, (_THREADS,), (peer.source, side.target, cupy.uint64(NBYTES // 16)))

    def write(side: _Side, peer: _Side) -> None:
        kernel(grid, (_THREADS,), (side.source, peer.target, cupy.uint64(NBYTES // 16)))

    def pull(side: _Side, peer: _Side) -> None:
        to, start = side.target.data.ptr, peer.source.data.ptr
        copy_engine(to, side.device, start, peer.device, NBYTES, side.stream.ptr)

    def push(side: _Side, peer: _Side) -> None:
        to, start = peer.target.data.ptr, side.source.data.ptr
        copy_engine(to, peer.device, start, side.device, NBYTES, side.stream.ptr)

    ways = {
        "kernel reads peer": read,
        "kernel writes peer": write,
        "copy engine pull": pull,
        "copy engine push": push,
    }
    rows = []
    with _peer_access(cupy, devices):
        left, right = (_side(cupy, device) for device in devices)
        for name, copy in ways.items():
            rates = []
            for pairs in ([(left, right)], [(left, right), (right, left)]):
                _seconds(cupy, copy, pairs)
                times = [_seconds(cupy, copy, pairs) for _ in range(_ROUNDS)]
                rates.append(NBYTES / statistics.median(times) / 1e9)
            rows.append(ceiling(name, NBYTES, rates[0], rates[1]))
    return rows
