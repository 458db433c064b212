from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import group_workers as workers

ROOT = Path(__file__).parents[1]


def _mpiexec(n: int, folder: Path, *arguments: str) -> list[Any]:
    command = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(n), sys.executable]
    script = str(Path(workers.__file__))
    done = subprocess.run(
        [*command, "-W", "error", script, arguments[0], str(folder), *arguments[1:]],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The mpich wheel counts at its end what a failed group could not free.
    said = [line for line in done.stderr.splitlines() if not line.startswith("MPICH: Builtin comm")]
    assert not said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(n)]


def test_ranks_of_mpi_do_everything_with_host_bytes_only(tmp_path: Path) -> None:
    outcomes = _mpiexec(4, tmp_path, "everything")
    for rank, outcome in enumerate(outcomes):
        assert outcome == json.loads(json.dumps(workers.expected(rank, 4)))


def test_a_rank_of_mpi_that_does_not_come_later_is_named(tmp_path: Path) -> None:
    outcomes = _mpiexec(3, tmp_path, "missing", "later")
    for outcome in outcomes[:2]:
        assert outcome["ranks"] == [2]
        assert "for rank 2" in outcome["text"]
        assert outcome["seconds"] < 5


def test_a_rank_of_mpi_that_never_joins_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    outcomes = _mpiexec(3, tmp_path, "missing", "first")
    for outcome in outcomes[:2]:
        assert outcome["ranks"] == []
        assert "a rank that cannot be told from here" in outcome["text"]
        assert outcome["seconds"] < 5


def test_what_mpi_cannot_do_is_refused(tmp_path: Path) -> None:
    (said,) = _mpiexec(1, tmp_path, "refusals")
    assert "mpi_comm is a int" in said["integer"]
    assert "intra-communicator" in said["null"]
    assert "MPI failed" in said["broken"]
    assert "cupy-zc[mpi]" in said["missing"]
