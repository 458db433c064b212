"""Ranks that are processes and capture graphs; those of :func:`leave` are programs of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import threading
import time
from typing import Any

import cupy
import numpy as np
from collective_processes import over_tcp

import cupy_zc
from cupy_zc import Communicator, Error, PeerTimeoutError

#: What is alive when a program of :func:`leave` ends.
_alive: list[Any] = []


def capture(comm: Communicator, *arrays: cupy.ndarray) -> tuple[Any, Any]:
    """A graph that sums each array in place, and its stream. Collective."""
    stream = comm._driver.make_stream()
    stream.begin_capture()
    for array in arrays:
        comm.all_reduce(array, array, stream=stream)
    return stream.end_capture(), stream


def replay_with_temporaries(rank: int, size: int, port: int) -> dict[str, Any]:
    """Histories that differ, temporaries, changing input, and eager calls in between."""
    pool = cupy_zc.MemoryPool(driver="host", segment_size=1 << 21)
    cupy_zc.install(pool)
    with over_tcp(rank, size, port, register="manual") as comm:
        history = [cupy.empty(1 << (10 + rank), "u1") for _ in range(3 * rank)]
        del history[::2]
        given, taken, eager = cupy.empty(1000, "i4"), cupy.empty(1000, "i4"), cupy.empty(10, "i4")
        stream = comm._driver.make_stream()
        with stream:
            stream.begin_capture()
            temporary = cupy.empty(1000, "i4")
            comm.all_reduce(given, temporary, "max")
            comm.all_reduce(temporary, taken)
            del temporary
            graph = stream.end_capture()
            fresh = [cupy.empty(1000, "i4") for _ in range(20)]
        for array in fresh:
            cupy_zc.copyto(array, 7)
        zero_copy = []
        for turn in range(1000):
            cupy_zc.copyto(given, turn + rank)
            graph.launch(stream)
            stream.synchronize()
            assert (cupy_zc.view(taken) == size * (turn + size - 1)).all()
            assert comm.last_transfer is not None
            zero_copy.append(comm.last_transfer.zero_copy)
            if turn % 100 == 0:
                cupy_zc.copyto(eager, 1)
                comm.all_reduce(eager, eager)
                assert (cupy_zc.view(eager) == size).all()
        survived = all((cupy_zc.view(array) == 7).all() for array in fresh)
        offsets = [each.offset for each in comm.leases()[0].arrays]
        del graph
        left = len(comm.leases())
        comm.collect()
        mapped = sum(len(w._mapped) for w in comm._registry.windows._windows.values())
        return {
            "zero_copy": all(zero_copy), "survived": survived, "offsets": offsets, "left": left,
            "mapped": mapped,
        }  # fmt: skip


def figures(rank: int, size: int, port: int) -> dict[str, float]:
    """Seconds: to capture a collective after the first one, and from drop to release; medians."""
    with over_tcp(rank, size, port) as comm:
        pool = cupy_zc.MemoryPool(driver="host")
        array = cupy.ndarray(1000, "f4", pool.malloc(4000))
        graph, stream = capture(comm, array)
        stream.begin_capture()
        comm.all_reduce(array, array, stream=stream)
        costs = []
        for _ in range(300):
            began = time.perf_counter()
            comm.all_reduce(array, array, stream=stream)
            costs.append(time.perf_counter() - began)
        graph = stream.end_capture()
        releases = []
        for _ in range(20):
            graph, _ = capture(comm, array)
            comm.barrier()
            began = time.perf_counter()
            del graph
            while comm.leases():
                pass
            releases.append(time.perf_counter() - began)
        return {"capture": statistics.median(costs), "release": statistics.median(releases)}


def be_killed_in_a_capture(rank: int, size: int, port: int, victim: int) -> dict[str, Any]:
    """A rank dies before its captured call; when the others learn it, and what stays."""
    with over_tcp(rank, size, port, timeout=60) as comm:
        array, stream = comm.zeros(100, "f4"), comm._driver.make_stream()
        stream.begin_capture()
        comm.all_reduce(array, array, stream=stream)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            comm.all_reduce(array, array, stream=stream)
        except PeerTimeoutError as error:
            graph = stream.end_capture()
            del graph
            live = comm._registry.leases.live()
            return {"ranks": error.ranks, "seconds": time.monotonic() - began, "live": len(live)}
        raise AssertionError("nobody noticed")


def be_closed_by_force(rank: int, size: int, port: int, culprit: int) -> dict[str, Any]:
    """One rank closes although a graph lives; what a replay says on it and on the others."""
    with over_tcp(rank, size, port, timeout=60) as comm:
        graph, stream = capture(comm, comm.zeros(100, "f4"))
        comm.barrier()
        if rank == culprit:
            comm.close(force=True)
        began, said = time.monotonic(), {}
        try:
            graph.launch(stream)
        except Error as error:
            said = {"kind": type(error).__name__, "ranks": getattr(error, "ranks", None)}
        del graph  # else the communicator cannot be closed
        return {**said, "seconds": time.monotonic() - began}


def _replay(graph: Any, stream: Any) -> None:
    with contextlib.suppress(Error):
        graph.launch(stream)


def leave(rank: int, size: int, port: int, how: str) -> None:
    """End the program with a live graph."""
    cupy_zc.install(cupy_zc.MemoryPool(driver="host"))
    comm = over_tcp(rank, size, port, timeout=20)
    array = cupy.empty(1000, "f4")
    cupy_zc.copyto(array, np.float32(rank))
    graph, stream = capture(comm, array, comm.empty(10, "f4"))
    comm.barrier()
    graph.launch(stream)
    if how == "cycle":
        loop: list[Any] = [graph, comm]
        loop.append(loop)
        return
    _alive.extend([graph, comm, array, stream])
    if how == "capturing":
        stream.begin_capture()
        comm.all_reduce(array, array)
        comm.all_reduce(array, array, stream=stream)
    elif how == "waiting" and rank == 0:  # for a replay that the other rank does not make
        threading.Thread(target=_replay, args=(graph, stream), daemon=True).start()
        time.sleep(0.2)
    elif how == "raising":
        sys.exit(3)


if __name__ == "__main__":
    leave(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
