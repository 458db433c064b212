"""The parent of a run: starts a process for each rank, hears what they say, ends them in time."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from .worker import Plan, run

__all__ = ["Outcome", "supervise"]

#: Seconds the ranks have to end by themselves after the last figure.
_FAREWELL = 20.0


class Outcome(Exception):  # noqa: N818  how a run ended, if not well
    """The run is over before its time; the message says why.

    Args:
        message: What happened.
        late: Whether it was the deadline.
    """

    def __init__(self, message: str, *, late: bool) -> None:
        super().__init__(message)
        self.late = late


class _Ranks:
    """The processes, their pipes, and what each is at."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._at = ["starting"] * plan.ranks

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self._plan.ranks):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            with theirs:
                process = context.Process(target=run, args=(self._plan, rank, theirs), daemon=True)
                process.start()
            self._processes.append(process)

    def listen(self, hear: Callable[[str, Any], None]) -> None:
        """Pass messages on until every rank is done.

        Raises:
            Outcome: the deadline passed, or a rank ended before it was done.
        """
        asked: dict[int, object] = {}
        working = dict(enumerate(self._pipes))
        while working:
            left = self._plan.deadline - time.monotonic()
            ready = wait(list(working.values()), timeout=max(left, 0)) if left > 0 else []
            if not ready:
                raise Outcome(f"the deadline has passed; {self._whereabouts()}", late=True)
            for rank, pipe in list(working.items()):
                if pipe not in ready:
                    continue
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionError):
                    raise self._ended(rank) from None
                if kind == "gather":
                    asked[rank] = value
                elif kind == "begin":
                    self._at[rank] = value
                elif kind == "done":
                    del working[rank]
                else:
                    hear(kind, value)
            if len(asked) == self._plan.ranks:
                values = [asked[rank] for rank in range(self._plan.ranks)]
                for rank in range(self._plan.ranks):
                    self._answer(rank, values)
                asked.clear()

    def _answer(self, rank: int, values: list[object]) -> None:
        try:
            self._pipes[rank].send(values)
        except ConnectionError:
            raise self._ended(rank) from None

    def _whereabouts(self) -> str:
        return "; ".join(f"rank {rank} was at: {at}" for rank, at in enumerate(self._at))

    def _ended(self, rank: int) -> Outcome:
        process = self._processes[rank]
        process.join(timeout=1.0)
        return Outcome(
            f"rank {rank} ended with exit code {process.exitcode} at: {self._at[rank]}", late=False
        )

    def farewell(self) -> list[int]:
        """Wait a while for the ranks to end; those that did not end well."""
        until = min(time.monotonic() + _FAREWELL, self._plan.deadline)
        for process in self._processes:
            process.join(timeout=max(until - time.monotonic(), 0))
        return [rank for rank, process in enumerate(self._processes) if process.exitcode != 0]

    def end(self) -> None:
        """Kill what still runs. Local and bounded."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(timeout=5.0)
            with contextlib.suppress(ValueError):  # not dead yet: the system will see to it
                process.close()
        for pipe in self._pipes:
            pipe.close()


def supervise(plan: Plan, hear: Callable[[str, Any], None]) -> list[int]:
    """Run a plan.

    Args:
        plan: What to measure.
        hear: Is told ``("about", dict)``, ``("unavailable", (engine, reason))``, ``("refused",
            (engine, collective, reason))`` and ``("row", row)`` as they come.

    Returns:
        Ranks that measured everything but did not close well; they have been ended.

    Raises:
        Outcome: the run did not come to its end; no process of it is left.
    """
    ranks = _Ranks(plan)
    try:
        ranks.start()
        ranks.listen(hear)
        return ranks.farewell()
    finally:
        ranks.end()
