"""The self-test of the peers: a small communicator in a process of its own.

Opening one writes a pattern through every mapping of every pair of ranks and looks whether it came
there; a sum over all ranks follows. The process is started with multicast switched off, which
nothing in it can overrule, and is given up where it hangs: a broken link must not stop the report.

    python -m cupy_zc.cli.checks.peers cuda 2
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import cupy
import numpy as np

from ...arrays import asnumpy, copyto
from ...collectives import Communicator
from ...errors import Error

__all__ = ["Measured", "main", "measure", "pass_a_sum"]

#: Seconds for the whole process, kernels to be compiled included.
PATIENCE = 240.0
#: Seconds that one rank waits for another one in it.
_WAIT = 60.0
_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Measured:
    """What came out."""

    passed: bool
    words: str


def measure(driver: str, ranks: int, *, patience: float = PATIENCE) -> Measured:
    """Run the self-test in another process.

    Args:
        driver: ``"cuda"``, where rank ``r`` gets GPU ``r``, or ``"host"``.
        ranks: How many.
        patience: Seconds after which it counts as failed.
    """
    command = [sys.executable, "-m", __name__, driver, str(ranks)]
    environment = {**os.environ, "CUPY_ZC_MULTICAST": "off"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        return Measured(False, f"did not end in {patience:g} s")
    try:
        said = json.loads(done.stdout.strip().rpartition("\n")[2])
        return Measured(bool(said["passed"]), str(said["words"]))
    except (ValueError, KeyError, TypeError):
        last = done.stderr.strip().rpartition("\n")[2]
        return Measured(False, f"ended with exit code {done.returncode}: {last}")


def pass_a_sum(comms: Sequence[Communicator], devices: Sequence[int] | None) -> None:
    """Add up arrays over ranks that are threads of this process.

    Raises:
        Error: a sum is wrong, or a call failed.
    """

    def rank(comm: Communicator) -> None:
        if devices is not None:
            cupy.cuda.Device(devices[comm.rank]).use()
        array = comm.empty(_ELEMENTS, "f4")
        copyto(array, np.arange(_ELEMENTS, dtype="f4") % 1000 + comm.rank)
        comm.all_reduce(array, array)
        comm.synchronize()
        ranks = comm.size
        expected = ranks * (np.arange(_ELEMENTS) % 1000) + ranks * (ranks - 1) / 2
        wrong = int((asnumpy(array) != expected).sum())
        if wrong:
            raise Error(f"rank {comm.rank}: {wrong:,} of {_ELEMENTS:,} sums are wrong")

    with ThreadPoolExecutor(len(comms)) as threads:
        for each in [threads.submit(rank, comm) for comm in comms]:
            each.result()


def _test(driver: str, ranks: int) -> Measured:
    devices = list(range(ranks)) if driver == "cuda" else None
    began = time.monotonic()
    try:
        comms = Communicator.in_process(ranks, devices=devices, driver=driver, timeout=_WAIT)
        try:
            pass_a_sum(comms, devices)
        finally:
            for comm in comms:
                comm.close()
    except Error as error:
        return Measured(False, str(error))
    took = time.monotonic() - began
    pattern = "every pair read and wrote each other's memory; " if driver == "cuda" else ""
    return Measured(True, f"{pattern}{ranks} ranks added up right, in {took:.1f} s")


def main(arguments: Sequence[str]) -> None:
    """The process: prints what came out as one line of JSON."""
    driver, ranks = arguments
    sys.stdout.write(json.dumps(asdict(_test(driver, int(ranks)))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
