"""Graphs of ranks that are processes: replays, deaths, and the end of a program."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import graph_processes as processes
import group_workers as workers
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def _spawned(n: int, target: Any, *args: Any, killed: tuple[int, ...] = ()) -> list[Any]:
    port = workers.free_port()
    reports = workers.in_processes("spawn", n, target, port, *args, killed=killed)
    for report in reports:
        assert report is None or report[0] == "value", report
    return [None if report is None else report[1] for report in reports]


def test_processes_with_other_histories_replay_zero_copy_and_harm_nobody() -> None:
    told = _spawned(3, processes.replay_with_temporaries)
    assert all(each["zero_copy"] and each["survived"] for each in told)
    assert [(each["left"], each["mapped"]) for each in told] == [(0, 2)] * 3  # of the heaps
    assert len({tuple(each["offsets"]) for each in told}) == 3


def test_what_a_capture_and_a_release_take() -> None:
    """The figures are 300 us and 1 ms on a machine that does nothing else."""
    told = _spawned(2, processes.figures)
    assert max(each["capture"] for each in told) < 3e-3, told
    assert max(each["release"] for each in told) < 1e-3, told


def test_a_rank_that_is_killed_in_a_capture_is_named_at_once_and_no_lease_stays() -> None:
    reports = _spawned(3, processes.be_killed_in_a_capture, 1, killed=(1,))
    for rank in (0, 2):
        assert reports[rank]["ranks"] == (1,)
        assert reports[rank]["seconds"] < 5
        assert reports[rank]["live"] == 0


def test_a_replay_whose_peer_closed_by_force_names_it_at_once() -> None:
    reports = _spawned(2, processes.be_closed_by_force, 1)
    assert reports[0]["kind"] == "PeerTimeoutError"
    assert reports[0]["ranks"] == (1,)
    assert reports[1]["kind"] == "ClosedError"
    assert max(report["seconds"] for report in reports) < 5


HOW = ("plain", "cycle", "capturing", "waiting", "raising")


@pytest.mark.parametrize(
    "how", [*HOW, *(pytest.param(how, marks=pytest.mark.slow) for how in HOW * 9)]
)
def test_a_program_ends_silently_with_live_graphs(how: str) -> None:
    port = workers.free_port()
    began = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", processes.__file__, str(rank), "2", str(port), how],
            env={**os.environ, "PYTHONPATH": str(ROOT), "CUPY_ZC_DRIVER": "host"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    assert said == ["", ""]
    assert [rank.returncode for rank in ranks] == [3 if how == "raising" else 0] * 2
    assert time.monotonic() - began < 30
