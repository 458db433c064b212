"""``install`` and ``uninstall``: make a pool CuPy's allocator, and put back what was there."""

from __future__ import annotations

from typing import Any

import cupy

from ..errors import Error, InvalidTypeError
from .pool import MemoryPool, reap

__all__ = ["install", "installed_pool", "uninstall"]

_stack: list[tuple[MemoryPool, Any]] = []


def install(pool: MemoryPool | None = None) -> MemoryPool:
    """Let every CuPy array created from now on, in any thread, come from ``pool``.

    Calls nest: :func:`uninstall` puts back the allocator that was there before.

    Args:
        pool: The pool; None makes a new one.

    Returns:
        The pool.

    Raises:
        InvalidTypeError: ``pool`` is not a :class:`~cupy_zc.MemoryPool`.
        ValueError: from CuPy, inside ``cupy.cuda.using_allocator``.
    """
    if pool is None:
        pool = MemoryPool()
    if not isinstance(pool, MemoryPool):
        raise InvalidTypeError("install", "pool", pool, "a cupy_zc.MemoryPool or None")
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(pool.malloc)
    _stack.append((pool, before))
    return pool


def uninstall() -> None:
    """Undo the latest :func:`install`. Arrays that live keep their memory.

    Raises:
        Error: nothing is installed.
        ValueError: from CuPy, inside ``cupy.cuda.using_allocator``.
    """
    if not _stack:
        raise Error("uninstall: no pool is installed; each uninstall() undoes one install()")
    cupy.cuda.set_allocator(_stack[-1][1])
    _stack.pop()
    reap()


def installed_pool() -> MemoryPool | None:
    """The pool of the latest :func:`install` that was not undone."""
    return _stack[-1][0] if _stack else None
