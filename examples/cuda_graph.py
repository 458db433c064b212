"""Capture an iteration of conjugate gradients into a CUDA graph, and replay it.

    mpiexec -n 2 python examples/cuda_graph.py

A graph launches a whole iteration at once: kernels, temporaries, and the collectives in between.
The same steps are made eagerly first, so the two can be compared: the results must have the same
bits. The file is the same with GPUs, one a rank, and without. More in docs/examples.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

import cupy_zc
from cupy_zc import Communicator, Stream, asnumpy, enqueue, view


class Plate:
    """This rank's rows of a warm plate: the system of conjugate_gradient.py, as arrays alone.

    A graph cannot wait for a number on the host, so the scalars of the method are arrays too, and
    what they are in one replay is there in the next one.
    """

    def __init__(self, comm: Communicator, size: int) -> None:
        self.comm = comm
        self.rows = size // comm.size
        at = np.arange(1, self.rows * comm.size + 1) / (self.rows * comm.size + 1)
        spot = np.exp(-100 * ((at[:, None] - 0.3) ** 2 + (at - 0.6) ** 2))
        self.b = comm.xp.asarray(spot[comm.rank * self.rows :][: self.rows])
        #: The search direction, with a row of each neighbour's around it.
        self.padded = comm.xp.zeros((self.rows + 2, at.size))
        self.x, self.r = comm.xp.zeros_like(self.b), comm.xp.zeros_like(self.b)
        # These are communicated. They need not be registered: the capture does that.
        self.edges = cupy.empty((2, at.size))
        self.all_edges = cupy.empty((comm.size, 2, at.size))
        self.old, self.new, self.curve = (cupy.empty(1) for _ in range(3))
        #: The squared residual at the start.
        self.first = 0.0

    def start(self, stream: Any) -> None:
        """Begin at zero, where the residual is the right-hand side."""

        def reset() -> None:
            self.x[...] = 0
            self.r[...] = self.b
            self.padded[1:-1] = self.b
            view(self.old)[0] = (self.b * self.b).sum()

        enqueue(reset, stream)
        self.comm.all_reduce(self.old, self.old, stream=stream)

    def iterate(self, stream: Any) -> None:
        """Enqueue one iteration."""
        comm = self.comm
        enqueue(self._give_edges, stream)
        comm.all_gather(self.edges, self.all_edges, self.edges.size, stream=stream)
        enqueue(self._multiply, stream)
        comm.all_reduce(self.curve, self.curve, stream=stream)
        enqueue(self._step, stream)
        comm.all_reduce(self.new, self.new, stream=stream)
        enqueue(self._turn, stream)

    def _give_edges(self) -> None:
        view(self.edges)[0] = self.padded[1]
        view(self.edges)[1] = self.padded[-2]

    def _multiply(self) -> None:
        edges, rank, padded = view(self.all_edges), self.comm.rank, self.padded
        if rank > 0:
            padded[0] = edges[rank - 1, 1]
        if rank + 1 < self.comm.size:
            padded[-1] = edges[rank + 1, 0]
        p = padded[1:-1]
        q = 4 * p - padded[:-2] - padded[2:]  # a temporary, which lives as long as the graph
        q[:, 1:] -= p[:, :-1]
        q[:, :-1] -= p[:, 1:]
        self.q = q
        view(self.curve)[0] = (p * q).sum()

    def _step(self) -> None:
        step = view(self.old) / view(self.curve)
        self.x += step * self.padded[1:-1]
        self.r -= step * self.q
        view(self.new)[0] = (self.r * self.r).sum()

    def _turn(self) -> None:
        p = self.padded[1:-1]
        p *= view(self.new) / view(self.old)
        p += self.r
        view(self.old)[...] = view(self.new)


def timed(
    plate: Plate, stream: Any, count: int, iterate: Callable[[], None]
) -> tuple[np.ndarray, float, float]:
    """This rank's solution after some iterations, the residual, and seconds an iteration."""
    plate.start(stream)
    stream.synchronize()
    plate.first = float(asnumpy(plate.old)[0])
    plate.comm.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        iterate()
    stream.synchronize()
    seconds = time.perf_counter() - begin
    residual = (float(asnumpy(plate.new)[0]) / plate.first) ** 0.5
    return np.array(cupy.asnumpy(plate.x)), residual, seconds / count


def capture(plate: Plate, stream: Any) -> Any:
    """One iteration as a graph. Here the ranks agree; a replay asks nobody on the host."""
    stream.begin_capture()
    try:
        plate.iterate(stream)
    except BaseException:
        stream.end_capture()
        raise
    return stream.end_capture()


def replay(plate: Plate, stream: Any, count: int) -> tuple[Any, np.ndarray, float, float]:
    """What the graph held, and what :func:`timed` says of it.

    At the end nobody has the graph any more. A communicator that graphs call cannot be closed.
    """
    graph = capture(plate, stream)
    (lease,) = plate.comm.leases()
    return lease, *timed(plate, stream, count, lambda: graph.launch(stream))


def options(ranks: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Replay an iteration as a CUDA graph.")
    parser.add_argument("--size", type=int, default=128, help="inner grid points along an edge")
    parser.add_argument("--iterations", type=int, default=200, help="how many")
    args = parser.parse_args()
    if args.size < ranks or args.iterations < 1:
        parser.error(f"expected at least {ranks} points along an edge, and one iteration")
    return args


def main() -> int:
    cupy_zc.install()
    with Communicator.from_mpi() as comm:
        args = options(comm.size)
        stream = Stream(non_blocking=True)
        with stream:
            plate = Plate(comm, args.size)
        eager, _, slow = timed(plate, stream, args.iterations, lambda: plate.iterate(stream))
        lease, replayed, residual, fast = replay(plate, stream, args.iterations)
        zero_copy = comm.last_transfer.zero_copy
        same = np.array_equal(eager, replayed)
        if comm.rank != 0:
            return 0 if same else 1

        print(f"ranks            {comm.size}, {comm.backend} engine")
        print(f"grid             {plate.padded.shape[1]} points along an edge")
        print(
            f"graph            {lease.calls} collectives, {lease.bytes:,} bytes registered for it"
        )
        print(f"zero-copy        {'yes' if zero_copy else 'no'}, in every replay")
        print(f"replayed         {'equal' if same else 'DIFFERENT'}: the bits of the eager result")
        print(
            f"residual         {residual:.1e} of the first one, after {args.iterations} iterations"
        )
        print(f"time             eager {slow * 1e3:.3f} ms, replayed {fast * 1e3:.3f} ms")
        return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
