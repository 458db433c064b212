"""CUDA's result codes, for a driver that refuses what CUDA refuses.

The numbers are those of ``CUresult``; ``tests/test_driver.py`` compares them with cuda-bindings.
"""

from __future__ import annotations

import errno
from enum import IntEnum

from ..errors import DriverError

__all__ = ["Result", "refused", "refused_by_system"]


class Result(IntEnum):
    """The results the host driver gives, named as in ``CUresult`` without ``CUDA_ERROR_``."""

    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    DEINITIALIZED = 4
    INVALID_DEVICE = 101
    INVALID_CONTEXT = 201
    OPERATING_SYSTEM = 304
    INVALID_HANDLE = 400
    ILLEGAL_STATE = 401
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    STREAM_CAPTURE_UNSUPPORTED = 900
    STREAM_CAPTURE_INVALIDATED = 901
    STREAM_CAPTURE_MERGE = 902
    STREAM_CAPTURE_UNMATCHED = 903
    STREAM_CAPTURE_UNJOINED = 904
    STREAM_CAPTURE_ISOLATION = 905
    STREAM_CAPTURE_IMPLICIT = 906
    CAPTURED_EVENT = 907
    STREAM_CAPTURE_WRONG_THREAD = 908
    TIMEOUT = 909


def refused(call: str, result: Result, detail: str, cause: str) -> DriverError:
    """The error to raise where CUDA would return ``result`` from ``call``."""
    return DriverError(call, f"CUDA_ERROR_{result.name}", result.value, detail=detail, cause=cause)


def refused_by_system(call: str, error: OSError, detail: str) -> DriverError:
    """The error to raise where the operating system refused what ``call`` needed of it."""
    text = f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}"
    if error.errno in (errno.ENOMEM, errno.ENOSPC):
        cause = f"the host is out of memory, addresses or mappings (vm.max_map_count) ({text})"
        return refused(call, Result.OUT_OF_MEMORY, detail, cause)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        cause = f"too many open descriptors ({text}); release segments or raise 'ulimit -n'"
        return refused(call, Result.OPERATING_SYSTEM, detail, cause)
    return refused(call, Result.OPERATING_SYSTEM, detail, f"the operating system said {text}")
