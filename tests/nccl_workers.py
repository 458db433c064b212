"""Ranks that are processes, with a GPU each, and NCCL between them."""

from __future__ import annotations

import os
import signal
import statistics
import time
from typing import Any

import collective_workers as work
import cupy
import numpy as np
from collective_memory import got, put
from collective_processes import over_tcp
from collective_workers import Buffers, Case

import cupy_zc
from cupy_zc import Communicator, Error, LiveGraphsError, MemoryPool
from cupy_zc.collectives.nccl_calls import refuse_nccl_reduction

__all__ = [
    "be_killed",
    "capture_and_close",
    "disagree",
    "host_cost",
    "matrix",
    "one_of_many",
    "register_and_log",
    "split",
]


def _use_gpu(rank: int) -> None:
    cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()


def connected(rank: int, size: int, port: int, backend: str, **options: Any) -> Communicator:
    _use_gpu(rank)
    options = {"driver": "cuda", "register": "manual", "timeout": 20.0, **options}
    return over_tcp(rank, size, port, backend=backend, **options)


def cases(size: int) -> list[Case]:
    """What NCCL can do."""
    return [
        case for case in work.cases(size) if not refuse_nccl_reduction(case.dtype, case.op or "sum")
    ]


def matrix(
    rank: int, size: int, port: int, backend: str, captured: bool, every: int
) -> dict[str, Any]:
    """Collectives of all kinds against NumPy, registered and not, and what was said of them."""
    with connected(rank, size, port, backend) as comm, cupy_zc.Stream(driver="cuda"):
        buffers = Buffers.of(comm)
        told: set[tuple[str, bool]] = set()
        for case in cases(size)[::every]:
            if captured:
                _replayed(comm, case, buffers)
            else:
                work.check(comm, case, buffers)
            assert comm.last_transfer is not None
            told.add((comm.last_transfer.registration, comm.last_transfer.zero_copy))
        if backend == "nccl":
            _mail(comm)
        comm.barrier()
        return {"backend": comm.backend, "told": sorted(told)}


def _replayed(comm: Communicator, case: Case, buffers: Buffers) -> None:
    """The case, captured, and replayed twice with the same data."""
    if case.in_place:
        return  # the second replay would have other data
    source, target = work.arrays(case, comm.size, comm.rank, buffers)
    stream = cupy_zc.Stream(driver="cuda")
    with stream:
        stream.begin_capture()
        work.invoke(comm, case, source, target)
        graph = stream.end_capture()
        wanted = work.expected(case, comm.size)[comm.rank]
        for _ in range(2):
            graph.launch(stream)
            comm.synchronize()
            stream.synchronize()
            if target is not None and wanted is not None:
                work._assert_near(got(target), wanted, err_msg=f"{case} replayed")


def _mail(comm: Communicator) -> None:
    """A ring of sends before any receive; exchanges; a message to itself."""
    n, rank = comm.size, comm.rank
    mine, other = comm.zeros(70_000, "i4"), comm.zeros(70_000, "i4")
    for turn in range(4):
        put(mine, np.full(70_000, 10 * rank + turn, "i4"))
        comm.send(mine, (rank + 1) % n)
        comm.recv(other, (rank - 1) % n)
        assert (got(other) == 10 * ((rank - 1) % n) + turn).all()
    comm.send_recv(mine, other, rank ^ 1)
    assert (got(other) == 10 * (rank ^ 1) + 3).all()
    comm.send(mine, rank)
    comm.recv(other, rank)
    assert (got(other) == 10 * rank + 3).all()


def split(rank: int, size: int, port: int) -> list[float]:
    """By color: each rank alone, and all of them in the other order."""
    with connected(rank, size, port, "nccl") as comm:
        sums = []
        for color, key in ((rank, 0), (7, -rank)):
            part = comm.split(color, key)
            assert part is not None
            with part:
                array = part.zeros(10, "f4")
                put(array, np.full(10, rank + 1, "f4"))
                part.all_reduce(array, array)
                sums.append(float(got(array)[0]))
        return sums


def disagree(rank: int, size: int, port: int) -> str:
    try:
        connected(rank, size, port, ("nccl", "device")[rank % 2]).close()
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def be_killed(rank: int, size: int, port: int, backend: str, timeout: float) -> dict[str, Any]:
    """One rank dies; when the other one learns of it, and whether its GPU still works."""
    with connected(rank, size, port, backend, timeout=timeout) as comm:
        array = comm.zeros(1 << 20, "f4")
        for _ in range(3):
            comm.all_reduce(array, array)
        comm.synchronize()
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            comm.all_reduce(array, array)
            comm.synchronize()
        except Error as error:
            took, said = time.monotonic() - began, f"{type(error).__name__}: {error}"
        else:
            return {"said": "no error", "seconds": 0.0, "after": 0}
        try:
            comm.all_reduce(array, array)
        except Error as error:
            later = type(error).__name__
        return {"said": said, "later": later, "seconds": took, "after": int(cupy.arange(4).sum())}


def capture_and_close(rank: int, size: int, port: int) -> dict[str, Any]:
    """Close beside a live graph, and once it is gone; and by force."""
    told: dict[str, Any] = {}
    for force in (False, True):
        comm = connected(rank, size, port + force, "nccl")
        pool = MemoryPool(driver="cuda")
        array = cupy.ndarray(1 << 20, "f4", pool.malloc(4 << 20))
        put(array, np.ones(1 << 20, "f4"))
        stream = cupy_zc.Stream(driver="cuda")
        with stream:
            stream.begin_capture()
            comm.all_reduce(array, array)
            graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
            assert got(array)[0] == size
        assert comm.last_transfer is not None
        told["registration"] = comm.last_transfer.registration
        told["leases"] = len(comm.leases())
        began = time.monotonic()
        if force:
            comm.close(force=True)
            graph.launch(stream)
            stream.synchronize()
            told["replayed"] = float(got(array)[0])
            del graph
        else:
            try:
                comm.close()
            except LiveGraphsError as error:
                told["refused"] = str(error)
            del graph
            comm.close()
        told[f"seconds, force={force}"] = time.monotonic() - began
    return told


def register_and_log(rank: int, size: int, port: int, ours: bool) -> str:
    """Sums of registered memory of ours, or of CuPy's stock pool, for NCCL's log."""
    with connected(rank, size, port, "nccl") as comm:
        if ours:
            pool = MemoryPool(driver="cuda")
            cupy.cuda.set_allocator(pool.malloc)
        array, other = cupy.ones(16 << 20, "f4"), cupy.empty(16 << 20, "f4")
        if ours:
            comm.register(array)
            comm.register(other)
        for _ in range(3):
            comm.all_reduce(array, other)
        comm.synchronize()
        assert comm.last_transfer is not None
        eager = comm.last_transfer.registration
        stream = cupy_zc.Stream(driver="cuda")
        with stream:
            stream.begin_capture()
            comm.all_reduce(array, other)
            graph = stream.end_capture()
            graph.launch(stream)
        stream.synchronize()
        assert got(other[:1])[0] == size
        return eager


def one_of_many(rank: int, size: int, port: int, backend: str) -> str:
    """Whether more ranks than GPUs can be connected."""
    try:
        with connected(rank, size, port, backend):
            return ""
    except Error as error:
        return f"{type(error).__name__}: {error}"


def host_cost(rank: int, size: int, port: int) -> dict[str, float]:
    """Microseconds of Python thread time of an eager all_reduce of 1 KiB; and NCCL's own."""
    with connected(rank, size, port, "nccl") as comm, cupy_zc.Stream(driver="cuda") as stream:
        array, other = comm.zeros(256, "f4"), comm.zeros(256, "f4")
        engine: Any = comm._engine
        ours: list[float] = []
        bare: list[float] = []
        calls = 300
        for _ in range(7):
            for into, body in (
                (ours, lambda: comm.all_reduce(array, other)),
                (
                    bare,
                    lambda: engine._library.all_reduce(
                        array.data.ptr, other.data.ptr, 256, 7, 0, engine._comm, stream.ptr
                    ),
                ),
            ):
                began = time.thread_time()
                for _ in range(calls):
                    body()
                into.append((time.thread_time() - began) / calls * 1e6)
                stream.synchronize()
        return {"ours": statistics.median(ours), "NCCL": statistics.median(bare)}
