"""Zero-copy memory and collectives for CuPy.

``cupy_zc.install()`` lets every CuPy array live in memory that can be shared between processes,
registered with NCCL and bound to NVLink SHARP multicast objects. Nothing else changes.
"""

from __future__ import annotations

try:
    import cupy as _cupy  # noqa: F401
except ImportError as error:
    raise ImportError(
        "cupy_zc needs CuPy; install one that fits your CUDA: pip install 'cupy-zc[cuda13]' "
        "(or [cuda12])"
    ) from error

from . import config
from .arrays import asnumpy, copyto, view
from .collectives import Communicator, init_process_group
from .errors import (
    AgreementError,
    ClosedError,
    DriverError,
    Error,
    InvalidTypeError,
    InvalidValueError,
    LiveGraphsError,
    MismatchError,
    MulticastUnavailableError,
    NotZeroCopyError,
    OutOfMemoryError,
    PeerTimeoutError,
)
from .memory import MemoryPool, install, uninstall
from .streams import Stream, enqueue

__all__ = [
    "AgreementError",
    "ClosedError",
    "Communicator",
    "DriverError",
    "Error",
    "InvalidTypeError",
    "InvalidValueError",
    "LiveGraphsError",
    "MemoryPool",
    "MismatchError",
    "MulticastUnavailableError",
    "NotZeroCopyError",
    "OutOfMemoryError",
    "PeerTimeoutError",
    "Stream",
    "asnumpy",
    "config",
    "copyto",
    "enqueue",
    "init_process_group",
    "install",
    "uninstall",
    "view",
]

__version__ = "0.1.0"
