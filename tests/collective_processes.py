"""Ranks that are processes: under mpiexec, and spawned with a TCP store."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import collective_workers as work
import cupy
import numpy as np
from collective_workers import Buffers, Case

import cupy_zc
from cupy_zc import Communicator, MismatchError, PeerTimeoutError
from cupy_zc.collectives.opening import Options, start
from cupy_zc.collectives.plan import Operation
from cupy_zc.group import from_tcp

#: What a program does that was written for cupyx.distributed; only its first line is changed.
SCRIPT = """
from cupyx.distributed import init_process_group

comm = init_process_group(n_devices, rank, host="127.0.0.1", port=port)
mine, total = cupy.empty(1000, "f4"), cupy.empty(1000, "f4")
rows, columns = cupy.empty((n_devices, 10), "i8"), cupy.empty((n_devices, 10), "i8")
fill(mine, rank + 1)
fill(rows, 100 * rank)
for _ in range(5):
    comm.all_reduce(mine, total, op="sum")
keep(total)
comm.all_reduce(mine, mine, "max")
comm.reduce(mine, total, 0, "min")
comm.broadcast(mine, root=0)
comm.all_gather(rows[rank], columns, 10)
keep(columns)
comm.reduce_scatter(columns, rows[0], 10, "sum")
comm.gather(rows[0], columns, root=0)
comm.scatter(columns, rows[1], 0)
keep(rows)
comm.all_to_all(columns, rows)
comm.send(mine, (rank + 1) % n_devices)
comm.recv(total, (rank - 1) % n_devices)
comm.send_recv(mine, total, peer=rank ^ 1, stream=None)
comm.barrier()
comm.stop()
"""


def over_tcp(rank: int, size: int, port: int, **options: Any) -> Communicator:
    bootstrap = from_tcp(size, rank, port=port, timeout=60)
    options = {"driver": "host", **options}
    return start(Communicator, bootstrap, Options.of("test", spread=True, **options))


def use_everything(comm: Communicator, *, manual: bool = False) -> dict[str, Any]:
    """Every call once on memory of every kind; what a test wants to know of it."""
    n = comm.size
    # Another history of allocations on each rank.
    pool = cupy_zc.MemoryPool(driver=comm._options.driver, segment_size=1 << 21)
    cupy_zc.install(pool)
    dropped = [cupy.empty(1 << (10 + comm.rank), "u1") for _ in range(3 * comm.rank)]
    kept = cupy.empty(5000 * (comm.rank + 1), "u1")
    del dropped[::2]
    given, taken = cupy.empty(4000, "i4"), cupy.empty(4000, "i4")
    told = []
    for turn in range(6):
        cupy_zc.copyto(given, comm.rank + turn)
        comm.all_reduce(given, taken)
        assert (cupy_zc.view(taken) == n * turn + n * (n - 1) // 2).all()
        assert comm.last_transfer is not None
        told.append(comm.last_transfer.zero_copy)
    buffers = Buffers.of(comm)
    for operation in work.COLLECTIVES:
        for placement in work.PLACEMENTS:
            for in_place in (False, True):
                case = Case(operation, np.dtype("f4"), "sum", n - 1, 777, placement, in_place, 5)
                work.check(comm, case, buffers, manual=manual)
    comm.send(given, (comm.rank + 1) % n)
    comm.recv(taken, (comm.rank - 1) % n)
    assert (cupy_zc.view(taken) == (comm.rank - 1) % n + 5).all()
    comm.send_recv(given, taken, comm.rank ^ 1)
    assert (cupy_zc.view(taken) == (comm.rank ^ 1) + 5).all()
    with comm.register(pool):
        comm.all_reduce(given, given)
    comm.collect()
    part = comm.split(comm.rank // 2)
    assert part is not None
    with part:
        array = part.zeros(3, "i4")
        cupy_zc.copyto(array, comm.rank)
        for _ in range(100 * (1 + comm.rank // 2)):  # the parts run at once, and not alike
            part.all_reduce(array, array, "max")
        assert (cupy_zc.view(array) == comm.rank | 1).all()
    comm.barrier()
    del kept
    cupy_zc.uninstall()
    return {"rank": comm.rank, "zero_copy": told}


def everything_over_tcp(
    rank: int, size: int, port: int, register: str, driver: str = "host"
) -> dict[str, Any]:
    with over_tcp(rank, size, port, register=register, driver=driver) as comm:
        return use_everything(comm, manual=register == "manual")


def unchanged_script(rank: int, size: int, port: int, driver: str = "host") -> dict[str, Any]:
    """The script, with the one line changed; the sums in it, and whether it was zero-copy."""
    if driver == "cuda":
        cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
    cupy_zc.install(cupy_zc.MemoryPool(driver=driver))
    results: list[np.ndarray[Any, Any]] = []
    names: dict[str, Any] = {
        "n_devices": size, "rank": rank, "port": port, "cupy": cupy, "fill": cupy_zc.copyto,
        "keep": lambda array: results.append(cupy_zc.asnumpy(array)),
    }  # fmt: skip
    exec(SCRIPT.replace("from cupyx.distributed", "from cupy_zc"), names)
    transfer = names["comm"].last_transfer
    return {
        "rows": results[2][1].tolist()[:2],
        "sums": results[0].tolist()[:2],
        "zero_copy": transfer.zero_copy,
        "operation": transfer.operation,
    }


def be_killed(
    rank: int, size: int, port: int, victim: int, where: str, **options: Any
) -> dict[str, Any]:
    """One rank dies in the middle of a collective, or of a message; when the others learn it."""
    with over_tcp(rank, size, port, **{"timeout": 60, **options}) as comm:
        array = comm.zeros(1000, "f4")
        for _ in range(3):
            comm.all_reduce(array, array)
        comm.synchronize()
        if rank == victim:
            if where == "collective":
                # After it has met the others, with the others inside.
                comm._engine._eager.control.meet = lambda _: os.kill(os.getpid(), signal.SIGKILL)
                comm.all_reduce(array, array)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            if where == "message":
                comm.recv(array, victim)
            else:
                comm.all_reduce(array, array)
            comm.synchronize()
        except PeerTimeoutError as error:
            cupy_zc.copyto(array, 1)  # memory and context live on
            assert (cupy_zc.asnumpy(array) == 1).all()
            return {"ranks": error.ranks, "seconds": time.monotonic() - began}
        raise AssertionError("nobody noticed")


def differ(rank: int, size: int, port: int) -> list[str]:
    """Each rank differs in each respect once; every rank says the same of it."""
    texts = []
    with over_tcp(rank, size, port, timeout=20) as comm:
        buffers = Buffers.of(comm)
        good = Case(Operation.REDUCE, np.dtype("f4"), "sum", 0, 100, "symmetric", False)
        others = (
            good._replace(count=99), good._replace(dtype=np.dtype("f8")), good._replace(op="max"),
            good._replace(root=1),
        )  # fmt: skip
        for culprit in range(size):
            for other in others:
                case = other if rank == culprit else good
                source, target = work.arrays(case, size, rank, buffers)
                try:
                    work.invoke(comm, case, source, target)
                except MismatchError as error:
                    texts.append(str(error))
                assert (cupy_zc.view(buffers.symmetric[1]) == work.FILL).all()
                work.check(comm, good, buffers)
    return texts


def under_mpi() -> dict[str, Any]:
    """Everything, with an eye on what goes through MPI after set-up: nothing."""
    from group_workers import _Watched
    from mpi4py import MPI

    os.environ["CUPY_ZC_DRIVER"] = "host"
    with Communicator.from_mpi(driver="host") as comm:
        shared = comm._bootstrap._shared  # type: ignore[attr-defined]
        shared.comm = watched = _Watched(MPI, shared.comm)
        use_split = comm.split
        sent_by_split: list[int] = []

        def split(*arguments: Any) -> Any:
            before = watched.bytes
            part = use_split(*arguments)
            sent_by_split.append(watched.bytes - before)
            return part

        comm.split = split  # type: ignore[method-assign]
        result = use_everything(comm)
        result["bytes"] = watched.bytes - sum(sent_by_split)
        result["split"] = sent_by_split
    # Ranks in another order than MPI's, and ranks that do not fit.
    world = MPI.COMM_WORLD
    with cupy_zc.init_process_group(world.size, world.size - 1 - world.rank, use_mpi=True) as comm:
        result["order"] = comm.rank == world.size - 1 - world.rank
        array = comm.zeros(4, "i4")
        cupy_zc.copyto(array, comm.rank)
        comm.broadcast(array, 0)
        result["first"] = int(cupy_zc.asnumpy(array)[0])
    try:
        cupy_zc.init_process_group(world.size, 0, use_mpi=True)
    except MismatchError as error:
        result["refused"] = str(error)
    return result


if __name__ == "__main__":
    from mpi4py.MPI import COMM_WORLD

    Path(sys.argv[1], f"{COMM_WORLD.rank}.json").write_text(json.dumps(under_mpi()))
