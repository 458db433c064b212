"""The pool against CuPy's own, and against the driver, in one run.

    python benchmarks/pool.py [--driver host|cuda] [--output FILE]

Prints a table and appends one JSON line for each figure to FILE. With a GPU: `cupy.empty` on this
pool as a ratio to CuPy's, growth by 1 GiB as a ratio to `cudaMalloc`. Without: microseconds on the
host driver.
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

import cupy_zc
from cupy_zc.driver import select

GiB = 1 << 30
ROUNDS = 15


def microseconds(call: Callable[[], object], number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number * 1e6


def side_by_side(calls: dict[str, Callable[[], object]], number: int) -> dict[str, float]:
    """Medians of rounds that take turns, so that a slow moment of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(microseconds(call, number))
    return {name: statistics.median(values) for name, values in times.items()}


def through(pool: cupy.cuda.MemoryPool, work: Callable[[], object]) -> Callable[[], object]:
    """`work` with arrays of `pool`, set once for all repetitions of a round."""

    def call() -> object:
        with cupy.cuda.using_allocator(pool.malloc):
            for _ in range(1000):
                work()

    return call


def one() -> None:
    cupy.empty(256, dtype="f4")


def mixed() -> None:
    a = cupy.empty(256, dtype="f4")
    b = cupy.empty(100_000, dtype="f4")
    del a
    cupy.empty(5_000, dtype="f4")
    del b


def malloc(pool: cupy.cuda.MemoryPool) -> Callable[[], object]:
    return lambda: pool.malloc(1024)


def growth(pool: cupy_zc.MemoryPool) -> float:
    """Median microseconds to serve 1 GiB from nothing."""
    times = []
    for _ in range(7):
        start = time.perf_counter()
        held = pool.malloc(GiB)
        times.append((time.perf_counter() - start) * 1e6)
        del held
        pool.free_all_blocks()
    return statistics.median(times)


def cuda_malloc() -> float:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        memory = cupy.cuda.Memory(GiB)
        times.append((time.perf_counter() - start) * 1e6)
        del memory
    return statistics.median(times)


def measure(name: str) -> list[dict[str, object]]:
    ours = cupy_zc.MemoryPool(driver=name)
    rows: list[dict[str, object]] = []
    if name == "host":
        times = side_by_side({"malloc+free": malloc(ours)}, 20_000)
        rows.append({"case": "malloc+free 1 KiB", "us": times["malloc+free"]})
        rows.append({"case": "growth by 1 GiB", "us": growth(ours)})
        return rows
    theirs = cupy.cuda.MemoryPool()
    for case, work in {"cupy.empty 1 KiB": one, "three sizes": mixed}.items():
        times = side_by_side({"ours": through(ours, work), "cupy": through(theirs, work)}, 20)
        rows.append(_ratio(case, times["ours"] / 1000, times["cupy"] / 1000))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        times = side_by_side({"ours": through(ours, one), "cupy": through(theirs, one)}, 20)
        rows.append(_ratio("cupy.empty, own stream", times["ours"] / 1000, times["cupy"] / 1000))
    times = side_by_side({"ours": malloc(ours), "cupy": malloc(theirs)}, 20_000)
    rows.append(_ratio("malloc+free 1 KiB", times["ours"], times["cupy"]))
    rows.append(_ratio("growth by 1 GiB (cudaMalloc)", growth(ours), cuda_malloc()))
    return rows


def _ratio(case: str, ours: float, theirs: float) -> dict[str, object]:
    return {"case": case, "us": ours, "cupy_us": theirs, "ratio": ours / theirs}


def machine(name: str) -> dict[str, object]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "benchmark": "pool",
        "driver": name,
        "device": select(name).device_info(0).name,
        "python": platform.python_version(),
        "cupy": cupy.__version__,
        "cupy_zc": cupy_zc.__version__,
        "commit": commit,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--driver", choices=["host", "cuda"], default=select().name)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    about = machine(options.driver)
    rows = measure(options.driver)
    print(f"{'case':32} {'us':>10} {'CuPy us':>10} {'ratio':>7}")
    for row in rows:
        theirs = f"{row['cupy_us']:10.2f} {row['ratio']:7.2f}" if "ratio" in row else ""
        print(f"{row['case']:32} {row['us']:10.2f} {theirs}")
    if options.output is not None:
        with options.output.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(about | row) + "\n")


if __name__ == "__main__":
    main()
