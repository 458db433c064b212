"""Processes on pretend nodes: the same programs as on one node, unchanged."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import collective_processes as processes
import pytest
from test_collectives_processes import spawned


@pytest.fixture(autouse=True)
def _pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_ZC_NODE_SIZE", "2")
    monkeypatch.setenv("CUPY_ZC_DRIVER", "host")


def test_four_nodes_of_two_do_everything() -> None:
    for told in spawned(8, processes.everything_over_tcp, "auto"):
        assert told["zero_copy"][-1]


def test_a_script_for_one_node_runs_unchanged() -> None:
    for rank, told in enumerate(spawned(4, processes.unchanged_script)):
        assert told["sums"] == [10.0, 10.0]
        assert told["rows"] == [400 * rank] * 2
        assert told["operation"] == "send_recv"


@pytest.mark.parametrize("where", ["before", "message"])
def test_a_rank_that_is_killed_is_missed_on_all_nodes(where: str) -> None:
    began = time.monotonic()
    reports = spawned(4, processes.be_killed, 2, where, killed=(2,))
    for rank, told in enumerate(reports):
        if rank != 2:
            assert told["seconds"] < 5
            assert where == "before" or told["ranks"] == (2,)
    assert time.monotonic() - began < 25


def test_the_example_trains_on_two_nodes_as_on_one(tmp_path: Path) -> None:
    cupy_zc = str(Path(sys.executable).with_name("cupy-zc"))
    done = subprocess.run(
        [cupy_zc, "demo", "digits"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "hierarchical engine" in done.stdout
