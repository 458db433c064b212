"""NCCL through ``cupy.cuda.nccl``: plain, with registered buffers, and on symmetric windows.

CuPy wraps neither registration nor windows; ``ncclCommRegister``, ``ncclCommWindowRegister`` and
``ncclMemAlloc`` are called in the same library, on the same communicator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from .api import Case, Context, Engine, Job, Unavailable, places, unpaired
from .libraries import call, cupy_nccl, library

__all__ = [
    "WINDOWS_SINCE",
    "Nccl",
    "NcclRegistered",
    "NcclWindow",
    "letters",
    "refused",
    "refused_on_window",
]

#: The first NCCL with symmetric windows, as ``ncclGetVersion`` counts.
WINDOWS_SINCE = 22700
_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC


def refused(case: Case) -> str:
    """Why NCCL does not run a case, or nothing."""
    if case.in_place and case.collective in ("all_to_all", "send_recv"):
        return "NCCL sends and receives in different buffers only"
    return unpaired(case)


def refused_on_window(case: Case) -> str:
    """Why a case is not run on windows, or nothing."""
    if case.collective == "broadcast":
        return "a captured broadcast on a window did not finish at 16 MiB with NCCL 2.28.9"
    return ""


class Nccl(Engine):
    """As users of CuPy have it."""

    def __init__(self, context: Context, shared: Any) -> None:
        super().__init__(context, shared)
        self.nccl = cupy_nccl()
        self.comm = self.nccl.NcclCommunicator(context.ranks, shared, context.rank)
        self.send, self.recv = self.allocate(), self.allocate()

    @classmethod
    def probe(cls, context: Context) -> Any:
        """Refuse without the library. Rank 0 gives the identity of the new communicator."""
        super().probe(context)
        nccl = cupy_nccl()
        return nccl.get_unique_id() if context.rank == 0 else None

    def allocate(self) -> Any:
        """One of the two buffers, as bytes. Its memory is cudaMalloc's, not a pool's."""
        cupy = self.context.platform.xp
        with cupy.cuda.using_allocator(None):
            return cupy.empty(self.context.capacity, cupy.uint8)

    def refuses(self, case: Case) -> str:
        """What NCCL cannot do."""
        return refused(case)

    def prepare(self, case: Case) -> Job:
        """Views of the two buffers."""
        send, recv = places(case, self.context.rank, self.send, self.recv)
        return Job(send, recv, self._call(case, send.data.ptr, recv.data.ptr))

    def _call(self, case: Case, send: int, recv: int) -> Callable[[], object]:
        comm, stream = self.comm, self.context.platform.stream.ptr
        kind = getattr(self.nccl, f"NCCL_{case.dtype.upper()}")
        op = getattr(self.nccl, f"NCCL_{case.op.upper()}")
        if case.collective == "all_reduce":
            return partial(comm.allReduce, send, recv, case.count, kind, op, stream)
        if case.collective == "reduce_scatter":
            return partial(comm.reduceScatter, send, recv, case.part, kind, op, stream)
        if case.collective == "all_gather":
            return partial(comm.allGather, send, recv, case.part, kind, stream)
        if case.collective == "broadcast":
            return partial(comm.broadcast, send, recv, case.count, kind, case.root, stream)
        if case.collective == "reduce":
            return partial(comm.reduce, send, recv, case.count, kind, op, case.root, stream)
        return self._exchange(case, send, recv, kind)

    def _exchange(self, case: Case, send: int, recv: int, kind: int) -> Callable[[], object]:
        """A group of point-to-point calls, which is how NCCL's users make the others."""
        comm, stream = self.comm, self.context.platform.stream.ptr
        gives, takes = letters(case, self.context.rank)
        count = case.count if case.collective == "send_recv" else case.part
        start, end = self.nccl.groupStart, self.nccl.groupEnd

        def exchange() -> None:
            start()
            for peer, offset in gives:
                comm.send(send + offset, count, kind, peer, stream)
            for peer, offset in takes:
                comm.recv(recv + offset, count, kind, peer, stream)
            end()

        return exchange

    def versions(self) -> dict[str, str]:
        """NCCL's, such as 2.28.9."""
        number = self.nccl.get_version()
        return {"nccl": f"{number // 10000}.{number // 100 % 100}.{number % 100}"}

    def close(self) -> None:
        """Abort, which unlike destroy needs no other rank."""
        self.comm.abort()


def letters(case: Case, rank: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """To whom a rank sends and from whom it receives, each with the offset in bytes.

    In place, the root's own part of a gather or a scatter is where it belongs already.
    """
    if case.collective == "send_recv":
        return [(rank ^ 1, 0)], [(rank ^ 1, 0)]
    nbytes = case.part * case.type.itemsize
    rows = [
        (peer, peer * nbytes)
        for peer in range(case.ranks)
        if not (case.in_place and peer == rank == case.root)
    ]
    mine = [] if case.in_place and rank == case.root else [(case.root, 0)]
    if case.collective == "gather":
        return mine, rows if rank == case.root else []
    if case.collective == "scatter":
        return rows if rank == case.root else [], mine
    return rows, rows


class NcclRegistered(Nccl):
    """Both buffers registered with the communicator."""

    def __init__(self, context: Context, shared: Any) -> None:
        super().__init__(context, shared)
        self._handles = [self._register(buffer) for buffer in (self.send, self.recv)]

    def _register(self, buffer: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        call(
            "ncclCommRegister",
            ctypes.c_void_p(self.comm.comm),
            ctypes.c_void_p(buffer.data.ptr),
            ctypes.c_size_t(buffer.nbytes),
            ctypes.byref(handle),
        )
        return handle

    def close(self) -> None:
        """Take the registrations back first."""
        for handle in self._handles:
            call("ncclCommDeregister", ctypes.c_void_p(self.comm.comm), handle)
        super().close()


class NcclWindow(Nccl):
    """Both buffers from ``ncclMemAlloc``, registered as symmetric windows."""

    #: Windows matter to these; the others would repeat the plain figures.
    collectives: ClassVar[tuple[str, ...]] = ("all_reduce", "all_gather", "reduce_scatter")

    def __init__(self, context: Context, shared: Any) -> None:
        super().__init__(context, shared)
        self._windows = [self._register(buffer) for buffer in (self.send, self.recv)]

    @classmethod
    def probe(cls, context: Context) -> Any:
        """Refuse an NCCL without windows."""
        shared = super().probe(context)
        version = cupy_nccl().get_version()
        if version < WINDOWS_SINCE or not hasattr(library(), "ncclCommWindowRegister"):
            raise Unavailable(f"NCCL {version} has no symmetric windows; 2.27 and later have")
        return shared

    def allocate(self) -> Any:
        """Memory of NCCL, which lives until the process ends: graphs may still know it."""
        cupy = self.context.platform.xp
        pointer = ctypes.c_void_p()
        size = self.context.capacity
        call("ncclMemAlloc", ctypes.byref(pointer), ctypes.c_size_t(size))
        memory = cupy.cuda.UnownedMemory(pointer.value, size, self)
        return cupy.ndarray(size, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))

    def _register(self, buffer: Any) -> ctypes.c_void_p:
        window = ctypes.c_void_p()
        call(
            "ncclCommWindowRegister",
            ctypes.c_void_p(self.comm.comm),
            ctypes.c_void_p(buffer.data.ptr),
            ctypes.c_size_t(buffer.nbytes),
            ctypes.byref(window),
            ctypes.c_int(_SYMMETRIC),
        )
        if not window.value:  # NCCL calls that a success
            raise Unavailable("NCCL registers no windows on this machine")
        return window

    def refuses(self, case: Case) -> str:
        """Only what has kernels for windows."""
        if case.collective not in self.collectives:
            return refused_on_window(case) or "NCCL has no kernel for windows here"
        return super().refuses(case)
