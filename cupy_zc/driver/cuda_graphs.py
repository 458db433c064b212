"""Leases on CUDA graphs: tokens that tell, without being told, when a graph is gone.

A *user object* is a reference count with a destructor that CUDA keeps for a graph, and hands on to
every executable instantiated from it. Its destructor runs on an internal thread of the driver,
which may call neither CUDA nor, safely, Python. So it is ``sem_post`` of the C library on a
semaphore of ours, and :attr:`CudaGraphLease.released` is a ``sem_trywait``: no compiled code, no
interpreter lock, no callback into Python.

The semaphores are allocated by the C library and never freed, only used again after they were
posted. The driver may post at any time until the process ends, later than Python frees its own
memory.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import cuda.bindings.driver as driver
import cupy

from ..errors import DriverError, InvalidTypeError, InvalidValueError
from .cuda_calls import call

__all__ = ["CudaGraphLease", "lease_graph"]

_NO_DESTRUCTOR_SYNC = int(driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
_MOVE = int(driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE)
#: More than any ``sem_t`` (32 bytes with glibc on 64-bit machines), and a cache line of its own.
_SEMAPHORE_SIZE = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.calloc.restype = ctypes.c_void_p
_libc.calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
_libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
_libc.sem_trywait.argtypes = (ctypes.c_void_p,)
_SEM_POST = ctypes.cast(_libc.sem_post, ctypes.c_void_p).value


class _Semaphores:
    """Semaphores that are lent out until they were posted."""

    def __init__(self) -> None:
        # Re-entrant: a destructor that the garbage collector runs in here may ask for a lease.
        self._lock = threading.RLock()
        self._idle: list[int] = []
        self._lent: set[CudaGraphLease] = set()

    def lend(self, lease: CudaGraphLease) -> None:
        """Give a lease a semaphore, at zero."""
        with self._lock:
            if not self._idle:
                for other in tuple(self._lent):  # leases that were dropped and never asked again
                    self.collect(other)
            lease.semaphore = self._idle.pop() if self._idle else self._allocate()
            self._lent.add(lease)

    @staticmethod
    def _allocate() -> int:
        address: int | None = _libc.calloc(1, _SEMAPHORE_SIZE)
        if address is None:
            raise MemoryError("no memory for a semaphore")
        if _libc.sem_init(address, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"sem_init: {os.strerror(ctypes.get_errno())}")
        return address

    def collect(self, lease: CudaGraphLease) -> bool:
        """Whether the semaphore of a lease was posted; if so it is taken back, once."""
        with self._lock:
            if lease in self._lent and _libc.sem_trywait(lease.semaphore) == 0:
                self.take_back(lease)
            return lease not in self._lent

    def take_back(self, lease: CudaGraphLease) -> None:
        """The semaphore of a lease is at zero, and nobody will post it any more."""
        with self._lock:
            self._lent.discard(lease)
            self._idle.append(lease.semaphore)


_semaphores = _Semaphores()


class CudaGraphLease:
    """Tells when a graph, and every executable made from it after the lease, is gone."""

    __slots__ = ("semaphore",)

    def __init__(self) -> None:
        #: Address of the ``sem_t`` that the driver posts.
        self.semaphore = 0
        _semaphores.lend(self)

    @property
    def released(self) -> bool:
        """Whether the graph is gone. Once True, always True. Never waits, never calls CUDA."""
        return _semaphores.collect(self)


def lease_graph(graph: Any) -> CudaGraphLease:
    """Attach a token to a graph; see :meth:`CudaDriver.lease_graph`."""
    handle = _handle_of(graph)
    detail = f"graph={handle:#x}"
    lease = CudaGraphLease()
    try:
        destroy = driver.CUhostFn(_SEM_POST)
        user_object = call(
            "cuUserObjectCreate", lease.semaphore, destroy, 1, _NO_DESTRUCTOR_SYNC, detail=detail
        )
    except DriverError:
        _semaphores.take_back(lease)
        raise
    try:
        call("cuGraphRetainUserObject", handle, user_object, 1, _MOVE, detail=detail)
    except DriverError:
        # Its destructor posts the semaphore, which is thereby collected with the others.
        call("cuUserObjectRelease", user_object, 1, detail=detail)
        raise
    return lease


def _handle_of(graph: Any) -> int:
    if isinstance(graph, cupy.cuda.Graph):
        handle = graph.graph
    elif isinstance(graph, (int, driver.CUgraph)):
        handle = int(graph)
    else:
        allowed = "a cupy.cuda.Graph, a CUgraph, or its address"
        raise InvalidTypeError("lease_graph", "graph", graph, allowed)
    if handle == 0:
        allowed = "a graph that exists; lease it from capture_info() before end_capture()"
        raise InvalidValueError("lease_graph", "graph", graph, allowed)
    return int(handle)
