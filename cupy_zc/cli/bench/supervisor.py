"""The parent of a run: has a process started for each rank, hears them, ends them in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from .launch import Launcher, LaunchError, Spawned, UnderMpi
from .worker import Plan

__all__ = ["Outcome", "supervise"]

#: Seconds the ranks have to end by themselves after the last figure.
_FAREWELL = 20.0


class Outcome(Exception):  # noqa: N818  how a run ended, if not well
    """The run is over before its time; the message says why."""


class _Ranks:
    """What each process is at, and what all have asked."""

    def __init__(self, plan: Plan, launcher: Launcher) -> None:
        self._plan = plan
        self._launcher = launcher
        self._at = ["starting"] * plan.ranks

    def listen(self, hear: Callable[[str, Any], None]) -> None:
        """Pass messages on until every rank is done.

        Raises:
            Outcome: the deadline passed, or a rank ended before it was done.
        """
        asked: dict[int, object] = {}
        working = dict(enumerate(self._launcher.pipes))
        while working:
            left = self._plan.deadline - time.monotonic()
            ready = wait(list(working.values()), timeout=max(left, 0)) if left > 0 else []
            if not ready:
                raise Outcome(f"the deadline has passed; {self._whereabouts()}")
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
            self._launcher.pipes[rank].send(values)
        except ConnectionError:
            raise self._ended(rank) from None

    def _whereabouts(self) -> str:
        return "; ".join(f"rank {rank} was at: {at}" for rank, at in enumerate(self._at))

    def _ended(self, rank: int) -> Outcome:
        return Outcome(f"{self._launcher.ended(rank)} at: {self._at[rank]}")

    def farewell(self) -> list[int]:
        """Wait a while for the ranks to end; those that did not end well."""
        return self._launcher.unwell(min(time.monotonic() + _FAREWELL, self._plan.deadline))


def _start(plan: Plan, hear: Callable[[str, Any], None]) -> tuple[Plan, Launcher]:
    """Start the processes, by mpiexec where that is of use and works."""
    if plan.platform == "host" and "mpi" in plan.engines:
        under = UnderMpi()
        try:
            under.start(plan)
        except LaunchError as error:
            hear("unavailable", ("mpi", str(error)))
            others = tuple(name for name in plan.engines if name != "mpi")
            plan = replace(plan, engines=others)
        else:
            return plan, under
    spawned = Spawned()
    try:
        spawned.start(plan)
    except BaseException:
        spawned.end()
        raise
    return plan, spawned


def supervise(plan: Plan, hear: Callable[[str, Any], None]) -> list[int]:
    """Run a plan.

    Args:
        plan: What to measure.
        hear: Is told ``("about", dict)``, ``("unavailable", (engine, reason))``, ``("refused",
            (engine, collective, reason))``, ``("row", row)`` and, when a size of a collective is
            done, ``("step", words)``, as they come.

    Returns:
        Ranks that measured everything but did not close well; they have been ended.

    Raises:
        Outcome: the run did not come to its end; no process of it is left.
    """
    plan, launcher = _start(plan, hear)
    ranks = _Ranks(plan, launcher)
    try:
        ranks.listen(hear)
        return ranks.farewell()
    finally:
        launcher.end()
