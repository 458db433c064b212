"""Every exception of the package, in one tree.

.. code-block:: text

    cupy_zc.Error
    ├── InvalidValueError      (ValueError)       an argument is outside what is allowed
    ├── InvalidTypeError       (TypeError)        an argument is of the wrong kind
    ├── ClosedError                               the object was closed
    ├── LiveGraphsError                           graphs still use what was to be closed
    ├── DriverError                               a call into the driver failed
    │   └── MulticastUnavailableError             multicast is off, absent, or did not work
    ├── OutOfMemoryError       (cupy.cuda.memory.OutOfMemoryError)
    ├── MismatchError                             ranks called different things
    ├── PeerTimeoutError       (TimeoutError)     a rank did not arrive in time
    ├── AgreementError                            one rank could not do a step, so all undid it
    └── NotZeroCopyError                          ``strict=True`` and the call would have staged

Each message says what happened, on which rank where there is one, and what to do about it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

from cupy.cuda.memory import OutOfMemoryError as _CupyOutOfMemoryError

__all__ = [
    "AgreementError",
    "ClosedError",
    "DriverError",
    "Error",
    "InvalidTypeError",
    "InvalidValueError",
    "LiveGraphsError",
    "MismatchError",
    "MulticastUnavailableError",
    "NotZeroCopyError",
    "OutOfMemoryError",
    "PeerTimeoutError",
]


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 160  # a layout, with shape and strides, fits


def _show(value: object) -> str:
    """A value in a few words. The repr of a device array would copy it, and wait for the device."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        kind = type(value)
        name = f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
        return f"<{name} of shape {value.shape} and dtype {value.dtype}>"
    return _short.repr(value)


class Error(Exception):
    """Root of everything this package raises on purpose."""


class InvalidValueError(Error, ValueError):
    """An argument has a value that is not allowed.

    Args:
        call: The public name that was called, for instance ``"MemoryPool.set_limit"``.
        name: The argument.
        value: What was passed.
        allowed: What would have been accepted, as the end of "expected ...".
    """

    def __init__(self, call: str, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{call}: {name}={_show(value)} is not allowed; expected {allowed}")
        self.call = call
        self.name = name
        self.value = value


class InvalidTypeError(Error, TypeError):
    """An argument is of a type that is not accepted.

    Args: as for :class:`InvalidValueError`.
    """

    def __init__(self, call: str, name: str, value: object, allowed: str) -> None:
        kind = type(value).__name__
        super().__init__(f"{call}: {name} is a {kind} ({_show(value)}); expected {allowed}")
        self.call = call
        self.name = name
        self.value = value


class ClosedError(Error):
    """The object was closed and cannot be used any more."""


class LiveGraphsError(Error):
    """A communicator was to be closed while graphs live that call it; it is still open.

    Args:
        call: The public name that was called, with the rank.
        graphs: Numbers of the graphs, as ``leases()`` has them.
    """

    def __init__(self, call: str, graphs: Sequence[int]) -> None:
        super().__init__(call, graphs)
        self.call = call
        self.graphs = tuple(graphs)

    def __str__(self) -> str:
        what = "graph lives that calls" if len(self.graphs) == 1 else "graphs live that call"
        return (
            f"{self.call}: {len(self.graphs)} {what} this communicator, of capture "
            f"{', '.join(map(str, self.graphs))}; drop the graphs and what was made from them, "
            "or close(force=True), after which their replays do nothing; leases() shows them"
        )


class DriverError(Error):
    """A driver call did not succeed.

    Args:
        call: The driver's own name of the call, for instance ``"cuMemCreate"``.
        result: The driver's own name of the result, for instance ``"CUDA_ERROR_OUT_OF_MEMORY"``.
        code: The number of that result (CUDA's ``CUresult``; the host driver uses the same ones).
        detail: The values that matter: sizes, addresses, device.
        cause: The likely cause and the remedy, in a sentence.
    """

    #: ``CUDA_ERROR_OUT_OF_MEMORY`` of ``CUresult``.
    OUT_OF_MEMORY = 2

    def __init__(
        self, call: str, result: str, code: int, *, detail: str = "", cause: str = ""
    ) -> None:
        text = f"{call}({detail}) returned {result} ({code})"
        super().__init__(f"{text}: {cause}" if cause else text)
        self.call = call
        self.result = result
        self.code = code
        self.detail = detail
        self.cause = cause

    @property
    def out_of_memory(self) -> bool:
        """Whether freeing memory and trying again could help."""
        return self.code == self.OUT_OF_MEMORY


class MulticastUnavailableError(DriverError):
    """Multicast was asked for where it is switched off, not supported, or failed its probe."""


class OutOfMemoryError(Error, _CupyOutOfMemoryError):  # type: ignore[misc]
    """The pool cannot serve a request, even after freeing what was free.

    An ``except cupy.cuda.memory.OutOfMemoryError`` catches it too.

    Args:
        size: Bytes asked for, rounded to the pool's unit.
        total: Bytes the pool holds on the device.
        limit: The limit of the pool in bytes, 0 for none.
        largest_hole: Bytes of the largest free block that this request could have used.
        free: Bytes free in the pool, in all blocks together.
        reason: What the driver said, if it was the driver that refused.
    """

    def __init__(
        self,
        size: int,
        total: int,
        limit: int = 0,
        *,
        largest_hole: int = 0,
        free: int = 0,
        reason: str = "",
    ) -> None:
        super().__init__(size, total, limit)
        self.size = size
        self.total = total
        self.limit = limit
        self.largest_hole = largest_hole
        self.free = free
        self.reason = reason

    def __str__(self) -> str:
        text = (
            f"Out of memory allocating {self.size:,} bytes "
            f"(allocated so far: {self.total:,} bytes, free in the pool: {self.free:,} bytes, "
            f"largest hole: {self.largest_hole:,} bytes, "
            f"limit: {f'{self.limit:,} bytes' if self.limit else 'none'})"
        )
        return f"{text}: {self.reason}" if self.reason else text

    def __reduce__(self) -> tuple[object, ...]:
        state = {"largest_hole": self.largest_hole, "free": self.free, "reason": self.reason}
        return (type(self), (self.size, self.total, self.limit), state)


class MismatchError(Error):
    """Ranks of one communicator called different things; nothing was written."""


class PeerTimeoutError(Error, TimeoutError):
    """A rank did not arrive within the deadline.

    Args:
        message: What was waited for, and what to do.
        ranks: The ranks that were missing.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class AgreementError(Error):
    """A step failed on one rank, was undone on all, and every rank raises this.

    Args:
        message: The step, the rank and its own error.
        rank: The rank on which the step failed.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class NotZeroCopyError(Error):
    """A call would have staged its data and ``strict=True`` was asked for."""
