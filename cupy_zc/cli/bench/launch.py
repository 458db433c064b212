"""Starts the processes of a run: by ``multiprocessing``, or by ``mpiexec`` where MPI is measured.

Ranks of MPI that find each other later would not talk through shared memory, so MPI is measured
only among processes that its own launcher started. They come to a socket in a private folder.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from ..examples import mpiexec
from .worker import Plan, run

__all__ = ["LaunchError", "Launcher", "Spawned", "UnderMpi", "join"]

#: Seconds that mpiexec has to bring the ranks, and between two looks whether it still lives.
_PATIENCE, _LOOK = 60.0, 0.2
#: Seconds in which a killed process is gone.
_DEATH = 5.0
_STDERR = 2
_CREDENTIALS = struct.Struct("3i")


class LaunchError(Exception):
    """The processes could not be started; none is left."""


class Launcher(Protocol):
    """The processes of a run."""

    #: One for each rank.
    pipes: list[Connection]

    def start(self, plan: Plan) -> None:
        """Start all.

        Raises:
            LaunchError: that did not work.
        """
        ...

    def ended(self, rank: int) -> str:
        """How a rank ended whose pipe is closed, in words."""
        ...

    def unwell(self, until: float) -> list[int]:
        """Wait until a time for the ranks to end by themselves; those that did not end well."""
        ...

    def end(self) -> None:
        """Kill what still runs. Local and bounded."""
        ...


class Spawned:
    """Processes of :mod:`multiprocessing`."""

    def __init__(self) -> None:
        self.pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def start(self, plan: Plan) -> None:
        """See :class:`Launcher`."""
        context = multiprocessing.get_context("spawn")
        for rank in range(plan.ranks):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            with theirs:
                process = context.Process(target=run, args=(plan, rank, theirs), daemon=True)
                process.start()
            self._processes.append(process)

    def ended(self, rank: int) -> str:
        """See :class:`Launcher`."""
        self._processes[rank].join(timeout=1.0)
        return f"rank {rank} ended with exit code {self._processes[rank].exitcode}"

    def unwell(self, until: float) -> list[int]:
        """See :class:`Launcher`."""
        for process in self._processes:
            process.join(timeout=max(until - time.monotonic(), 0))
        return [rank for rank, process in enumerate(self._processes) if process.exitcode != 0]

    def end(self) -> None:
        """See :class:`Launcher`."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(timeout=_DEATH)
            with contextlib.suppress(ValueError):  # not dead yet: the system will see to it
                process.close()
        for pipe in self.pipes:
            pipe.close()


class UnderMpi:
    """Processes of ``mpiexec``. Which of them is which rank is the order in which they come."""

    def __init__(self) -> None:
        self.pipes: list[Connection] = []
        self._launcher: subprocess.Popen[bytes] | None = None
        #: Descriptors of the processes, so that a number that was given away is not killed.
        self._handles: list[int] = []

    def start(self, plan: Plan) -> None:
        """See :class:`Launcher`."""
        program = mpiexec()
        if program is None:
            raise LaunchError("there is no mpiexec: pip install 'cupy-zc[mpi]'")
        try:
            self._start(program, plan)
        except OSError as error:  # the socket, mpiexec, or a rank that has gone already
            self.end()
            raise LaunchError(f"{program}: {error}") from error
        except BaseException:
            self.end()
            raise

    def _start(self, program: str, plan: Plan) -> None:
        with (
            tempfile.TemporaryDirectory(prefix="cupy-zc-") as folder,  # of mode 0700
            socket.socket(socket.AF_UNIX) as door,
        ):
            path = str(Path(folder) / "door")
            door.bind(path)
            door.listen(plan.ranks)
            door.settimeout(_LOOK)
            code = "import sys; from cupy_zc.cli.bench.launch import join; join(sys.argv[1])"
            words = [program, "-n", str(plan.ranks), sys.executable, "-c", code, path]
            paths = os.pathsep.join(place or str(Path.cwd()) for place in sys.path)
            environment = {**os.environ, "PYTHONPATH": paths}
            # What mpiexec has to say about ranks that died is no part of a table.
            self._launcher = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=_STDERR
            )
            self._let_in(door, self._launcher, plan)
        for rank, pipe in enumerate(self.pipes):
            pipe.send((plan, rank))

    def _let_in(self, door: socket.socket, launcher: subprocess.Popen[bytes], plan: Plan) -> None:
        until = min(time.monotonic() + _PATIENCE, plan.deadline)
        while len(self.pipes) < plan.ranks:
            if launcher.poll() is not None:
                raise LaunchError(f"mpiexec ended with exit code {launcher.returncode}")
            if time.monotonic() > until:
                raise LaunchError(f"mpiexec brought {len(self.pipes)} of {plan.ranks} ranks")
            try:
                caller, _ = door.accept()
            except TimeoutError:
                continue
            about = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid: int = _CREDENTIALS.unpack(about)[0]
            caller.setblocking(True)
            self.pipes.append(Connection(caller.detach()))
            self._handles.append(os.pidfd_open(pid))

    def ended(self, rank: int) -> str:
        """See :class:`Launcher`."""
        return f"rank {rank} ended"

    def unwell(self, until: float) -> list[int]:
        """See :class:`Launcher`. mpiexec speaks for all of them."""
        assert self._launcher is not None
        try:
            code = self._launcher.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            code = None
        return [] if code == 0 else list(range(len(self.pipes)))

    def end(self) -> None:
        """See :class:`Launcher`."""
        if self._launcher is not None:  # first, or it would report its ranks as lost
            self._launcher.kill()
        for handle in self._handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        self._handles.clear()
        for pipe in self.pipes:
            pipe.close()
        if self._launcher is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the system will see to it
                self._launcher.wait(_DEATH)


def join(path: str) -> None:
    """The life of a process that mpiexec started: go to the socket, be told who one is, run."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(path)
        pipe = Connection(caller.detach())
    with pipe:
        if not pipe.poll(_PATIENCE):
            raise LaunchError("the run did not begin")
        plan, rank = pipe.recv()
        run(plan, rank, pipe)
