"""How far calls have come, by events that a test ends."""

from __future__ import annotations

from typing import Any

import pytest

from cupy_zc.collectives import nccl_trail
from cupy_zc.collectives.nccl_trail import Trail


class _Event:
    def __init__(self, call: int) -> None:
        self.call = call
        self.done = False

    def record(self, call: int) -> _Event:
        self.call, self.done = call, False
        return self


class _Device:
    """Streams are numbers of calls here."""

    def __init__(self) -> None:
        self.events: list[_Event] = []

    def record_event(self, call: int) -> _Event:
        self.events.append(_Event(call))
        return self.events[-1]

    def end(self, calls: int) -> None:
        """The first calls are over."""
        for event in self.events:
            event.done = event.done or event.call < calls


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(nccl_trail.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(nccl_trail, "MOST", 8)
    return now


def trail_of(device: Any) -> Trail:
    return Trail(device)


def under_way(trail: Trail) -> list[int]:
    return [mark.event.call for mark in trail._marks]  # type: ignore[attr-defined]


def test_a_call_may_run_since_it_was_made_or_the_one_before_was_over(clock: list[float]) -> None:
    device = _Device()
    trail = trail_of(device)
    assert trail.idle
    assert trail.since() is None
    for call in range(3):
        clock[0] = float(call)
        trail.made(call)
    assert trail.since() == 0
    clock[0] = 10.0
    device.end(1)
    assert trail.since() == 10
    clock[0] = 12.0
    assert trail.since() == 10
    assert not trail.idle
    device.end(3)
    assert trail.idle
    assert trail.since() is None
    trail.made(3)
    assert trail.since() == 12
    assert len(device.events) == 3  # they are used again


def test_of_many_calls_those_that_are_over_are_forgotten_first(clock: list[float]) -> None:
    device = _Device()
    trail = trail_of(device)
    for call in range(8):
        trail.made(call)
    device.end(5)
    clock[0] = 3.0
    trail.made(8)
    assert under_way(trail) == [5, 6, 7, 8]
    assert trail.since() == 3


def test_of_many_calls_under_way_some_are_told_apart_and_the_last_is_one(
    clock: list[float],
) -> None:
    device = _Device()
    trail = trail_of(device)
    for call in range(100):
        clock[0] = float(call)
        trail.made(call)
        assert len(under_way(trail)) <= 8
        assert under_way(trail)[-1] == call
        assert under_way(trail) == sorted(under_way(trail))
    assert len(device.events) <= 9
    assert len(under_way(trail)) >= 4
    device.end(99)
    assert not trail.idle
    device.end(100)
    assert trail.idle
