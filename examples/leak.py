"""Leak arrays on purpose, record it, and save what `cupy-zc view` explains. Needs no GPU.

    python examples/leak.py leak.json
    cupy-zc view leak.json --html leak.html

A training loop keeps each step's loss for a plot. It means to keep a number, and keeps an array as
large as the batch. The page and the text of `cupy-zc view` name the line and the list.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import cupy

import cupy_zc

history: list[Any] = []


def step(weights: Any) -> None:
    activations = cupy.empty((1024, 2048), "f4")
    gradient = cupy.empty_like(weights)
    losses = cupy.empty((1024, 512), "f4")
    history.append(losses)  # the leak: this keeps 2 MiB a step and not one number
    time.sleep(0.01)  # the work
    del activations, gradient


def main() -> None:
    parser = argparse.ArgumentParser(description="Leak arrays on purpose, and record it.")
    parser.add_argument("file", nargs="?", type=Path, default="leak.json", help="to save it in")
    parser.add_argument("--steps", type=int, default=40, help="that leak")
    args = parser.parse_args()
    pool = cupy_zc.install()
    try:
        weights = cupy.empty((2048, 2048), "f4")
        with pool.record(interval=0.01) as recording:
            for number in range(args.steps):
                if number % 10 == 0:
                    recording.mark(f"step {number}")
                step(weights)
        recording.save(args.file)
        print(f"{args.steps} steps recorded; see them with: cupy-zc view {args.file}")
    finally:
        history.clear()
        cupy_zc.uninstall()


if __name__ == "__main__":
    main()
