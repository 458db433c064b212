"""all_reduce on the host driver against MPI's, in one run.

    mpiexec -n 4 python benchmarks/host_collectives.py [--output FILE]

Rank 0 prints a table and appends one JSON line for each figure to FILE: milliseconds of a zero-copy
all_reduce of float32, of mpi4py's `Allreduce` on NumPy arrays, and how many times longer that took;
milliseconds of processor time of a small call on one rank, waiting not counted; registration of
1 GiB.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import cupy
import numpy as np
from mpi4py import MPI

import cupy_zc

MiB = 1 << 20
ROUNDS = 15
SMALL_CALLS = 300


def turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Medians in milliseconds of rounds that take turns; of each round the slowest rank counts."""
    world = MPI.COMM_WORLD
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 2):
        for name, call in calls.items():
            world.Barrier()
            start = time.perf_counter()
            call()
            took = time.perf_counter() - start
            times[name].append(world.allreduce(took, op=MPI.MAX) * 1e3)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def all_reduce(comm: cupy_zc.Communicator, nbytes: int) -> dict[str, object]:
    count = nbytes // 4
    given, taken = comm.zeros(count, "f4"), comm.zeros(count, "f4")
    values = np.random.default_rng(comm.rank).random(count, dtype="f4")
    cupy_zc.copyto(given, values)
    result = np.empty_like(values)
    times = turns(
        {
            "ours": lambda: comm.all_reduce(given, taken),
            "mpi": lambda: MPI.COMM_WORLD.Allreduce(values, result),
        }
    )
    assert comm.last_transfer is not None
    assert comm.last_transfer.zero_copy
    np.testing.assert_allclose(cupy_zc.view(taken), result, rtol=1e-5)
    return {
        "case": f"all_reduce {nbytes // MiB} MiB float32",
        "ms": times["ours"],
        "mpi_ms": times["mpi"],
        "ratio": times["mpi"] / times["ours"],
    }


def small_call(comm: cupy_zc.Communicator) -> dict[str, object]:
    array = comm.zeros(256, "f4")
    comm.all_reduce(array, array)
    comm.barrier()
    start = time.thread_time()
    for _ in range(SMALL_CALLS):
        comm.all_reduce(array, array)
    took = (time.thread_time() - start) / SMALL_CALLS * 1e3
    most = MPI.COMM_WORLD.allreduce(took, op=MPI.MAX)
    return {"case": "all_reduce 1 KiB, processor time", "ms": most}


def registration(comm: cupy_zc.Communicator) -> dict[str, object]:
    pool = cupy_zc.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        array = cupy.empty(1 << 30, "u1")
    times = []
    for _ in range(5):
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        held = comm.register(array)
        times.append((time.perf_counter() - start) * 1e3)
        held.deregister()
        comm.collect()
    return {"case": "register 1 GiB", "ms": statistics.median(times)}


def machine() -> dict[str, object]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "benchmark": "host_collectives",
        "ranks": MPI.COMM_WORLD.size,
        "mpi": MPI.Get_library_version().splitlines()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy_zc": cupy_zc.__version__,
        "commit": commit,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with cupy_zc.Communicator.from_mpi() as comm:
        rows = [all_reduce(comm, size * MiB) for size in (1, 16, 64)]
        rows += [small_call(comm), registration(comm)]
        first = comm.rank == 0
    if not first:
        return
    print(f"{'case':34} {'ms':>9} {'MPI ms':>9} {'ratio':>7}")
    for row in rows:
        theirs = f"{row['mpi_ms']:9.3f} {row['ratio']:7.2f}" if "ratio" in row else ""
        print(f"{row['case']:34} {row['ms']:9.3f} {theirs}")
    if options.output is not None:
        about = machine()
        with options.output.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(about | row) + "\n")


if __name__ == "__main__":
    main()
