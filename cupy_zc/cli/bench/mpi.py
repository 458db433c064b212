"""MPI through mpi4py, on arrays of NumPy.

It needs ranks that were started by ``mpiexec``; :mod:`.launch` does that where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np

from .api import Case, Context, Engine, Job, Unavailable, places, unpaired

__all__ = ["Mpi"]


class Mpi(Engine):
    """Blocking collectives of the MPI library behind mpi4py."""

    platforms: ClassVar[tuple[str, ...]] = ("host",)

    def __init__(self, context: Context, shared: Any) -> None:
        super().__init__(context, shared)
        from mpi4py import MPI

        self.mpi = MPI
        self.errors = (*Engine.errors, MPI.Exception)
        # The ranks of the run need not be numbered as those of MPI.
        self.comm = MPI.COMM_WORLD.Split(0, context.rank)
        self.send, self.recv = (np.empty(context.capacity, np.uint8) for _ in range(2))

    @classmethod
    def probe(cls, context: Context) -> None:
        """Refuse without mpi4py, and where MPI does not have the ranks of the run."""
        super().probe(context)
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no library
            raise Unavailable(f"{error}: pip install 'cupy-zc[mpi]'") from error
        if context.ranks != MPI.COMM_WORLD.size:
            raise Unavailable(
                f"MPI has {MPI.COMM_WORLD.size} ranks here, the run {context.ranks}: is there an "
                f"mpiexec? pip install 'cupy-zc[mpi]'"
            )

    def refuses(self, case: Case) -> str:
        """Types that MPI does not have, and what it leaves elsewhere than the others do."""
        if case.dtype in ("float16", "bfloat16"):
            return f"mpi4py has no {case.dtype}"
        if case.in_place and case.collective == "reduce_scatter":
            return "in place, MPI leaves the result in the first part of the array"
        return unpaired(case)

    def prepare(self, case: Case) -> Job:
        """Views of the two buffers; ``broadcast`` works in place."""
        send, recv = places(case, self.context.rank, self.send, self.recv)
        if case.collective == "broadcast":
            send = recv
        return Job(send, recv, self._call(case, send, recv))

    def _call(self, case: Case, send: Any, recv: Any) -> Callable[[], object]:
        comm, root, first = self.comm, case.root, self.context.rank == case.root
        op = getattr(self.mpi, case.op.upper())
        same = self.mpi.IN_PLACE
        given, taken = (same, same) if case.in_place else (send, recv)
        if case.collective == "all_reduce":
            return partial(comm.Allreduce, given, recv, op)
        if case.collective == "reduce_scatter":
            return partial(comm.Reduce_scatter_block, send, recv, op)
        if case.collective == "reduce":
            return partial(comm.Reduce, given if first else send, recv if first else None, op, root)
        if case.collective == "all_gather":
            return partial(comm.Allgather, given, recv)
        if case.collective == "broadcast":
            return partial(comm.Bcast, recv, root)
        if case.collective == "gather":
            return partial(comm.Gather, given if first else send, recv if first else None, root)
        if case.collective == "scatter":
            return partial(comm.Scatter, send if first else None, taken if first else recv, root)
        if case.collective == "all_to_all":
            return partial(comm.Alltoall, given, recv)
        peer = self.context.rank ^ 1
        if case.in_place:
            return partial(comm.Sendrecv_replace, recv, peer, source=peer)
        return partial(comm.Sendrecv, send, peer, recvbuf=recv, source=peer)

    def versions(self) -> dict[str, str]:
        """The library's, in its own words."""
        return {"mpi": self.mpi.Get_library_version().splitlines()[0].strip()}

    def close(self) -> None:
        """Free the communicator. Every rank is here: it is the last step of a run."""
        self.comm.Free()
