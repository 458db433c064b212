"""Engines for the tests of the benchmark, which loads them by name, in processes of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, ClassVar

import numpy as np

from cupy_zc.cli.bench.api import Case, Context, Engine, Job, Unavailable, places


class Exact(Engine):
    """Sends everything through the parent: slow, and right."""

    platforms: ClassVar[tuple[str, ...]] = ("host",)

    def prepare(self, case: Case) -> Job:
        send, recv = (np.zeros(case.nbytes, np.uint8) for _ in range(2))
        given, taken = places(case, self.context.rank, send, recv)
        return Job(given, taken, lambda: self.move(case, given, taken))

    def move(self, case: Case, send: Any, recv: Any) -> None:
        rank, part = self.context.rank, case.part
        parts = self.context.group.all_gather(send)
        if not case.gets(rank):
            return
        if case.collective in ("all_gather", "gather"):
            recv[...] = np.concatenate(parts)
        elif case.collective == "broadcast":
            recv[...] = parts[case.root]
        elif case.collective == "scatter":
            recv[...] = parts[case.root][rank * part :][:part]
        elif case.collective == "send_recv":
            recv[...] = parts[rank ^ 1]
        elif case.collective == "all_to_all":
            recv[...] = np.concatenate([part_[rank * part :][:part] for part_ in parts])
        else:
            total = np.sum(parts, axis=0, dtype=case.type)
            scatters = case.collective == "reduce_scatter"
            recv[...] = total[rank * part :][:part] if scatters else total

    def versions(self) -> dict[str, str]:
        return {"exact": "1"}

    def close(self) -> None:
        pass


class Consuming(Exact):
    """Right once: its input is gone after a call."""

    keeps_input = False

    def move(self, case: Case, send: Any, recv: Any) -> None:
        super().move(case, send, recv)
        if not case.in_place:
            send[...] = 0


class Wrong(Exact):
    """One rank gets one element wrong."""

    def move(self, case: Case, send: Any, recv: Any) -> None:
        super().move(case, send, recv)
        if self.context.rank == 1:
            recv[3] += 1


class WrongInPlace(Exact):
    """Every rank gets two elements wrong, but only in place."""

    def move(self, case: Case, send: Any, recv: Any) -> None:
        super().move(case, send, recv)
        if case.in_place:
            recv[:2] -= 1


class Idle(Exact):
    """Writes nothing."""

    def move(self, case: Case, send: Any, recv: Any) -> None:
        self.context.group.barrier()


class Absent(Exact):
    """Not there on one rank."""

    @classmethod
    def probe(cls, context: Context) -> None:
        super().probe(context)
        if context.rank == 1:
            raise Unavailable("no such library")


class HalfMade(Exact):
    """One rank cannot make it; the other has to let go again."""

    def __init__(self, context: Context, shared: Any) -> None:
        super().__init__(context, shared)
        if context.rank == 0:
            raise OSError("out of descriptors")

    def close(self) -> None:
        sys.stdout.write("let go\n")


class Broken(Exact):
    """One rank cannot prepare anything."""

    def prepare(self, case: Case) -> Job:
        if self.context.rank == 1:
            raise RuntimeError("no memory")
        return Job(np.empty(case.send_count), np.empty(case.recv_count), lambda: None)


class Hanging(Exact):
    """One rank never comes back from a call."""

    def move(self, case: Case, send: Any, recv: Any) -> None:
        if self.context.rank == 1 and case.nbytes > 1024:
            time.sleep(600)
        super().move(case, send, recv)


class Dying(Exact):
    """One rank is killed."""

    def move(self, case: Case, send: Any, recv: Any) -> None:
        if self.context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().move(case, send, recv)


class Unclosable(Exact):
    """One rank fails at the very end."""

    def close(self) -> None:
        if self.context.rank == 1:
            os._exit(7)


class Environment(Exact):
    """Tells what a process that measures has in its environment."""

    def versions(self) -> dict[str, str]:
        from cupy_zc.config import MULTICAST_GUARDS, multicast_refusal

        guards = {name: os.environ.get(name, "") for name in MULTICAST_GUARDS}
        return guards | {"refusal": str(multicast_refusal())}
