"""Train a classifier of handwritten digits on several ranks, each with a shard of the data.

    mpiexec -n 4 python examples/data_parallel_digits.py

The file is the same with GPUs, one a rank, and without: ``comm.xp`` is CuPy or NumPy, and ``view``
turns an array of the communicator into one of that module. More in docs/examples.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from cupy_zc import Communicator, view

PIXELS, DIGITS = 64, 10
WEIGHTS = PIXELS * DIGITS
PARAMETERS = WEIGHTS + DIGITS  # weights, then biases
RATE, MOMENTUM = 0.5, 0.9
TOLERANCE = 1e-4  # float32, summed in another order, over hundreds of steps


class Softmax:
    """A softmax classifier in two flat arrays: its parameters, and their gradient."""

    def __init__(self, xp: Any, parameters: Any, gradient: Any) -> None:
        self.xp = xp
        self.parameters = parameters
        self.gradient = gradient  # and behind it the loss, which so needs no all_reduce of its own

    def scores(self, x: Any) -> Any:
        """How much each sample (row) looks like each digit (column)."""
        return x @ self.parameters[:WEIGHTS].reshape(PIXELS, DIGITS) + self.parameters[WEIGHTS:]

    def accuracy(self, x: Any, labels: Any) -> float:
        return float((self.scores(x).argmax(axis=1) == labels).mean())

    def differentiate(self, x: Any, y: Any, samples: int) -> None:
        """Set ``gradient`` to what ``x`` and ``y`` add to the mean over ``samples`` samples."""
        scores = self.scores(x)
        scores -= scores.max(axis=1, keepdims=True)
        log_p = scores - self.xp.log(self.xp.exp(scores).sum(axis=1, keepdims=True))
        error = (self.xp.exp(log_p) - y) / samples
        self.gradient[:WEIGHTS] = (x.T @ error).ravel()
        self.gradient[WEIGHTS:PARAMETERS] = error.sum(axis=0)
        self.gradient[PARAMETERS] = -(y * log_p).sum() / samples

    def train(
        self, x: Any, y: Any, samples: int, steps: Iterable[int], add_ranks: Callable[[], None]
    ) -> list[Any]:
        """Descend, with momentum; ``add_ranks`` sums ``gradient`` over the ranks."""
        velocity = 0 * self.parameters
        losses = []
        for _ in steps:
            self.differentiate(x, y, samples)
            add_ranks()
            losses.append(self.gradient[PARAMETERS].copy())  # looked at later: no need to wait now
            velocity = MOMENTUM * velocity - RATE * self.gradient[:PARAMETERS]
            self.parameters += velocity
        return losses


def save_plot(losses: list[float], title: str, path: Path) -> None:
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.semilogy(losses)
    axes.set(xlabel="step", ylabel="cross-entropy", title=title)
    figure.savefig(path)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a classifier of handwritten digits.")
    parser.add_argument("--steps", type=int, default=300, help="of gradient descent")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the first weights")
    parser.add_argument("--plot", type=Path, default="loss.png", help="where to save the plot")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=sys.stderr.isatty(),
        help="show a bar; say so under mpiexec, which hides the terminal from the ranks",
    )
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: expected at least 1")
    return args


def main() -> int:
    args = options()
    digits = load_digits()
    x, x_test, labels, labels_test = train_test_split(
        (digits.data / digits.data.max()).astype("f4"),
        digits.target,
        test_size=0.2,
        stratify=digits.target,
        random_state=args.seed,
    )
    y = np.eye(DIGITS, dtype="f4")[labels]
    start = np.random.default_rng(args.seed).normal(0, 0.01, PARAMETERS).astype("f4")

    with Communicator.from_mpi() as comm:
        xp = comm.xp
        # What is communicated lives in arrays that every rank can reach; the rest lives anywhere.
        parameters = comm.empty(PARAMETERS, "f4")
        gradient = comm.empty(PARAMETERS + 1, "f4")
        if comm.rank == 0:
            view(parameters)[...] = xp.asarray(start)
        comm.broadcast(parameters, root=0)

        transfers = []

        def add_ranks() -> None:
            comm.all_reduce(gradient, gradient, op="sum")  # in place
            transfers.append(comm.last_transfer)

        bar = Console(stderr=True, force_terminal=args.progress)
        hidden = comm.rank != 0 or not args.progress
        steps = track(range(args.steps), "training", console=bar, disable=hidden)
        shard = xp.asarray(x[comm.rank :: comm.size]), xp.asarray(y[comm.rank :: comm.size])
        together = Softmax(xp, view(parameters), view(gradient))
        comm.barrier()
        begin = time.perf_counter()
        losses = together.train(*shard, len(x), steps, add_ranks)
        comm.synchronize()
        seconds = time.perf_counter() - begin
        if comm.rank != 0:
            return 0

        # Once more on this rank alone, with all the data: the outcome has to be the same.
        alone = Softmax(xp, xp.asarray(start), xp.empty_like(together.gradient))
        alone.train(xp.asarray(x), xp.asarray(y), len(x), range(args.steps), lambda: None)
        difference = float(abs(together.parameters - alone.parameters).max())
        equal = difference <= TOLERANCE

        accuracy = together.accuracy(xp.asarray(x_test), xp.asarray(labels_test))
        moved = sum(transfer.bytes for transfer in transfers)
        direct = sum(transfer.zero_copy for transfer in transfers)
        save_plot([float(loss) for loss in losses], f"Digits on {comm.size} ranks", args.plot)
        print(f"ranks                {comm.size}, {comm.backend} engine")
        print(f"test accuracy        {accuracy:.1%}")
        print(
            f"against one process  {'equal' if equal else 'DIFFERENT'}: largest difference of a "
            f"parameter {difference:.1e}, allowed {TOLERANCE:.0e}"
        )
        print(f"all_reduce           {moved:,} bytes in {len(transfers)} calls")
        print(f"zero-copy            {direct} of {len(transfers)} calls")
        print(f"time                 {seconds / args.steps * 1e3:.2f} ms per step")
        print(
            f"loss                 {float(losses[0]):.3f} to {float(losses[-1]):.3f}, {args.plot}"
        )
        return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
