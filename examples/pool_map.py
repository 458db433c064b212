"""Allocate through the pool and print where everything lies. Runs with and without a GPU.

python examples/pool_map.py
"""

from __future__ import annotations

import cupy
import numpy as np

import cupy_zc
from cupy_zc.memory import render


def main() -> None:
    pool = cupy_zc.install()
    try:
        # Every array from here on can be shared, registered and multicast.
        weights = [cupy.empty((1024, 1024), dtype="f4") for _ in range(8)]
        large = cupy.empty(100 << 20, dtype="u1")
        print("Eight arrays of 4 MiB share a segment; one of 100 MiB has its own:\n")
        print(render(pool.snapshot()))

        cupy_zc.copyto(weights[3], np.arange(1 << 20).reshape(1024, 1024))
        assert cupy_zc.asnumpy(weights[3])[-1, -1] == (1 << 20) - 1

        del weights[::2]
        print("\nEvery second one dropped:\n")
        print(render(pool.snapshot()))

        weights.append(cupy.empty((2048, 2048), dtype="f4"))
        print("\nOne of 16 MiB does not fit the holes and goes behind them:\n")
        print(render(pool.snapshot()))

        del large, weights
        pool.free_all_blocks()
        print(f"\nAll dropped and released: the pool holds {pool.total_bytes()} bytes.")
    finally:
        cupy_zc.uninstall()


if __name__ == "__main__":
    main()
