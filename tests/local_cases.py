"""Local work checked against NumPy, and what is around it: what its tests share."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from emulated import POISON
from emulated_cases import DTYPES

from cupy_zc.collectives import reductions
from cupy_zc.collectives.local import LocalWork, Rows
from cupy_zc.driver.api import Driver
from cupy_zc.driver.host import HostDriver

__all__ = ["DIVISIBLE", "INT32", "Bytes", "bits_of", "check_copy", "check_divide", "special"]

Array = np.ndarray[Any, Any]

#: Bytes of memory on both sides of what is written.
GUARD = 64
INT32 = DTYPES.index(np.dtype("i4"))
#: All but bool, which has no average.
DIVISIBLE = range(1, len(DTYPES))


class Bytes:
    """Device memory, filled from an array, at an offset of a multiple of 16."""

    def __init__(self, driver: Driver, content: bytes, offset: int = 0) -> None:
        self._driver = driver
        self._memory = driver.plain_memory(len(content) + 2 * GUARD + 32)
        self._size = len(content)
        start = self._memory.ptr + GUARD
        self.address = start + -start % 16 + offset
        self.write(content)

    def write(self, content: bytes) -> None:
        """Fill it, and set the bytes around it to the poison."""
        guard = bytes([POISON] * GUARD)
        framed = guard + content + guard
        if isinstance(self._driver, HostDriver):
            ctypes.memmove(self.address - GUARD, framed, len(framed))
        else:
            self._driver.write(self.address - GUARD, framed)

    def read(self) -> bytes:
        """What it holds; the bytes around it are as they were."""
        at, size = self.address - GUARD, self._size + 2 * GUARD
        on_host = isinstance(self._driver, HostDriver)
        framed = ctypes.string_at(at, size) if on_host else self._driver.read(at, size)
        assert {*framed[:GUARD], *framed[-GUARD:]} == {POISON}
        return framed[GUARD:-GUARD]


def noise(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def copied(
    rows: Rows, target: bytes, target_pitch: int, source: bytes, source_pitch: int, width: int
) -> bytes:
    """The target as it is after the copy."""
    result = bytearray(target)
    for given_row, taken_row in rows.pairs:
        given = source[given_row * source_pitch : given_row * source_pitch + width]
        result[taken_row * target_pitch : taken_row * target_pitch + width] = given
    return bytes(result)


def check_copy(
    driver: Driver,
    work: LocalWork,
    rows: Rows,
    width: int,
    gaps: tuple[int, int] = (0, 0),
    offsets: tuple[int, int] = (0, 0),
) -> None:
    """Copy rows of noise; the gaps between them, and what is around, stay as they are."""
    target_pitch, source_pitch = width + gaps[0], width + gaps[1]
    sources, targets = zip(*rows.pairs, strict=True) if rows.pairs else ((0,), (0,))
    before = noise(1, target_pitch * (1 + max(targets)))
    given = noise(2, source_pitch * (1 + max(sources)))
    target, source = Bytes(driver, before, offsets[0]), Bytes(driver, given, offsets[1])
    stream = driver.make_stream(non_blocking=True)
    where = (target.address, target_pitch, source.address, source_pitch, width)
    work.copy_rows(work.prepare(rows), *where, stream)
    stream.synchronize()
    assert target.read() == copied(rows, before, target_pitch, given, source_pitch, width)
    assert source.read() == given


def special(code: int) -> Array:
    """What is hard to divide, of a type."""
    dtype = DTYPES[code]
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        near = [bounds.min, bounds.min + 1, bounds.max - 1, bounds.max]
        return np.array([*near, *range(max(-20, bounds.min), 21)], dtype)
    part = {8: np.dtype("f4"), 16: np.dtype("f8")}[dtype.itemsize] if dtype.kind == "c" else dtype
    bits = part.itemsize * 8
    unsigned = np.dtype(f"u{part.itemsize}")
    subnormals = np.array([1, 2, 3, 5, 9, 100, 127], unsigned)
    signed = subnormals | unsigned.type(1 << bits - 1)
    named = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 3, 10, 1e-3], part)
    parts = np.concatenate([subnormals.view(part), signed.view(part), named])
    if dtype.kind != "c":
        return parts
    pairs = np.stack(np.meshgrid(parts, parts), axis=-1)
    return np.ascontiguousarray(pairs).view(dtype).reshape(-1)


def bits_of(array: Array) -> Array:
    """The bits of all parts, where a NaN is any NaN: a GPU has one of its own."""
    parts = array.view({8: "f4", 16: "f8"}[array.itemsize]) if array.dtype.kind == "c" else array
    bits = parts.view(f"u{parts.itemsize}").copy()
    bits[parts != parts] = -1 & (1 << 8 * parts.itemsize) - 1
    return bits


def rule(array: Array, by: int) -> Array:
    """The average of ``by`` arrays of which all but the first are zeros, or as good as it."""
    zeros = np.full_like(array, -0.0) if array.dtype.kind not in "iu" else np.zeros_like(array)
    if array.dtype.kind == "c":
        zeros = np.full_like(array, complex(-0.0, -0.0))
    result = np.empty_like(array)
    reductions.reduce_into("avg", [array, *[zeros] * (by - 1)], [result])
    return result


def check_divide(
    driver: Driver, work: LocalWork, code: int, numbers: Array, by: int, offset: int = 0
) -> None:
    """Divide; what is around stays as it is."""
    memory = Bytes(driver, numbers.tobytes(), offset)
    stream = driver.make_stream(non_blocking=True)
    work.divide(memory.address, len(numbers), code, by, stream)
    stream.synchronize()
    found = np.frombuffer(memory.read(), numbers.dtype)
    wanted = rule(numbers, by)
    np.testing.assert_array_equal(bits_of(found), bits_of(wanted), f"{numbers.dtype} / {by}")
