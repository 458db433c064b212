"""``MemoryPool``: CuPy's memory pool, on memory that can be shared, registered and multicast.

The fast path of :meth:`MemoryPool.malloc` is two dict look-ups and one ``list.pop``; everything
else is in :mod:`cupy_zc.memory.device`.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import cupy
from cupy.cuda import MemoryPointer, memory_hook

from ..config import settings
from ..driver import Driver, select
from ..driver.api import capturing
from ..errors import DriverError, Error, InvalidValueError
from .blocks import Bin, Block
from .device import DevicePool
from .limits import LIMIT, limit_bytes, parse_limit, whole
from .pooled import NoMemory, PooledMemory, active_hooks, hand_over
from .recording import Recording
from .snapshot import PoolStatistics, SegmentInfo, segment_info, statistics, take_snapshot

__all__ = ["MemoryPool", "abandon", "reap"]

#: For :meth:`MemoryPool.malloc`: by stream key, and by device.
_Bins: TypeAlias = "tuple[dict[int, dict[int, Bin]], dict[int, dict[int, Bin]]]"

#: CuPy's unit of allocation, in bytes: sizes are rounded up to it and addresses aligned to it.
UNIT = 512

_log = logging.getLogger("cupy_zc")

_has_hooks = memory_hook._has_memory_hooks

#: Device pools whose MemoryPool is gone while arrays of it may live; see :func:`reap`.
_orphans: list[DevicePool] = []
_complained: weakref.WeakSet[DevicePool] = weakref.WeakSet()
_pools: weakref.WeakSet[MemoryPool] = weakref.WeakSet()


class MemoryPool(cupy.cuda.MemoryPool):  # type: ignore[misc]
    """A drop-in ``cupy.cuda.MemoryPool`` whose arrays can be shared, registered and multicast.

    ``cupy.cuda.set_allocator(pool.malloc)`` is all there is to do. Memory comes in *segments* that
    satisfy the three rules of NCCL's user buffer registration: shareable as a POSIX file
    descriptor, a multiple of the multicast granule in size, and aligned to it. An array never
    spans two segments.

    Everything else is as in CuPy: sizes rounded to 512 bytes, free memory kept for each device and
    stream, best fit with split and merge, limits, memory hooks, ``OutOfMemoryError`` only after
    freeing and collecting. Two differences: the limit counts segments, so one below a granule
    (2 MiB on most devices) admits nothing; and inside a stream capture, memory is private to the
    graph until it is destroyed, so that a replay cannot overwrite what others own.

    Args:
        driver: ``"cuda"``, ``"host"`` (no GPU needed), or None: CUDA where there is a GPU.
        segment_size: How many bytes to ask of the driver at a time; None: ``CUPY_ZC_SEGMENT_SIZE``
            (64 MiB). Rounded up to the granule. Larger requests get a segment of their own.

    Raises:
        DriverError: ``driver="cuda"`` and there is no usable GPU.
        InvalidValueError: an argument, or ``CUPY_GPU_MEMORY_LIMIT``, is not what is allowed.
    """

    def __init__(
        self, *, driver: str | Driver | None = None, segment_size: int | None = None
    ) -> None:
        if segment_size is None:
            segment_size = settings().segment_size
        if whole("MemoryPool", "segment_size", segment_size) == 0:
            raise InvalidValueError("MemoryPool", "segment_size", segment_size, "more than 0 bytes")
        super().__init__()
        self._driver = select(driver)
        self._segment_size = segment_size
        self._current_stream = self._driver.current_stream
        self._current_device = self._driver.current_device
        self._is_capturing = self._driver.is_capturing
        self._single = self._driver.device_count() == 1
        self._first_limit = parse_limit(os.environ.get(LIMIT))
        limit_bytes(
            LIMIT, self._driver, 0, *self._first_limit
        )  # raises now, not at the first request
        self._start()
        _pools.add(self)
        reap()

    def _start(self) -> None:
        """Begin with nothing: at first, and in the child after a fork."""
        #: The collector may run what allocates while the lock is held.
        self._making = threading.RLock()
        self._devices: dict[int, DevicePool] = {}
        #: For the fast path: stream key to size to blocks, and the same for the legacy default
        #: stream of each device. Recordings take them away, so that :meth:`_serve` sees all.
        self._bins: _Bins = ({}, {})
        self._hot, self._default = self._bins
        self._note: Callable[[PooledMemory], None] | None = None
        self._finalizer = weakref.finalize(self, _abandon, self._devices)
        self._finalizer.atexit = False

    @property
    def driver(self) -> Driver:
        """The driver the memory comes from."""
        return self._driver

    def device_pool(self, device: int | None = None) -> DevicePool:
        """The part of the pool on one device; None for the current one."""
        if device is None:
            device = self._current_device()
        pool = self._devices.get(device)
        if pool is None:
            limit = limit_bytes(LIMIT, self._driver, device, *self._first_limit)
            made = DevicePool(self._driver, device, self._segment_size, limit, self._bins[0])
            with self._making:
                pool = self._devices.setdefault(device, made)
                self._bins[1][device] = pool.homes[0].hot
            if pool is not made:
                made.close()
        return pool

    # Allocation

    def malloc(self, size: int) -> Any:
        """Allocate ``size`` bytes, from the pool if possible. Give this to ``set_allocator``.

        Returns:
            A ``cupy.cuda.MemoryPointer`` to the start of a block of ``size`` rounded up to 512.

        Raises:
            OutOfMemoryError: after freeing, collecting garbage and trying again.
            DriverError: the driver failed for another reason; the pool is as it was.
            InvalidValueError: ``size`` is negative.
        """
        stream = self._current_stream()
        try:
            key = stream._cupy_zc_key
            if key == 0:
                bins = self._default[0 if self._single else self._current_device()]
            elif self._is_capturing(stream.ptr):
                return self._malloc(size)
            else:
                bins = self._hot[key]
            bin_ = bins[(size + 511) & -512]
            if not (_has_hooks() and active_hooks()):
                return hand_over(bin_.pop(), bin_.device)
        except (LookupError, AttributeError, TypeError, OverflowError, RuntimeError):
            pass  # something new, no block at hand, or what ``_malloc`` says in better words
        return self._malloc(size)

    def _malloc(self, size: int) -> Any:
        size = whole("MemoryPool.malloc", "size", size)
        rounded = -(-size // UNIT) * UNIT
        hooks = active_hooks()
        if not hooks:
            return self._serve(rounded)
        device = self._current_device()
        for hook in hooks:
            hook.malloc_preprocess(device_id=device, size=size, mem_size=rounded)
        pointer, identity = 0, 0
        try:
            result = self._serve(rounded)
            pointer, identity = result.ptr, id(result.mem)
            return result
        finally:
            for hook in hooks:
                hook.malloc_postprocess(
                    device_id=device,
                    size=size,
                    mem_size=rounded,
                    mem_ptr=pointer,
                    pmem_id=identity,
                )

    def _serve(self, size: int) -> Any:
        if size == 0:
            return MemoryPointer(NoMemory(self._current_device(), self._driver.name), 0)
        pool = self.device_pool()
        if pool.region.mine:
            return self._serve_inside(size)
        if _orphans:
            reap()
        pointer = hand_over(pool.allocate(pool.home(self._current_stream()), size), pool.device)
        note = self._note
        if note is not None:
            note(pointer.mem)
        return pointer

    def _serve_inside(self, size: int) -> Any:
        """Serve user code that runs inside the pool: a finalizer, or a signal handler."""
        stream = self._current_stream()
        if capturing(self._driver, stream):
            raise Error(
                "a finalizer or a signal handler asked for memory inside a stream capture, while "
                "the pool was at work in the same thread; nothing could keep it for the graph"
            )
        return MemoryPointer(self._driver.plain_memory(size), 0)

    def reserve(self, nbytes: int) -> int:
        """Make sure one request of ``nbytes`` on the current stream needs no driver call.

        Returns:
            How many bytes the pool grew by.

        Raises:
            OutOfMemoryError, DriverError, InvalidValueError: as :meth:`malloc`.
        """
        nbytes = whole("MemoryPool.reserve", "nbytes", nbytes)
        if nbytes == 0:
            return 0
        pool = self.device_pool()
        return pool.reserve(pool.home(self._current_stream()), -(-nbytes // UNIT) * UNIT)

    def record_stream(self, array: Any, stream: Any) -> None:
        """Tell the pool that ``stream``, not the one the array was made on, uses the array.

        When the array is dropped, its memory is not handed out again before ``stream`` has passed
        that point; if ``stream`` is capturing, not before its graph is destroyed.

        Args:
            array: A ``cupy.ndarray`` of this pool.
            stream: A ``cupy.cuda.Stream``, or a stream of the host driver.

        Raises:
            InvalidValueError: the array's memory is not of this pool.
        """
        memory: Any = getattr(getattr(array, "data", None), "mem", None)
        if isinstance(memory, NoMemory):
            return
        pool = self._devices.get(getattr(memory, "device_id", -1))
        mine = isinstance(memory, PooledMemory) and memory.segment.home.pool is pool
        if not mine or pool is None:
            raise InvalidValueError(
                "MemoryPool.record_stream", "array", array, "an array allocated by this pool"
            )
        block: Block = memory._block
        pool.deferred.record(block, stream)

    # Giving back

    def free_all_blocks(self, stream: Any = None) -> None:
        """Release free segments of the current device to the driver.

        A segment goes when all of it is free and nothing has registered it. Memory of CUDA graphs
        stays until they are destroyed. While the current stream is capturing, nothing is released.

        Args:
            stream: Only release segments of this stream; None for all.

        Raises:
            DriverError: the driver refused; what it refused is in the pool as before.
        """
        reap()
        pool = self.device_pool()
        current = self._current_stream()
        if capturing(self._driver, current):
            return
        pool.settle()
        pool.supply.release_free(None if stream is None else self._driver.stream_key(stream))

    def free_all_free(self) -> None:
        """(Deprecated) Use :meth:`free_all_blocks`."""
        warnings.warn(
            "free_all_free is deprecated. Use free_all_blocks instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        self.free_all_blocks()

    # Limits

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        """Set the most bytes the pool may hold on the current device; 0 or nothing for no limit.

        Args:
            size: Bytes.
            fraction: Of the device's memory, 0 to 1.

        Raises:
            InvalidValueError: both given, or out of range.
        """
        device, call = self._current_device(), "MemoryPool.set_limit"
        self.device_pool().limit = limit_bytes(call, self._driver, device, size, fraction)

    def get_limit(self) -> int:
        """The limit on the current device in bytes, 0 for none."""
        return self.device_pool().limit

    # Figures

    def used_bytes(self) -> int:
        """Bytes of blocks in use on the current device."""
        return self.device_pool().used_bytes()

    def total_bytes(self) -> int:
        """Bytes the pool holds on the current device: the sum of its segments."""
        return self.device_pool().accounts.total_bytes

    def free_bytes(self) -> int:
        """Bytes held but not in use on the current device."""
        return self.device_pool().free_bytes()

    def n_free_blocks(self) -> int:
        """How many runs of free bytes there are on the current device."""
        return sum(block is None for _, _, _, block in self.device_pool().runs())

    def segments(self) -> tuple[SegmentInfo, ...]:
        """The segments of the current device, by offset."""
        return tuple(segment_info(segment) for segment in self.device_pool().segments())

    def statistics(self) -> PoolStatistics:
        """Current, peak and total bytes and counts of the current device."""
        pool = self.device_pool()
        pool.captures.poll()
        return statistics(pool)

    def snapshot(self, *, arrays: bool = False) -> dict[str, Any]:
        """What the pool looks like, on every device it has been used on: a JSON-able dict.

        Args:
            arrays: Say of each used block also which arrays are in it and what keeps them alive.
                It looks at every Python object, which takes about a second for each million.
        """
        pools = self._device_pools()
        for pool in pools:
            pool.captures.poll()
        return take_snapshot(self._driver, pools, arrays=arrays)

    def record(
        self, *, interval: float = 0.05, path: str | os.PathLike[str] | None = None
    ) -> Recording:
        """A recording of what the pool does over time; a context manager.

        Args:
            interval: Seconds from one look at the blocks to the next.
            path: A file that the recording is also written to, every second and when it stops:
                ``cupy-zc view`` shows it while the program runs.

        Raises:
            InvalidValueError: ``interval`` is not a positive number of seconds.
        """
        return Recording(self, interval, path)

    def _device_pools(self) -> list[DevicePool]:
        return [pool for _, pool in sorted(self._devices.copy().items())]

    def _watch(self, note: Callable[[PooledMemory], None] | None) -> None:
        """Have every request, in any thread, come by ``note``; None: take the fast path again."""
        self._note = note
        self._hot, self._default = self._bins if note is None else ({}, {})


def _abandon(devices: dict[int, DevicePool]) -> None:
    _orphans.extend(devices.values())


def abandon(pool: DevicePool) -> None:
    """Leave a device pool that nobody asks for memory any more to :func:`reap`."""
    _orphans.append(pool)


def reap() -> None:
    """Release what is left of pools that were dropped, as far as their arrays were dropped too.

    A finalizer must not call the driver, so this runs whenever a pool is at work anyway.
    """
    waiting = len(_orphans)
    for _ in range(waiting):
        try:
            pool = _orphans.pop(0)
        except IndexError:  # another thread is at it
            return
        try:
            gone = pool.close()
        except DriverError as error:
            gone = False
            if pool not in _complained:  # not to the caller, who did not drop the pool
                _complained.add(pool)
                _log.error("memory of a dropped pool cannot be released, for now: %s", error)
        if not gone:
            _orphans.append(pool)


def _after_fork() -> None:
    """A child shares its parent's segments; it starts with none, and leaves those alone."""
    _orphans.clear()
    for pool in list(_pools):
        pool._finalizer.detach()
        pool._start()


os.register_at_fork(after_in_child=_after_fork)
