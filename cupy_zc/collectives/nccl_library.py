"""NCCL as the engine uses it: the calls of nccl4py's bindings, with errors and waits of ours.

Only functions of ``nccl.bindings`` are used: nccl4py's own layer above them takes 26 to 41 us a
call (see ``docs/performance.md``), the bindings little more than NCCL.

Communicators are *blocking*: with the other kind every call is handed to a thread of NCCL, and the
next one is refused until that is through (1.2 ms for a call of 1 KiB on two H200, NCCL 2.28.9). So
what can take long is done in a thread of its own here (:func:`in_time`), which its caller leaves
behind when time is up.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ..errors import DriverError, Error

__all__ = [
    "OLDEST",
    "WINDOWS_FROM",
    "Nccl",
    "NotInTimeError",
    "aside",
    "in_time",
    "load_nccl",
]

#: The first NCCL with ``ncclAlltoAll``, ``ncclGather`` and ``ncclScatter``.
OLDEST = 22800
#: The first one whose windows can be trusted in graphs; before, results could be wrong in silence.
WINDOWS_FROM = 23007
#: ``NCCL_WIN_DEFAULT``. Not ``NCCL_WIN_COLL_SYMMETRIC``, which promises that all ranks pass equal
#: offsets in every call: a program may pass any array of a segment.
_WINDOW = 0
_ID_BYTES = 128
_INT8, _SUCCESS, _IN_PROGRESS = 0, 0, 7

_T = TypeVar("_T")


class Nccl(Protocol):
    """What the engine asks of NCCL. A communicator, a handle or a window is whatever that gives.

    Collectives have the arguments of NCCL's C functions, in that order, and are enqueued on the
    stream of that address. They raise :class:`~cupy_zc.DriverError`, as everything here does.
    """

    @property
    def version(self) -> int:
        """As ``ncclGetVersion``: 22809 is 2.28.9."""
        ...

    def unique_id(self) -> bytes:
        """What rank 0 makes and all ranks need for :meth:`init`."""
        ...

    def init(
        self, size: int, identity: bytes, rank: int, *, sharp: bool, most_blocks: int | None
    ) -> Any:
        """A communicator on the current device. Waits for the other ranks.

        Args:
            size: How many ranks there are.
            identity: Of :meth:`unique_id`.
            rank: This one.
            sharp: Whether to ask for CollNet, with which IB SHARP is used.
            most_blocks: Of one kernel; None: as NCCL likes.
        """
        ...

    def async_error(self, comm: Any) -> str:
        """What went wrong in the background; empty where nothing did."""
        ...

    def register(self, comm: Any, address: int, size: int) -> Any:
        """``ncclCommRegister``; local."""
        ...

    def deregister(self, comm: Any, handle: Any) -> None:
        """``ncclCommDeregister``."""
        ...

    def register_window(self, comm: Any, address: int, size: int) -> Any:
        """``ncclCommWindowRegister``, of all ranks; None where NCCL makes none."""
        ...

    def deregister_window(self, comm: Any, window: Any) -> None:
        """``ncclCommWindowDeregister``."""
        ...

    def destroy(self, comm: Any) -> None:
        """Give a communicator back. Waits for graphs that use it."""
        ...

    def abort(self, comm: Any) -> None:
        """Let all its kernels end, and give it back. Waits for graphs that use it."""
        ...

    def group_start(self) -> None:
        """What follows in this thread is one operation, until :meth:`group_end`."""
        ...

    def group_end(self) -> None:
        """See :meth:`group_start`."""
        ...

    #: (input, output, count, dtype, op, comm, stream)
    all_reduce: Callable[..., None]
    #: (input, output, count of the output, dtype, op, comm, stream)
    reduce_scatter: Callable[..., None]
    #: (input, output, count, dtype, op, root, comm, stream)
    reduce: Callable[..., None]
    #: (input, output, count, dtype, root, comm, stream)
    broadcast: Callable[..., None]
    gather: Callable[..., None]
    scatter: Callable[..., None]
    #: (input, output, count of the input, dtype, comm, stream)
    all_gather: Callable[..., None]
    #: (input, output, count of a row, dtype, comm, stream)
    all_to_all: Callable[..., None]
    #: (array, count, dtype, peer, comm, stream)
    send: Callable[..., None]
    recv: Callable[..., None]


def _raising(name: str, function: Callable[..., _T], error: type[Exception]) -> Callable[..., _T]:
    """A function of the bindings that raises our errors."""

    @functools.wraps(function)
    def call(*arguments: Any) -> _T:
        try:
            return function(*arguments)
        except error as failure:
            raise _failure(name, failure) from failure

    return call


def _failure(name: str, error: Exception) -> DriverError:
    code = int(getattr(error, "status", -1))
    text = str(error)
    cause = text.partition(": ")[2] or text
    if "NCCL_DEBUG" not in cause:
        cause = f"{cause}; NCCL_DEBUG=WARN lets NCCL say more"
    return DriverError(name, text.partition(" ")[0], code, cause=cause)


class _Bindings:
    """``nccl.bindings.nccl``."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        error: type[Exception] = bindings.NCCLError

        def of(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            return _raising(name, function, error)

        self.version = int(of("ncclGetVersion", bindings.get_version)())
        self.all_reduce = of("ncclAllReduce", bindings.all_reduce)
        self.reduce_scatter = of("ncclReduceScatter", bindings.reduce_scatter)
        self.reduce = of("ncclReduce", bindings.reduce)
        self.broadcast = of("ncclBroadcast", bindings.broadcast)
        self.gather = of("ncclGather", bindings.gather)
        self.scatter = of("ncclScatter", bindings.scatter)
        self.all_gather = of("ncclAllGather", bindings.all_gather)
        self.all_to_all = of("ncclAlltoAll", bindings.allto_all)
        self.send = of("ncclSend", bindings.send)
        self.recv = of("ncclRecv", bindings.recv)
        self.group_start = of("ncclGroupStart", bindings.group_start)
        self.group_end = of("ncclGroupEnd", bindings.group_end)
        self.register = of("ncclCommRegister", bindings.comm_register)
        self.deregister = of("ncclCommDeregister", bindings.comm_deregister)
        self.deregister_window = of("ncclCommWindowDeregister", bindings.comm_window_deregister)
        self.destroy = of("ncclCommDestroy", bindings.comm_destroy)
        self.abort = of("ncclCommAbort", bindings.comm_abort)
        self._init = of("ncclCommInitRankConfig", bindings.comm_init_rank_config)
        self._unique_id = of("ncclGetUniqueId", bindings.get_unique_id)
        self._window = of("ncclCommWindowRegister", bindings.comm_window_register)
        self._state = of("ncclCommGetAsyncError", bindings.comm_get_async_error)

    def unique_id(self) -> bytes:
        made = self._unique_id()  # its bytes go with it
        return ctypes.string_at(made.ptr, _ID_BYTES)

    def init(
        self, size: int, identity: bytes, rank: int, *, sharp: bool, most_blocks: int | None
    ) -> Any:
        given = self._bindings.UniqueId()
        ctypes.memmove(given.ptr, identity, _ID_BYTES)
        config = self._bindings.Config()
        config.blocking = 1
        if sharp:
            config.collnet_enable = 1
        if most_blocks is not None:
            config.max_ctas = most_blocks
        return self._init(size, given, rank, config)

    def async_error(self, comm: Any) -> str:
        code = self._state(comm)
        if code in (_SUCCESS, _IN_PROGRESS):
            return ""
        words = self._bindings.get_last_error(comm) or self._bindings.get_error_string(code)
        return f"{words} (ncclResult_t {code})"

    def register_window(self, comm: Any, address: int, size: int) -> Any:
        window = self._window(comm, address, size, _WINDOW)
        return window if getattr(window, "handle", window) else None


@functools.cache
def load_nccl() -> Nccl:
    """NCCL, once for the process.

    Raises:
        Error: it is not there, too old, or set to calls that do not wait.
    """
    install = "install nccl4py, and nvidia-nccl-cu13 (or -cu12) where NCCL is not there"
    try:
        from nccl.bindings import nccl as bindings
    except ImportError as missing:
        raise Error(
            f"NCCL is used through nccl4py, which cannot be imported: {missing}; {install}"
        ) from missing
    try:
        library = _Bindings(bindings)
    except AttributeError as missing:
        raise Error(
            f"nccl4py is too old: {missing}; 0.3 or later is needed; {install}"
        ) from missing
    except (RuntimeError, OSError) as missing:  # cuda-pathfinder's DynamicLibNotFoundError is one
        raise Error(f"libnccl cannot be loaded: {missing}; {install}") from missing
    if library.version < OLDEST:
        raise Error(
            f"NCCL {library.version} is too old: {OLDEST} (2.28) or later is needed; {install}"
        )
    if os.environ.get("NCCL_COMM_BLOCKING") == "0":
        raise Error(
            "NCCL_COMM_BLOCKING=0 makes every call of NCCL return before it is enqueued, which the "
            "order of calls relies on; unset it"
        )
    return library


class NotInTimeError(Exception):
    """What :func:`in_time` raises when its function goes on behind it."""


def aside(name: str, function: Callable[[], object]) -> threading.Thread | None:
    """Call a function in a thread of its own; None where the process ends, which starts no more.

    Args:
        name: Of the thread.
        function: It.
    """
    thread = threading.Thread(target=function, name=f"cupy-zc {name}", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # so from Python 3.12 on
        return None
    return thread


def in_time(name: str, function: Callable[[], _T], seconds: float) -> _T:
    """Call a function in a thread of its own, and leave it there when time is up.

    Args:
        name: Of the thread.
        function: It; may block for ever, in code that no signal reaches.
        seconds: How long to wait.

    Returns:
        What it returned, or raised.

    Raises:
        NotInTimeError: it has not ended. The thread is a daemon: the process can exit all the same.
    """
    results: list[_T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            failures.append(error)

    thread = aside(name, run)
    if thread is not None:
        thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise NotInTimeError(name)
    return results[0]
