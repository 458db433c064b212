"""The device engine between processes: on one GPU that they share, and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import collective_processes as processes
import group_workers as workers
import pytest
from test_collectives_processes import spawned

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[1]
#: Processes that share a GPU take turns on it, which is slow; two GPUs are the real thing.
WORLDS = [
    pytest.param(2, id="two ranks on one GPU"),
    pytest.param(2, id="two GPUs", marks=pytest.mark.multi_gpu),
    pytest.param(4, id="four ranks on two GPUs", marks=pytest.mark.multi_gpu),
]


@pytest.fixture(autouse=True)
def _visible(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test without the marker ``multi_gpu`` sees one GPU."""
    if not request.node.get_closest_marker("multi_gpu"):
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first)


@pytest.mark.parametrize("register", ["auto", "manual"])
@pytest.mark.parametrize("n", WORLDS)
def test_ranks_of_a_tcp_store_do_everything(n: int, register: str) -> None:
    reports = spawned(n, processes.everything_over_tcp, register, "cuda")
    assert [told["rank"] for told in reports] == list(range(n))


@pytest.mark.parametrize("n", WORLDS)
def test_an_unchanged_script_runs_after_its_first_line_was_changed(n: int) -> None:
    for told in spawned(n, processes.unchanged_script, "cuda"):
        assert told["sums"] == [n * (n + 1) / 2] * 2
        assert told["operation"] == "send_recv"


@pytest.mark.parametrize("where", ["before", "message"])
@pytest.mark.parametrize("n", WORLDS)
def test_a_rank_that_is_killed_is_named_within_the_budget(n: int, where: str) -> None:
    options: dict[str, Any] = {"driver": "cuda", "timeout": 5.0}
    target = KilledOnGpu(options)
    reports = spawned(n, target, n - 1, where, killed=(n - 1,))
    for told in reports[:-1]:
        assert told["ranks"] == (n - 1,)
        assert told["seconds"] < 15


class KilledOnGpu:
    """``be_killed`` with options; a class, as it goes to other processes."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __call__(self, *args: Any) -> Any:
        return processes.be_killed(*args, **self.options)


@pytest.mark.multi_gpu
def test_each_process_may_see_one_gpu_in_any_order() -> None:
    port = workers.free_port()
    code = (
        "import json, sys; sys.path.insert(0, 'tests'); import collective_processes as p; "
        "rank, port = int(sys.argv[1]), int(sys.argv[2]); "
        "print(json.dumps(p.everything_over_tcp(rank, 2, port, 'auto', 'cuda')))"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(port)],
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(1 - rank), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(running):
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0
        assert json.loads(output)["rank"] == rank
