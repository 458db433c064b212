"""Finds NCCL's library, and the calls of it that CuPy does not wrap."""

from __future__ import annotations

import ctypes
import functools
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from .api import Unavailable

__all__ = ["call", "cupy_nccl", "find", "library"]

_NAME = "libnccl.so.2"


def find(path: list[str]) -> str:
    """NCCL as the wheels of NVIDIA bring it (PyTorch needs one), else a name for the loader."""
    for place in path:
        file = Path(place or ".") / "nvidia" / "nccl" / "lib" / _NAME
        if file.is_file():
            return str(file)
    return _NAME


@functools.cache
def library() -> ctypes.CDLL:
    """NCCL, loaded for everybody, so that CuPy, PyTorch and these calls use one copy.

    Raises:
        Unavailable: there is none.
    """
    try:
        return ctypes.CDLL(find(sys.path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise Unavailable(str(error)) from error


@functools.cache
def cupy_nccl() -> ModuleType:
    """``cupy.cuda.nccl``, with the library found for it.

    Raises:
        Unavailable: there is no library, or this CuPy was built without NCCL.
    """
    library()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from cupy.cuda import nccl
    if not nccl.available:
        said = " ".join(" ".join(str(item.message).split()) for item in caught)
        raise Unavailable(said or "this CuPy was built without NCCL")
    module: ModuleType = nccl
    return module


def call(name: str, *arguments: Any) -> None:
    """Call a function of NCCL that returns a ``ncclResult_t``.

    Raises:
        RuntimeError: the result is not ncclSuccess. Unavailable: this NCCL has no such function.
    """
    function = getattr(library(), name, None)
    if function is None:
        raise Unavailable(f"this NCCL has no {name}")
    function.restype = ctypes.c_int
    result = function(*arguments)
    if result:
        words = library().ncclGetErrorString
        words.restype = ctypes.c_char_p
        raise RuntimeError(f"{name} returned {result}: {words(result).decode()}")
