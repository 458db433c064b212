"""Ranks in threads that share a GPU, for tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import collective_workers as work

from cupy_zc import Communicator
from cupy_zc.driver import select

__all__ = ["SIZES", "TYPES", "ranks"]

SIZES = [2, 3, 4, 8]
#: What the quick run compiles kernels for; the emulation covers all of them.
TYPES = {"bool", "int8", "float16", "float32", "int64", "complex128"}


@contextmanager
def ranks(n: int, **options: Any) -> Iterator[list[Communicator]]:
    with work.communicators(n, driver=select("cuda"), **{"register": "manual", **options}) as comms:
        yield comms
