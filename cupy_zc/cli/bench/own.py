"""This package: arrays of the communicator's own, and any other array."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import cupy_zc

from .api import Case, Context, Engine, Job, Unavailable, places, unpaired

__all__ = ["Plain", "Registered"]

#: Platform of the harness -> engine of the package.
_BACKENDS = {"cuda": "device", "host": "host"}


def _free_port() -> int:
    """A TCP port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Registered(Engine):
    """Arrays of ``Communicator.empty``, which are registered at one offset on all ranks."""

    platforms: ClassVar[tuple[str, ...]] = ("cuda", "host")
    errors = (*Engine.errors, cupy_zc.Error)

    def __init__(self, context: Context, shared: Any) -> None:
        super().__init__(context, shared)
        try:
            self.comm = self.connect(shared)
        except cupy_zc.Error as error:
            raise Unavailable(str(error)) from error
        self.send, self.recv = self.allocate(), self.allocate()

    @classmethod
    def probe(cls, context: Context) -> Any:
        """Refuse where the package has no communicator. Rank 0 gives a free port to meet at."""
        super().probe(context)
        if not hasattr(cupy_zc, "init_process_group"):
            raise Unavailable(f"cupy_zc {cupy_zc.__version__} has no init_process_group")
        return _free_port() if context.rank == 0 else None

    def connect(self, port: int) -> cupy_zc.Communicator:
        """The communicator, whose ranks meet at a port of this machine."""
        context = self.context
        backend = _BACKENDS[context.platform.name]
        return cupy_zc.init_process_group(
            context.ranks, context.rank, backend=backend, host="127.0.0.1", port=port
        )

    def allocate(self) -> Any:
        """One of the two buffers, as bytes."""
        return self.comm.empty(self.context.capacity, "uint8")

    def refuses(self, case: Case) -> str:
        """Pairs need an even number of ranks."""
        return unpaired(case)

    def prepare(self, case: Case) -> Job:
        """Views of the two buffers. ``broadcast`` works in place, as in ``cupyx.distributed``."""
        send, recv = places(case, self.context.rank, self.send, self.recv)
        if case.collective == "broadcast":
            send = recv
        call = self._call(case, send, recv)
        return Job(cupy_zc.view(send), cupy_zc.view(recv), call)

    def _call(self, case: Case, send: Any, recv: Any) -> Callable[[], object]:
        comm = self.comm
        if case.collective == "all_reduce":
            return partial(comm.all_reduce, send, recv, case.op)
        if case.collective == "reduce_scatter":
            return partial(comm.reduce_scatter, send, recv, case.part, case.op)
        if case.collective == "all_gather":
            return partial(comm.all_gather, send, recv, case.part)
        if case.collective == "broadcast":
            return partial(comm.broadcast, recv, case.root)
        if case.collective == "reduce":
            return partial(comm.reduce, send, recv, case.root, case.op)
        if case.collective == "send_recv":
            return partial(comm.send_recv, send, recv, self.context.rank ^ 1)
        shape = (case.ranks, case.part)
        if case.collective == "gather":
            return partial(comm.gather, send, recv.reshape(shape), case.root)
        if case.collective == "scatter":
            return partial(comm.scatter, send.reshape(shape), recv, case.root)
        return partial(comm.all_to_all, send.reshape(shape), recv.reshape(shape))

    def versions(self) -> dict[str, str]:
        """The package's."""
        return {"cupy_zc": cupy_zc.__version__}

    def close(self) -> None:
        """Close the communicator."""
        self.comm.close()


class Plain(Registered):
    """Arrays the communicator knows nothing of: memory of cudaMalloc."""

    platforms = ("cuda",)

    def allocate(self) -> Any:
        """One of the two buffers, as bytes, from no pool."""
        cupy = self.context.platform.xp
        with cupy.cuda.using_allocator(None):
            return cupy.empty(self.context.capacity, cupy.uint8)
