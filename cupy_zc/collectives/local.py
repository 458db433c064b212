"""What a rank does with its own memory alone: rows copied from matrix to matrix, arrays divided.

A collective across nodes puts its parts in order with the one, and makes averages of sums with the
other. Both are work of a stream, which waits for nobody and can be captured.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..driver.api import Driver, KernelDriver, KernelName, using_stream
from .device_kernels import element_of, launch_with, load_all
from .device_plan import THREADS
from .dtypes import DTYPES, ITEMSIZES
from .memory import matrix
from .reductions import Array, divide

__all__ = ["DeviceLocal", "HostLocal", "LocalWork", "Rows", "local_work"]

_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64

_COPY = KernelName("copy_rows.cu", "copy_rows")
_BOOL = DTYPES.index("bool")
#: Blocks of a multiprocessor, at most: as many as memory needs to be busy.
_BLOCKS = 2
#: What is worth a thread, in bytes.
_ACCESS = 16


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows to copy: pairs of a source row and a target row, no target twice."""

    pairs: tuple[tuple[int, int], ...]


class LocalWork(Protocol):
    """Work on the own memory of one rank. Sizes are bytes, addresses are ``int``."""

    def preload(self, codes: Iterable[int]) -> None:
        """Load what calls need for element types, by number, so that no call has to wait for it.

        Raises:
            DriverError: a kernel does not compile, or cannot be loaded.
        """
        ...

    def prepare(self, rows: Rows) -> Any:
        """A table for :meth:`copy_rows`, good until :meth:`close`, and the same for equal rows.

        Not to be called while a capture is under way. It waits for no stream of the caller.

        Raises:
            DriverError: there is no memory for it.
        """
        ...

    def copy_rows(
        self,
        table: Any,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        stream: Any,
    ) -> None:
        """Copy rows from one matrix to another one, which do not overlap.

        Args:
            table: Which ones; of :meth:`prepare`.
            target: Address of row 0.
            target_pitch: From a row to the next one, of any alignment.
            source: As ``target``.
            source_pitch: As ``target_pitch``.
            width: Of a row. Nothing else of the target is written.
            stream: Where; of the current device.
        """
        ...

    def divide(self, address: int, count: int, code: int, by: int, stream: Any) -> None:
        """Divide an array in place, as the average of ``by`` ranks divides their sum.

        Args:
            address: Of the array; a multiple of the size of an element, or of its real part.
            count: Elements.
            code: Number of their type, which is not bool.
            by: From 1 to 2 ** 31 - 1.
            stream: Where; of the current device.
        """
        ...

    def shut(self) -> None:
        """Let all that graphs replay from now on do nothing. No replay is under way."""
        ...

    def close(self) -> None:
        """Give the tables back. Nothing enqueued, and no graph, reads them any more."""
        ...


class HostLocal:
    """In NumPy.

    Args:
        driver: The host driver.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._is_shut = False

    def preload(self, codes: Iterable[int]) -> None:
        """Nothing is loaded."""

    def prepare(self, rows: Rows) -> Rows:
        """The rows themselves."""
        return rows

    def copy_rows(
        self,
        table: Rows,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        stream: Any,
    ) -> None:
        """See :meth:`LocalWork.copy_rows`."""
        if not table.pairs or not width:
            return
        sources, targets = zip(*table.pairs, strict=True)
        given = _rows(source, 1 + max(sources), source_pitch, width)
        taken = _rows(target, 1 + max(targets), target_pitch, width)
        self._enqueue("copy_rows", stream, functools.partial(_copy, table, given, taken))

    def divide(self, address: int, count: int, code: int, by: int, stream: Any) -> None:
        """See :meth:`LocalWork.divide`."""
        array = matrix(address, 1, count, np.dtype(DTYPES[code]))[0]
        self._enqueue("divide", stream, functools.partial(divide, array, by))

    def shut(self) -> None:
        """See :meth:`LocalWork.shut`."""
        self._is_shut = True

    def close(self) -> None:
        """Nothing: a table is no memory of the driver."""

    def _enqueue(self, call: str, stream: Any, work: Callable[[], None]) -> None:
        self._driver.resolve_stream(call, stream).enqueue(functools.partial(self._run, work))

    def _run(self, work: Callable[[], None]) -> None:
        if not self._is_shut:
            work()


def _rows(address: int, count: int, pitch: int, width: int) -> Array:
    """A view of the rows of a matrix."""
    span = matrix(address, 1, (count - 1) * pitch + width, np.dtype(np.uint8))
    rows: Array = np.ndarray((count, width), np.uint8, span, strides=(pitch, 1))
    return rows


def _copy(table: Rows, given: Array, taken: Array) -> None:
    for source, target in table.pairs:
        taken[target] = given[source]


@dataclass(frozen=True, slots=True)
class _Table:
    """Rows in device memory, as ``cuda/copy_rows.cu`` reads them."""

    count: int
    #: None where there are no rows.
    memory: Any


class DeviceLocal:
    """By the kernels ``copy_rows.cu`` and ``divide.cu``, one launch a call.

    Args:
        driver: Of the device.
        device: Ordinal.
    """

    def __init__(self, driver: KernelDriver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._most = _BLOCKS * driver.multiprocessors(device)
        self._tables: dict[Rows, _Table] = {}
        self._loaded: set[KernelName] = set()
        #: A word that kernels look at: whether they must not do anything.
        self._word: Any = None
        with self._aside():
            self._word = driver.kept_memory(8)
            driver.write(self._word.ptr, bytes(8))

    def preload(self, codes: Iterable[int]) -> None:
        """See :meth:`LocalWork.preload`; a type without an average needs nothing of its own."""
        names = {_COPY, *(_divide_of(code) for code in codes if code != _BOOL)} - self._loaded
        if names:
            load_all(self._driver, self._device, names)
            self._loaded |= names

    def prepare(self, rows: Rows) -> _Table:
        """See :meth:`LocalWork.prepare`."""
        table = self._tables.get(rows)
        if table is None:
            table = self._tables[rows] = self._made(rows)
        return table

    def copy_rows(
        self,
        table: _Table,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        stream: Any,
    ) -> None:
        """See :meth:`LocalWork.copy_rows`."""
        if table.memory is None or not width:
            return
        values = (
            table.memory.ptr, table.count, target, target_pitch, source, source_pitch, width,
            self._word.ptr,
        )  # fmt: skip
        self._launch(_COPY, table.count * width, [_u64(value) for value in values], stream)

    def divide(self, address: int, count: int, code: int, by: int, stream: Any) -> None:
        """See :meth:`LocalWork.divide`."""
        if count:
            values = [_u64(address), _u64(count), _u32(by), _u64(self._word.ptr)]
            self._launch(_divide_of(code), count * ITEMSIZES[code], values, stream)

    def shut(self) -> None:
        """See :meth:`LocalWork.shut`."""
        with self._aside():
            self._driver.write(self._word.ptr, b"\x01" * 8)

    def close(self) -> None:
        """See :meth:`LocalWork.close`; the word stays, for graphs that live."""
        self._tables.clear()

    def _made(self, rows: Rows) -> _Table:
        if not rows.pairs:
            return _Table(0, None)
        data = np.array(rows.pairs, "<u8").tobytes()
        with self._aside():
            memory = self._driver.kept_memory(len(data))
            self._driver.write(memory.ptr, data)
        return _Table(len(rows.pairs), memory)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On the device, and a stream that nothing else is in."""
        with self._driver.use_device(self._device):
            side = self._driver.make_stream(non_blocking=True)
            with using_stream(side, self._driver.current_stream):
                yield

    def _launch(self, name: KernelName, nbytes: int, values: list[Any], stream: Any) -> None:
        function = self._driver.load(self._device, name)
        blocks = max(1, min(self._most, nbytes // (THREADS * _ACCESS)))
        launch_with(self._driver, function, blocks, THREADS, stream, values)


def _divide_of(code: int) -> KernelName:
    return KernelName("divide.cu", "divide", (element_of(code),))


def local_work(driver: Driver, device: int) -> LocalWork:
    """What does local work on a device.

    Args:
        driver: Of its memory; the host driver, or one that has kernels.
        device: Ordinal.
    """
    if driver.name == "host":
        return HostLocal(driver)
    assert isinstance(driver, KernelDriver)
    return DeviceLocal(driver, device)
