"""Ranks that are threads of one process: how tests and notebooks put a group on one machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..errors import InvalidValueError
from .bootstrap import Bootstrap, Offer
from .waiting import Wait, gone

__all__ = ["in_process"]


class _Hub:
    """What the threads share. A call of the group is a slot that fills and is then read by all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.slots: dict[int, dict[int, Offer]] = {}
        self.read: dict[int, int] = {}
        self.gone: set[int] = set()
        self.parts: dict[tuple[int, int], _Hub] = {}

    def gather(self, rank: int, call: int, offer: Offer, wait: Wait) -> list[Offer]:
        with self.changed:
            slot = self.slots.setdefault(call, {})
            slot[rank] = offer
            self.changed.notify_all()
            while len(slot) < self.size:
                missing = set(range(self.size)) - slot.keys()
                if missing & self.gone:
                    raise gone(wait.what, missing & self.gone)
                wait.check(missing)
                self.changed.wait(wait.slice())
            self.read[call] = self.read.get(call, 0) + 1
            if self.read[call] == self.size:
                del self.slots[call], self.read[call]
            return [slot[peer] for peer in range(self.size)]

    def part(self, call: int, leader: int, size: int) -> _Hub:
        with self.changed:
            return self.parts.setdefault((call, leader), _Hub(size))

    def leave(self, rank: int) -> None:
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()


class _ThreadBootstrap(Bootstrap):
    def __init__(self, hub: _Hub, rank: int) -> None:
        super().__init__(rank, hub.size)
        self._hub = hub
        self._calls = 0

    def _gather(self, offer: Offer, wait: Wait) -> list[Offer]:
        self._calls += 1
        return self._hub.gather(self.rank, self._calls, offer, wait)

    def _join(self, members: Sequence[int], timeout: float | None) -> Bootstrap | None:  # noqa: ARG002
        self._calls += 1
        if not members:
            return None
        hub = self._hub.part(self._calls, members[0], len(members))
        return _ThreadBootstrap(hub, members.index(self.rank))

    def _leave(self, *, owner: bool) -> None:
        # In a forked child the lock may be held by a thread that does not exist there.
        if owner:
            self._hub.leave(self.rank)


def in_process(n: int) -> list[Bootstrap]:
    """A group of ``n`` ranks in this process; give one to each of ``n`` threads.

    Raises:
        InvalidValueError: ``n < 1``.
    """
    if n < 1:
        raise InvalidValueError("in_process", "n", n, "at least 1")
    hub = _Hub(n)
    return [_ThreadBootstrap(hub, rank) for rank in range(n)]
