"""NCCL through nccl4py, on symmetric windows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .api import Case, Context, Engine, Job, Unavailable, places
from .libraries import cupy_nccl
from .nccl import WINDOWS_SINCE, refused, refused_on_window

__all__ = ["Nccl4py"]


class Nccl4py(Engine):
    """The Python interface of NCCL's own project."""

    def __init__(self, context: Context, shared: Any) -> None:
        super().__init__(context, shared)
        import nccl.core
        from nccl.core.interop.cupy import empty

        self.core = nccl.core
        identity = nccl.core.UniqueId.from_bytes(shared)
        self.comm = nccl.core.Communicator.init(context.ranks, context.rank, identity)
        self.buffers = [empty(context.capacity, "uint8") for _ in range(2)]
        flag = nccl.core.WindowFlag.COLL_SYMMETRIC
        self._windows = [self.comm.register_window(buffer, flag) for buffer in self.buffers]
        if not all(window.handle for window in self._windows):  # NCCL calls that a success
            raise Unavailable("NCCL registers no windows on this machine")

    @classmethod
    def probe(cls, context: Context) -> Any:
        """Refuse where package or library is missing or too old. Rank 0 gives an identity."""
        super().probe(context)
        version = cupy_nccl().get_version()  # with the one library that all shall use
        try:
            import nccl.core
            from nccl.core.interop import cupy  # noqa: F401
        except ImportError as error:
            raise Unavailable(f"nccl4py: {error}") from error
        if version < WINDOWS_SINCE or not hasattr(nccl.core.Communicator, "register_window"):
            raise Unavailable(f"NCCL {version} has no symmetric windows; 2.27 and later have")
        return bytes(nccl.core.get_unique_id()) if context.rank == 0 else None

    def refuses(self, case: Case) -> str:
        """Windows are no place for a broadcast, and what has a root is not measured here."""
        if case.collective in ("reduce", "gather", "scatter"):
            return "not measured through nccl4py; the engine nccl has it"
        return refused(case) or refused_on_window(case)

    def prepare(self, case: Case) -> Job:
        """Views of the two windows."""
        send, recv = places(case, self.context.rank, *self.buffers)
        return Job(send, recv, self._call(case, send, recv))

    def _call(self, case: Case, send: Any, recv: Any) -> Callable[[], object]:
        comm, core, stream = self.comm, self.core, self.context.platform.stream.ptr
        op = getattr(core, case.op.upper())
        if case.collective == "all_reduce":
            return partial(comm.allreduce, send, recv, op, stream=stream)
        if case.collective == "reduce_scatter":
            return partial(comm.reduce_scatter, send, recv, op, stream=stream)
        if case.collective == "all_gather":
            return partial(comm.allgather, send, recv, stream=stream)
        if case.collective == "all_to_all":
            return partial(comm.alltoall, send, recv, stream=stream)
        peer = self.context.rank ^ 1

        def exchange() -> None:
            with core.group():
                comm.send(send, peer, stream=stream)
                comm.recv(recv, peer, stream=stream)

        return exchange

    def versions(self) -> dict[str, str]:
        """That of the package."""
        return {"nccl4py": str(self.core.__version__)}

    def close(self) -> None:
        """Abort, which unlike destroy needs no other rank."""
        self.comm.abort()
