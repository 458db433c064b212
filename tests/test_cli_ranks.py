"""``cupy-zc doctor --rank-table``: what ranks must have alike, compared under mpiexec."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cupy_zc.cli import ranks
from cupy_zc.cli.checks import Finding, Status
from cupy_zc.cli.output import Exit
from cupy_zc.errors import DriverError

ROOT = Path(__file__).parents[1]
MPIEXEC = Path(sys.executable).with_name("mpiexec")
NAMES = {"cupy_zc", "driver", "cupy", "cuda", "python", "multicast", "settings"}


def rank(**about: Any) -> dict[str, Any]:
    same = dict.fromkeys(NAMES, "x") | {"gpus": ["a", "b"], "current_device": 0, "visible": "all"}
    return same | about


def lines(said: list[dict[str, Any]], nodes: list[int] | None = None) -> dict[str, Finding]:
    found = ranks.compare(said, nodes or [0] * len(said))
    return {finding.name: finding for finding in found}


def test_ranks_that_are_alike_are_ok() -> None:
    found = lines([rank(), rank(current_device=1)])
    assert {finding.status for finding in found.values()} == {Status.OK}
    assert found.keys() == NAMES | {"visible GPUs", "current GPU"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_what_differs_is_named_with_its_ranks(name: str) -> None:
    line = lines([rank(), rank(**{name: "other"}), rank()])[name]
    assert line.status is not Status.OK
    assert "other" in line.found
    assert "1" in line.found
    assert line.means


def test_ranks_of_a_node_must_see_the_same_gpus() -> None:
    said = [rank(gpus=["a"], visible="0"), rank(gpus=["b"], visible="1")]
    line = lines(said)["visible GPUs"]
    assert line.status is Status.MISSING
    assert "CUDA_VISIBLE_DEVICES=1" in line.found
    assert lines(said, [0, 1])["visible GPUs"].status is Status.OK
    assert lines([rank(gpus=["b", "a"]), rank()])["visible GPUs"].status is Status.OK


def test_ranks_that_share_a_gpu_are_named() -> None:
    line = lines([rank(), rank(current_device=1), rank()])["current GPU"]
    assert (line.status, line.found) == (Status.LIMITED, "ranks 0, 2 have the same")
    assert lines([rank(gpus=[])])["current GPU"].found == "there is none"


def test_a_rank_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise DriverError("cuDriverGetVersion", "CUDA_ERROR_NO_DEVICE", 100)

    monkeypatch.setattr(ranks, "driver_version", fails)
    assert ranks.here()["cuda"] == "none"


def test_no_secret_is_sent_around(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "secret" not in json.dumps(ranks.here())


def started(number: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [MPIEXEC, "-n", number, sys.executable, "-m", "cupy_zc", "doctor", "--rank-table"]
    return subprocess.run(
        [str(word) for word in (*command, *words)],
        env={"CUPY_ZC_DRIVER": "host", **os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_rank_0_prints_the_table_once() -> None:
    done = started(3)
    assert done.returncode == Exit.OK, done.stderr
    table, _, rest = done.stdout.partition("\n\n")
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        ["0", "0"],
        ["1", "0"],
        ["2", "0"],
    ]
    assert rest.count("cupy_zc: equal on all ranks") == 1


def test_one_rank_is_told_to_bring_others_and_json_is_one_value() -> None:
    assert "one rank only: start several with mpiexec" in started(1).stdout
    said = json.loads(started(2, "--json").stdout)
    assert [each["node"] for each in said["ranks"]] == [0, 0]
    assert len({each["pid"] for each in said["ranks"]}) == 2


def test_ranks_that_differ_are_a_finding_on_all_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Finding("ranks", "driver", Status.MISSING, "0 has a, 1 has b", "no way", "alike")
    meant = Finding("ranks", "python", Status.LIMITED, "0 has a, 1 has b", "a hint")
    monkeypatch.setattr(ranks, "compare", lambda said, node_of: [bad, meant])
    assert ranks.rank_table(as_json=False) == Exit.FINDING
    said = capsys.readouterr().out
    assert "  missing driver: 0 has a, 1 has b\n            means: no way\n" in said
    assert "            do:    alike\n" in said
