"""NCCL between two GPUs, ranks as processes: what the double cannot tell."""

from __future__ import annotations

import re
from pathlib import Path

import collective_processes as processes
import nccl_workers as ranks
import pytest
from test_collectives_processes import spawned

pytest.importorskip("nccl.bindings", reason="nccl4py is not installed")

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu, pytest.mark.timeout(200)]

NODES_OF_ONE = pytest.param("1", "hierarchical", id="pretend nodes of one rank")
ONE_NODE = pytest.param("0", "nccl", id="NCCL")


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(("node_size", "backend"), [ONE_NODE, NODES_OF_ONE])
def test_every_collective_does_what_numpy_says(
    node_size: str, backend: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_ZC_NODE_SIZE", node_size)
    for told in spawned(2, ranks.matrix, backend, captured, 7 if captured else 2):
        assert told["backend"] == backend
        if backend == "nccl":
            modes = {("graph", True), ("local", True)} if captured else {("local", True)}
            assert modes <= set(map(tuple, told["told"]))


def test_a_group_is_split_by_color() -> None:
    assert spawned(2, ranks.split) == [[1.0, 3.0], [2.0, 3.0]]


def test_ranks_that_name_different_backends_all_learn_it() -> None:
    said = spawned(2, ranks.disagree)
    assert said[0] == said[1]
    assert said[0].startswith("MismatchError")


@pytest.mark.parametrize(("node_size", "backend"), [ONE_NODE, NODES_OF_ONE])
def test_a_rank_that_is_killed_ends_the_calls_of_the_others_within_the_timeout(
    node_size: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_ZC_NODE_SIZE", node_size)
    told = spawned(2, ranks.be_killed, backend, 4.0, killed=(1,))[0]
    assert told["said"].startswith(("PeerTimeoutError", "ClosedError")), told
    assert told["later"] == "ClosedError"
    assert told["seconds"] < 10
    assert told["after"] == 6


def test_close_never_waits_for_a_graph() -> None:
    for told in spawned(2, ranks.capture_and_close):
        assert told["registration"] == "graph"
        assert told["leases"] == 1
        assert "graph" in told["refused"]
        assert told["seconds, force=False"] < 15
        assert told["seconds, force=True"] < 15
        assert told["replayed"] in (2.0, 4.0)  # the input or half a sum is not among them


def test_more_ranks_than_gpus_are_refused_on_all_of_them() -> None:
    """NCCL connects no two ranks on one GPU, so 2 x 2 pretend nodes need four."""
    for said in spawned(4, ranks.one_of_many, "nccl"):
        assert said.startswith("AgreementError: connect with NCCL failed"), said


@pytest.mark.parametrize("ours", [True, False], ids=["memory of ours", "memory of CuPy"])
def test_the_log_of_nccl_says_that_memory_of_ours_is_registered(
    ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "REG")
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "log.%p"))
    modes = spawned(2, ranks.register_and_log, ours)
    log = "".join(path.read_text() for path in tmp_path.iterdir())
    registered = re.findall(r"IPC register(?:ing)? buffer 0x[0-9a-f]+ size", log)
    assert modes == (["local"] * 2 if ours else ["none"] * 2)
    assert bool(registered) is ours, log[-3000:]


def test_a_call_costs_the_host_little_more_than_nccl_does() -> None:
    """By half on a quick host and on a slow one: a bound in microseconds holds on one of them."""
    for told in spawned(2, ranks.host_cost):
        assert told["ours"] < 1.8 * told["NCCL"], told


@pytest.mark.parametrize("node_size", ["0", "1"], ids=["one node", "pretend nodes of one rank"])
def test_an_unchanged_script_runs_on_nodes_as_well(
    node_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_ZC_NODE_SIZE", node_size)
    for told in spawned(2, processes.unchanged_script, "cuda"):
        assert told["sums"] == [3.0, 3.0]
        assert told["operation"] == "send_recv"
