"""How far calls of NCCL have come, as events tell it."""

from __future__ import annotations

from typing import Any

import pytest

from cupy_zc.collectives import nccl_trail
from cupy_zc.collectives.nccl_trail import MOST, Trail


class Stream:
    """Calls that end when a test says so."""

    def __init__(self) -> None:
        self.put = 0
        self.over = 0


class Event:
    def __init__(self, stream: Stream) -> None:
        self.record(stream)

    def record(self, stream: Stream) -> None:
        self.stream, self.at = stream, stream.put

    @property
    def done(self) -> bool:
        return self.stream.over >= self.at


class Driver:
    def __init__(self) -> None:
        self.events = 0

    def record_event(self, stream: Stream) -> Event:
        self.events += 1
        return Event(stream)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, for a test to set."""
    time = [100.0]
    monkeypatch.setattr(nccl_trail.time, "monotonic", lambda: time[0])
    return time


def made(trail: Trail, stream: Stream, calls: int = 1) -> None:
    for _ in range(calls):
        stream.put += 1
        trail.made(stream)


def test_a_call_runs_from_when_it_was_made_or_the_one_before_was_found_over(
    now: list[float],
) -> None:
    driver: Any = Driver()
    trail, stream = Trail(driver), Stream()
    assert trail.idle
    assert trail.since() is None
    made(trail, stream, 2)
    now[0] = 107.0
    assert not trail.idle
    assert trail.since() == 100.0
    stream.over = 1
    assert trail.since() == 107.0  # the second one could not begin before
    now[0] = 110.0
    assert trail.since() == 107.0
    stream.over = 2
    assert trail.idle
    assert trail.since() is None


def test_events_are_used_again_and_have_a_bound(now: list[float]) -> None:
    driver: Any = Driver()
    trail, stream = Trail(driver), Stream()
    for turn in range(5):
        made(trail, stream, 3 * MOST)
        assert trail.since() == now[0]
        stream.over = stream.put - 1  # the last of all
        assert not trail.idle
        assert trail.since() is not None
        stream.over = stream.put
        assert trail.idle
        assert trail.since() is None
        now[0] += 10 * turn
    assert driver.events <= MOST + 1
