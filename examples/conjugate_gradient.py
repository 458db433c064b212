"""Solve Poisson's equation on a square with conjugate gradients, each rank a block of rows.

    mpiexec -n 4 python examples/conjugate_gradient.py

The temperature u of a plate with a cold rim and a hot spot f solves -(u_xx + u_yy) = f. On a grid
that is a linear system with the 5-point stencil, checked against SciPy's direct solver at the end.
The file is the same with GPUs, one a rank, and without. More in docs/examples.md.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from cupy_zc import Communicator, asnumpy, view

#: What the solution may differ from SciPy's, relative to its maximum, for the default --tolerance.
ALLOWED = 1e-6


def hot_spot(size: int) -> np.ndarray:
    """The right-hand side, times the square of the grid's step; one value for each inner point."""
    at = np.arange(1, size + 1) / (size + 1)
    square = (at[:, None] - 0.3) ** 2 + (at - 0.6) ** 2
    return np.exp(-100 * square) / (size + 1) ** 2


class Plate:
    """This rank's rows of the grid, with what they need of the neighbours' rows.

    All arrays that are communicated come from the communicator, so every call is zero-copy. Such
    arrays have the same shape on all ranks: that of the rank with the most rows.
    """

    def __init__(self, comm: Communicator, size: int) -> None:
        self.comm = comm
        bounds = [rank * size // comm.size for rank in range(comm.size + 1)]
        self.counts = [end - begin for begin, end in itertools.pairwise(bounds)]
        self.rows = self.counts[comm.rank]
        self.mine = slice(bounds[comm.rank], bounds[comm.rank + 1])
        #: The search direction, between one row of the rank above and one of the rank below. At
        #: the rim of the plate nobody writes to it: it stays zero, as the boundary condition says.
        self.padded = comm.zeros((max(self.counts) + 2, size), "f8")
        self.scalar = comm.empty(1, "f8")
        self.block = comm.empty((max(self.counts), size), "f8")
        self.blocks = comm.empty((comm.size, max(self.counts), size), "f8")
        self.calls: list[bool] = []

    def exchange_halo(self) -> None:
        """Swap edge rows with both neighbours.

        A swap needs both ranks at once. Were all of them to begin with the rank below, they would
        wait in a row for the last one. So ranks 0 and 1, 2 and 3, ... swap first; then 1 and 2, ...
        """
        rank, rows, padded = self.comm.rank, self.rows, self.padded
        above = rank - 1, padded[1], padded[0]
        below = rank + 1, padded[rows], padded[rows + 1]
        for peer, edge, halo in (above, below) if rank % 2 else (below, above):
            if 0 <= peer < self.comm.size:
                self.comm.send_recv(edge, halo, peer)
                self.count()

    def dot(self, a: Any, b: Any) -> float:
        """The inner product over all ranks; the same bits on each, so all take the same turns."""
        view(self.scalar)[0] = (a * b).sum()
        self.comm.all_reduce(self.scalar, self.scalar, op="sum")
        self.count()
        return float(view(self.scalar)[0])

    def gather(self, x: Any) -> np.ndarray | None:
        """The whole grid on rank 0, None elsewhere."""
        view(self.block)[: self.rows] = x
        self.comm.gather(self.block, self.blocks, root=0)
        self.count()
        if self.comm.rank != 0:
            return None
        blocks = asnumpy(self.blocks)
        return np.vstack([block[:rows] for block, rows in zip(blocks, self.counts, strict=True)])

    def count(self) -> None:
        self.calls.append(self.comm.last_transfer.zero_copy)


def solve(plate: Plate, b: Any, tolerance: float, most: int) -> tuple[Any, int, float]:
    """Conjugate gradients from zero: this rank's rows of u, iterations, relative residual."""
    padded, rows = view(plate.padded), plate.rows
    x = 0 * b
    r = b.copy()
    p = padded[1 : rows + 1]  # a window on the middle rows, not a copy
    p[...] = r
    square = first = plate.dot(r, r)
    iterations = 0
    while square > tolerance**2 * first and iterations < most:
        plate.exchange_halo()
        q = 4 * p - padded[:rows] - padded[2 : rows + 2]
        q[:, 1:] -= p[:, :-1]
        q[:, :-1] -= p[:, 1:]
        step = square / plate.dot(p, q)
        x += step * p
        r -= step * q
        before, square = square, plate.dot(r, r)
        p *= square / before
        p += r
        iterations += 1
    return x, iterations, (square / first) ** 0.5


def solve_with_scipy(b: np.ndarray) -> np.ndarray:
    size = len(b)
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(size, size))
    one = scipy.sparse.eye_array(size)
    laplacian = scipy.sparse.kron(line, one) + scipy.sparse.kron(one, line)
    return scipy.sparse.linalg.spsolve(laplacian.tocsc(), b.ravel()).reshape(b.shape)


def options(ranks: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Solve Poisson's equation with many ranks.")
    parser.add_argument("--size", type=int, default=128, help="inner grid points along an edge")
    parser.add_argument("--tolerance", type=float, default=1e-10, help="relative residual to reach")
    parser.add_argument("--iterations", type=int, default=10_000, help="at most")
    args = parser.parse_args()
    if args.size < ranks:
        parser.error(f"--size {args.size}: expected at least one row for each of {ranks} ranks")
    return args


def main() -> int:
    with Communicator.from_mpi() as comm:
        args = options(comm.size)
        plate = Plate(comm, args.size)
        b = hot_spot(args.size)
        comm.barrier()
        begin = time.perf_counter()
        x, iterations, residual = solve(
            plate, comm.xp.asarray(b[plate.mine]), args.tolerance, args.iterations
        )
        seconds = time.perf_counter() - begin
        solution = plate.gather(x)
        if solution is None:
            return 0

        expected = solve_with_scipy(b)
        difference = float(abs(solution - expected).max() / expected.max())
        good = difference <= ALLOWED
        print(f"ranks            {comm.size}, {comm.backend} engine")
        print(f"grid             {args.size} x {args.size}, rows per rank {plate.counts}")
        print(f"iterations       {iterations}, relative residual {residual:.1e}")
        print(
            f"against SciPy    {'equal' if good else 'DIFFERENT'}: largest difference "
            f"{difference:.1e} of the maximum, allowed {ALLOWED:.0e}"
        )
        print(f"zero-copy        {sum(plate.calls)} of {len(plate.calls)} calls")
        print(f"time             {seconds / max(iterations, 1) * 1e3:.2f} ms per iteration")
        return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
