"""The self-test of multicast: every kernel of the switch, on every type that it reduces.

It runs in a process of its own, with ranks that are threads, one for each GPU. There, tables send
all messages through the switch, whatever their size; results are compared with NumPy.

    python -m cupy_zc.cli.checks.switch 4
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...arrays import asnumpy, copyto
from ...collectives import Communicator, device_multimem
from ...collectives.device_multimem import MULTIMEM, refuse_multimem
from ...collectives.dtypes import DTYPES, refuse_reduction
from ...collectives.plan import REDUCTIONS, Operation
from ...driver import select
from ...errors import Error
from ..output import CannotError

__all__ = ["Tried", "main", "measure", "probe", "try_everything"]

#: Seconds for the whole process: some forty kernels are compiled.
PATIENCE = 900.0
#: Seconds that one rank waits for another one in it.
_WAIT = 60.0
#: What the process is told that is to make a communicator, and no more.
_PROBE = "probe"
#: Elements of a row: packets, odd ends, several blocks.
_COUNTS = (1, 7, 1000, 100_003)
#: Bytes up to which all_reduce goes in packets here.
_PACKETS = 1 << 12
#: Largest whole number given, by type: sums of eight ranks are exact. Else 1000.
_LARGEST = {"bool": 1, "bfloat16": 15, "float16": 100}
#: Of averages that are no whole numbers: what a type rounds to.
_TOLERANCE = {"bfloat16": 1e-2, "float16": 1e-3}


@dataclass(frozen=True, slots=True)
class Tried:
    """A collective of one type and reduction, at several sizes."""

    collective: str
    dtype: str
    op: str
    #: Algorithms that carried it out.
    algorithms: tuple[str, ...]
    #: Elements that are wrong, of all ranks, and how many were compared.
    wrong: int
    compared: int


def _kinds(operation: Operation) -> Iterator[tuple[int, int]]:
    """Types and reductions, by number, that the switch does."""
    if operation in (Operation.ALL_GATHER, Operation.BROADCAST):
        yield DTYPES.index("uint8"), 0
        return
    for code, dtype in enumerate(DTYPES):
        for reduction, op in enumerate(REDUCTIONS):
            kind = _dtype(dtype)
            if kind is None or refuse_reduction(kind, op) or refuse_multimem(code, reduction):
                continue
            yield code, reduction


def _dtype(name: str) -> np.dtype[Any] | None:
    """The type of this name; None for bfloat16 where ml_dtypes, which has it, is not installed."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        return None
    kind: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return kind


def _given(dtype: str, count: int, rank: int) -> Any:
    chance = np.random.default_rng((count, rank))
    largest = _LARGEST.get(dtype, 1000)
    kind = _dtype(dtype)
    assert kind is not None  # it is not asked for else
    values = chance.integers(0 if kind.kind in "bu" else -largest, largest, count, endpoint=True)
    if kind.kind == "c":
        return (values + 1j * chance.integers(-largest, largest, count)).astype(kind)
    return values.astype(kind)


def _wanted(operation: Operation, dtype: str, op: str, count: int, rank: int, ranks: int) -> Any:
    """The output of a rank, before it is rounded to the type."""
    rows = ranks if operation is Operation.REDUCE_SCATTER else 1
    given = np.array([_given(dtype, rows * count, peer) for peer in range(ranks)])
    if operation is Operation.ALL_GATHER:
        return given.reshape(-1)
    if operation is Operation.BROADCAST:
        return given[ranks - 1]
    wide = given if given.dtype.kind in "iub" else given.astype("c16" if "c" in dtype else "f8")
    total = {"min": wide.min, "max": wide.max}.get(op, wide.sum)(axis=0)
    if given.dtype.kind == "b":
        total = given.any(axis=0)
    elif op == "avg":
        total = np.trunc(total / ranks) if given.dtype.kind in "iu" else total / ranks
    return np.asarray(total).reshape(rows, count)[rank if rows > 1 else 0]


def _wrong(got: Any, wanted: Any, dtype: str, op: str) -> int:
    if op == "avg" and np.dtype(got.dtype).kind not in "iu":
        close = np.isclose(got.astype(wanted.dtype), wanted, rtol=_TOLERANCE.get(dtype, 1e-6))
        return int((~close).sum())
    return int((got != wanted.astype(got.dtype)).sum())


def _try_on(comm: Communicator, operation: Operation, code: int, reduction: int) -> Tried:
    """One line of the report, of one rank."""
    dtype, op, ranks = DTYPES[code], REDUCTIONS[reduction], comm.size
    algorithms: dict[str, None] = {}
    wrong = compared = 0
    for count in _COUNTS:
        rows = ranks if operation is Operation.REDUCE_SCATTER else 1
        columns = ranks if operation is Operation.ALL_GATHER else 1
        source = comm.empty(rows * count, _dtype(dtype))
        target = comm.empty(columns * count, _dtype(dtype))
        copyto(source, _given(dtype, rows * count, comm.rank))
        comm.barrier()
        if operation is Operation.ALL_REDUCE:
            comm.all_reduce(source, target, op)
        elif operation is Operation.REDUCE_SCATTER:
            comm.reduce_scatter(source, target, count, op)
        elif operation is Operation.ALL_GATHER:
            comm.all_gather(source, target, count)
        else:
            comm.broadcast(source, ranks - 1)
            target = source
        comm.synchronize()
        wanted = _wanted(operation, dtype, op, count, comm.rank, ranks)
        wrong += _wrong(asnumpy(target), wanted, dtype, op)
        compared += wanted.size
        transfer = comm.last_transfer
        algorithms[transfer.algorithm if transfer is not None else "none"] = None
        comm.barrier()  # before anybody drops its arrays
    name = op if operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER) else "none"
    return Tried(operation.call, dtype, name, tuple(algorithms), wrong, compared)


def try_everything(
    comms: Sequence[Communicator], make_current: Callable[[int], None]
) -> Iterator[Tried]:
    """Run everything on ranks that are threads, with multicast; a result for each kind of call.

    Args:
        comms: Of all ranks, which must have multicast on; rank ``r`` on device ``r``.
        make_current: Makes a device that of the calling thread.

    Raises:
        Error: a call failed.
    """

    def rank(comm: Communicator, operation: Operation, code: int, reduction: int) -> Tried:
        make_current(comm.rank)
        return _try_on(comm, operation, code, reduction)

    with ThreadPoolExecutor(len(comms)) as threads:
        for operation in MULTIMEM:
            for kind in _kinds(operation):
                tasks = [threads.submit(rank, comm, operation, *kind) for comm in comms]
                all_ranks = [task.result() for task in tasks]
                first = all_ranks[0]
                yield Tried(
                    first.collective, first.dtype, first.op, first.algorithms,
                    sum(each.wrong for each in all_ranks), sum(each.compared for each in all_ranks),
                )  # fmt: skip


def send_all_through_the_switch() -> None:
    """Change the tables of this process."""
    for operation in MULTIMEM:
        MULTIMEM[operation] = {2: 0, 8: 0}
    device_multimem.MULTIMEM_LL = {2: _PACKETS, 8: _PACKETS}


def measure(ranks: int, *, patience: float = PATIENCE) -> list[Tried]:
    """Run the self-test in another process.

    Args:
        ranks: How many; rank ``r`` gets GPU ``r``.
        patience: Seconds after which it is given up.

    Raises:
        CannotError: multicast cannot be used, by a switch or in the driver's words; or the process
            did not come to its end.
    """
    return [
        Tried(**{**each, "algorithms": tuple(each["algorithms"])})
        for each in json.loads(_said([str(ranks)], patience))
    ]


def probe(ranks: int, *, patience: float = PATIENCE) -> None:
    """Have a communicator that requires multicast made in another process, and closed.

    Args:
        ranks: How many; rank ``r`` gets GPU ``r``. Two at least.
        patience: Seconds after which it is given up.

    Raises:
        CannotError: as :func:`measure`.
    """
    _said([str(ranks), _PROBE], patience)


def _said(arguments: Sequence[str], patience: float) -> str:
    """The last line of the process."""
    command = [sys.executable, "-m", __name__, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        raise CannotError(f"the test of multicast did not end in {patience:g} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise CannotError(f"multicast could not be tested: {last}")
    return done.stdout.strip().rpartition("\n")[2]


def main(arguments: Sequence[str]) -> int:
    """The process: prints the results as one line of JSON, or why there are none."""
    ranks, probing = int(arguments[0]), arguments[1:] == [_PROBE]
    if not probing:
        send_all_through_the_switch()
    try:
        driver = select("cuda")
        comms = Communicator.in_process(
            ranks, devices=list(range(ranks)), driver=driver, timeout=_WAIT, multicast="require"
        )
        try:
            tried = () if probing else try_everything(comms, driver.make_current)
            results = [asdict(each) for each in tried]
        finally:
            for comm in comms:
                comm.close(force=True)
    except Error as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return 1
    sys.stdout.write(json.dumps(results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
