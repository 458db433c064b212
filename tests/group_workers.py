"""Ranks for the tests of ``cupy_zc.group``: as threads, as processes, and under mpiexec."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cupy_zc.errors import Error, InvalidTypeError, PeerTimeoutError
from cupy_zc.group import (
    Bootstrap,
    Channel,
    Transaction,
    agree_equal,
    closing,
    discover,
    from_mpi,
    from_tcp,
    in_process,
)

#: Seconds after which a test that runs ranks has failed.
PATIENCE = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def in_threads(n: int, body: Callable[[int], Any]) -> list[Any]:
    """Run ``body(rank)`` in ``n`` threads; what each returned, or the exception it raised."""
    outcomes: list[Any] = [None] * n

    def run(rank: int) -> None:
        try:
            outcomes[rank] = body(rank)
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not stuck, f"ranks {stuck} did not end"
    return outcomes


def all_fine(outcomes: Sequence[Any]) -> Sequence[Any]:
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException):
            raise AssertionError(f"rank {rank} failed") from outcome
    return outcomes


@contextlib.contextmanager
def flat_descriptors() -> Iterator[None]:
    """Check that as many descriptors are open after a block as before it."""
    # What multiprocessing starts at its first use keeps a descriptor each.
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()
    before = open_descriptors()
    yield
    until = time.monotonic() + 5
    while open_descriptors() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert open_descriptors() <= before


def logged(caplog: Any, text: str) -> bool:
    """Whether a warning that holds ``text`` was logged."""
    return any(
        text in record.getMessage() and record.levelno == logging.WARNING
        for record in caplog.records
    )


def over_tcp(n: int) -> list[Bootstrap]:
    port = free_port()
    return list(all_fine(in_threads(n, lambda r: from_tcp(n, r, port=port, timeout=10))))


@contextlib.contextmanager
def half_a_group(secret: str = "") -> Iterator[int]:
    """Rank 0 of two, waiting; rank 1 joins at the end, and both must be fine."""
    port = free_port()
    outcome: list[Any] = []

    def wait() -> None:
        with from_tcp(2, 0, port=port, secret=secret, timeout=15) as bootstrap:
            outcome.append(bootstrap.all_gather(b"0"))

    thread = threading.Thread(target=wait)
    thread.start()
    until = time.monotonic() + 5
    while time.monotonic() < until:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            break
    try:
        yield port
        with from_tcp(2, 1, port=port, secret=secret, timeout=10) as bootstrap:
            assert bootstrap.all_gather(b"1") == [b"0", b"1"]
    finally:
        thread.join(20)
    assert outcome == [[b"0", b"1"]]


def on_all(opened: Sequence[Channel], call: Callable[[Channel], Any]) -> list[Any]:
    return in_threads(len(opened), lambda r: call(opened[r]))


@contextlib.contextmanager
def files(contents: Sequence[bytes]) -> Iterator[list[int]]:
    """Descriptors of unnamed files that hold these bytes."""
    fds: list[int] = []
    try:
        for content in contents:
            fds.append(os.memfd_create("content", os.MFD_CLOEXEC))
            os.pwrite(fds[-1], content, 0)
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


@contextlib.contextmanager
def channels(n: int) -> Iterator[list[Channel]]:
    """Channels of ``n`` ranks of this process."""
    group = in_process(n)

    def open_one(rank: int) -> Channel:
        return Channel.open(group[rank], discover(group[rank]), timeout=10)

    opened = all_fine(in_threads(n, open_one))
    try:
        yield list(opened)
    finally:
        for item in (*opened, *group):
            item.close()


def _report(pipe: Any, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send(("value", target(*args)))
    except Error as error:
        ranks = getattr(error, "ranks", None)
        pipe.send(("error", type(error).__name__, str(error), ranks))


def in_processes(
    method: str, n: int, target: Callable[..., Any], *args: Any, killed: Sequence[int] = ()
) -> list[Any]:
    """Run ``target(rank, n, *args)`` in ``n`` processes; their reports, None of a killed one."""
    context = multiprocessing.get_context(method)
    pipes, processes = [], []
    for rank in range(n):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_report, args=(theirs, target, (rank, n, *args)))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    until = time.monotonic() + PATIENCE
    try:
        outcomes = []
        for rank, pipe in enumerate(pipes):
            ready = pipe.poll(max(0.0, until - time.monotonic()))
            assert ready, f"rank {rank} did not report"
            try:
                outcomes.append(pipe.recv())
            except EOFError:
                assert rank in killed, f"rank {rank} died"
                outcomes.append(None)
        return outcomes
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
            process.close()
        for pipe in pipes:
            pipe.close()


def use_everything(bootstrap: Bootstrap) -> dict[str, Any]:
    """Every call of the room once; ranks of any kind of bootstrap must come to the same result."""
    rank, size = bootstrap.rank, bootstrap.size
    before = open_descriptors()
    gathered = bootstrap.all_gather(b"x" * (1000 * rank), tag="lengths")
    big = bootstrap.all_gather(bytes([rank]) * (3 << 20), tag="big")
    told = bootstrap.broadcast(b"from the last" if rank == size - 1 else None, size - 1)
    part = bootstrap.split(rank % 2, -rank)
    loner = bootstrap.split(None if rank else 7)
    assert part is not None
    assert (loner is None) == (rank > 0)
    with part:
        partners = part.all_gather(str(rank).encode())
        half = part.split(0)
        assert half is not None
        with half:
            same = half.all_gather(str(rank).encode())
    if loner is not None:
        with loner:
            assert loner.all_gather(b"alone") == [b"alone"]
    topology = discover(bootstrap)
    with Channel.open(bootstrap, topology) as channel:
        fd = os.memfd_create("shared", 0)
        os.pwrite(fd, f"memory of {rank}".encode(), 0)
        messages = channel.exchange(str(rank).encode(), [fd], tag="memory")
        os.close(fd)
        with closing(messages):
            seen = [os.pread(m.fds[0], 99, 0).decode() for m in messages if m.fds]
        agree_equal(channel, "size", size)
        with Transaction(channel) as transaction:
            value = transaction.step("take a number", lambda: rank)
            transaction.commit()
    bootstrap.barrier()
    return {
        "lengths": list(map(len, gathered)),
        "big": [item == bytes([peer]) * (3 << 20) for peer, item in enumerate(big)],
        "told": told.decode(),
        "partners": [item.decode() for item in partners],
        "same": partners == same,
        "nodes": topology.nodes,
        "seen": seen,
        "value": value,
        "leaked": max(0, open_descriptors() - before),
    }


def expected(rank: int, size: int) -> dict[str, Any]:
    return {
        "lengths": [1000 * peer for peer in range(size)],
        "big": [True] * size,
        "told": "from the last",
        "partners": [str(peer) for peer in range(size - 1, -1, -1) if peer % 2 == rank % 2],
        "same": True,
        "nodes": (tuple(range(size)),),
        "seen": [f"memory of {peer}" for peer in range(size) if peer != rank],
        "value": rank,
        "leaked": 0,
    }


def everything_over_tcp(rank: int, size: int, port: int) -> dict[str, Any]:
    with from_tcp(size, rank, port=port, secret="a secret", timeout=20) as bootstrap:
        return use_everything(bootstrap)


def be_killed_between_gathers(rank: int, size: int, port: int, victim: int) -> None:
    with from_tcp(size, rank, port=port, timeout=20) as bootstrap:
        bootstrap.barrier()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        bootstrap.barrier(timeout=20)


def be_killed_between_exchanges(rank: int, size: int, port: int, victim: int) -> None:
    with (
        from_tcp(size, rank, port=port, timeout=20) as bootstrap,
        Channel.open(bootstrap, discover(bootstrap)) as channel,
    ):
        channel.exchange(b"")
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        channel.exchange(b"", timeout=20)


class _Watched:
    """A communicator that takes host bytes by the buffer calls, and nothing else."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self.Get_rank, self.Free = comm.Get_rank, comm.Free
        self.bytes = 0

    def _check(self, buffer: Any) -> Any:
        import numpy as np

        array, kind = buffer
        assert type(array) is np.ndarray
        assert array.dtype == np.uint8
        assert kind == self._mpi.BYTE
        self.bytes += array.nbytes
        return buffer

    def Isend(self, buffer: Any, *place: int) -> Any:  # noqa: N802
        return self._comm.Isend(self._check(buffer), *place)

    def Irecv(self, buffer: Any, *place: int) -> Any:  # noqa: N802
        return self._comm.Irecv(self._check(buffer), *place)


def mpi_everything() -> dict[str, Any]:
    from mpi4py import MPI

    with from_mpi() as bootstrap:
        bootstrap._shared.comm = watched = _Watched(MPI, bootstrap._shared.comm)
        result = use_everything(bootstrap)
        assert watched.bytes > 0
    part = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    with from_mpi(part) as bootstrap:
        assert bootstrap.size == part.size
        bootstrap.barrier()
    part.Free()
    return result


def mpi_refusals() -> dict[str, Any]:
    """What goes wrong in one process."""
    from mpi4py import MPI

    said = {}
    for name, wrong in (("integer", 3), ("null", MPI.COMM_NULL)):
        try:
            from_mpi(wrong)
        except InvalidTypeError as error:
            said[name] = str(error)

    class _Broken:
        def Get_rank(self) -> int:  # noqa: N802
            return 0

        def Irecv(self, *_: Any) -> None:  # noqa: N802
            raise MPI.Exception(MPI.ERR_OTHER)

    from cupy_zc.group.bootstrap_mpi import _MpiBootstrap, _Shared

    try:
        _MpiBootstrap(_Shared(MPI, _Broken()), [0, 1], 0).barrier()
    except Error as error:
        said["broken"] = str(error)
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    try:
        from_mpi()
    except Error as error:
        said["missing"] = str(error)
    return said


def mpi_missing(when: str) -> dict[str, Any]:
    """The last rank comes to nothing: not to the first call, or not to a later one."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    last = world.size - 1
    began = time.monotonic()
    said: dict[str, Any] = {}
    if when == "later" or world.rank != last:
        try:
            bootstrap = from_mpi(timeout=20 if when == "later" else 0.5)
            if world.rank != last:
                bootstrap.all_gather(b"", timeout=0.5)
            said["joined"] = True
        except PeerTimeoutError as error:
            said = {"text": str(error), "ranks": error.ranks}
    said["seconds"] = time.monotonic() - began
    world.Barrier()
    if when == "first" and world.rank == last:
        from_mpi(timeout=20)  # now it comes, so that MPI can end in order
    world.Barrier()
    return said


if __name__ == "__main__":
    job, folder, *rest = sys.argv[1:]
    outcome = {"everything": mpi_everything, "refusals": mpi_refusals, "missing": mpi_missing}[job](
        *rest
    )
    from mpi4py.MPI import COMM_WORLD

    Path(folder, f"{COMM_WORLD.rank}.json").write_text(json.dumps(outcome))
