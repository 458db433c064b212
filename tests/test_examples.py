"""The examples do what docs/examples.md says, as real processes under mpiexec."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MPIEXEC = Path(sys.executable).with_name("mpiexec")
DIGITS = "data_parallel_digits.py"
POISSON = "conjugate_gradient.py"
GRAPH = "cuda_graph.py"
PAGE = (ROOT / "docs" / "examples.md").read_text()


def run(
    name: str, *arguments: object, ranks: int, folder: Path
) -> subprocess.CompletedProcess[str]:
    """An example on ``ranks`` ranks in a folder of its own; on the host driver if none is set."""
    command = [MPIEXEC, "-n", ranks, sys.executable, "-W", "error", ROOT / "examples" / name]
    return subprocess.run(
        [str(word) for word in (*command, *arguments)],
        cwd=folder,
        env={"CUPY_ZC_DRIVER": "host", **os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def report(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What an example printed, by the first column, after a look that all went well."""
    assert (result.returncode, result.stderr) == (0, "")
    lines = (re.split(r"\s{2,}", line, maxsplit=1) for line in result.stdout.splitlines())
    return {line[0]: line[1] for line in lines}


def number(pattern: str, text: str) -> float:
    """The one number that stands in ``text`` where the group of ``pattern`` is."""
    found = re.search(pattern, text)
    assert found, text
    return float(found[1].replace(",", ""))


def png_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG in pixels."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def _slow(ranks: int) -> Any:
    """A number of ranks between those that every run has: alone, and several of them."""
    return pytest.param(ranks, marks=pytest.mark.slow)


@pytest.mark.parametrize("ranks", [1, _slow(2), 4])
def test_the_digits_are_learnt_alike_on_any_number_of_ranks(ranks, tmp_path):
    said = report(run(DIGITS, "--steps", 150, "--plot", "curve.png", ranks=ranks, folder=tmp_path))
    assert said["ranks"].startswith(f"{ranks}, ")
    assert number(r"([\d.]+)%", said["test accuracy"]) > 95
    assert said["against one process"].startswith("equal")
    assert number(r"parameter ([\d.e+-]+),", said["against one process"]) <= 1e-4
    assert number(r"in (\d+) calls", said["all_reduce"]) == 150
    assert number(r"^([\d,]+) bytes", said["all_reduce"]) > 0
    assert said["zero-copy"] == "150 of 150 calls"
    assert number(r"([\d.]+) ms", said["time"]) > 0
    assert 2 < number(r"^([\d.]+) to", said["loss"]) < 3  # nothing learnt of ten classes: log(10)
    assert number(r"to ([\d.]+),", said["loss"]) < 0.2
    assert min(png_size(tmp_path / "curve.png")) > 100


def test_the_plot_is_in_the_current_folder_unless_told_otherwise(tmp_path):
    report(run(DIGITS, "--steps", 1, ranks=2, folder=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_another_seed_gives_another_course(tmp_path):
    losses = {
        report(run(DIGITS, "--steps", 1, "--seed", seed, ranks=1, folder=tmp_path))["loss"]
        for seed in (0, 1)
    }
    assert len(losses) == 2


def test_the_bar_is_shown_by_one_rank_and_only_where_it_is_asked_for(tmp_path):
    result = run(DIGITS, "--steps", 5, "--progress", ranks=2, folder=tmp_path)
    assert result.returncode == 0
    drawn = result.stderr
    assert "100%" in drawn.rpartition("training")[2]  # each redraw begins with that word
    assert drawn.count("\x1b[?25h") == 1  # the cursor is shown again after a bar
    assert "training" not in result.stdout


def test_no_steps_are_refused(tmp_path):
    result = run(DIGITS, "--steps", 0, ranks=1, folder=tmp_path)
    assert result.returncode == 2
    assert "--steps 0: expected at least 1" in result.stderr


@pytest.mark.parametrize("ranks", [1, _slow(2), 3, _slow(4)])
def test_the_plate_is_as_warm_as_scipy_says(ranks, tmp_path):
    said = report(run(POISSON, "--size", 33, ranks=ranks, folder=tmp_path))
    assert said["ranks"].startswith(f"{ranks}, ")
    iterations = number(r"^(\d+),", said["iterations"])
    assert 20 < iterations < 200
    assert number(r"residual ([\d.e+-]+)", said["iterations"]) <= 1e-10
    assert said["against SciPy"].startswith("equal")
    assert number(r"difference ([\d.e+-]+) of", said["against SciPy"]) <= 1e-6
    calls = number(r"of (\d+) calls", said["zero-copy"])
    assert number(r"^(\d+) of", said["zero-copy"]) == calls > iterations
    assert number(r"([\d.]+) ms", said["time"]) > 0


def test_ranks_with_a_single_row_are_no_special_case(tmp_path):
    said = report(run(POISSON, "--size", 4, ranks=4, folder=tmp_path))
    assert "[1, 1, 1, 1]" in said["grid"]
    assert said["against SciPy"].startswith("equal")


def test_a_plate_that_is_not_solved_is_a_failure(tmp_path):
    result = run(POISSON, "--size", 33, "--iterations", 3, ranks=2, folder=tmp_path)
    assert result.returncode == 1
    assert "DIFFERENT" in result.stdout


def test_more_ranks_than_rows_are_refused(tmp_path):
    result = run(POISSON, "--size", 1, ranks=2, folder=tmp_path)
    assert result.returncode == 2
    assert "--size 1: expected at least one row for each of 2 ranks" in result.stderr


@pytest.mark.parametrize("ranks", [1, _slow(2), 3])
def test_a_replayed_iteration_gives_the_bits_of_the_eager_one(ranks, tmp_path):
    said = report(run(GRAPH, "--size", 48, "--iterations", 120, ranks=ranks, folder=tmp_path))
    assert said["ranks"] == f"{ranks}, host engine"
    assert said["graph"].startswith("3 collectives, ")
    assert said["zero-copy"] == "yes, in every replay"
    assert said["replayed"].startswith("equal")
    assert number(r"^([\d.e+-]+) of", said["residual"]) < 1e-2
    assert number(r"eager ([\d.]+) ms", said["time"]) > 0
    assert number(r"replayed ([\d.]+) ms", said["time"]) > 0


def test_no_iterations_are_refused(tmp_path):
    result = run(GRAPH, "--iterations", 0, ranks=1, folder=tmp_path)
    assert result.returncode == 2
    assert "one iteration" in result.stderr


@pytest.mark.parametrize(("name", "ranks"), [(DIGITS, 4), (POISSON, 4), (GRAPH, 2)])
def test_the_page_and_the_file_show_the_same_command(name, ranks):
    command = f"mpiexec -n {ranks} python examples/{name}"
    assert command in PAGE
    assert command in (ROOT / "examples" / name).read_text()


def test_the_snippet_of_the_page_runs(tmp_path):
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "snippet.py").write_text(snippet)
    result = run(str(tmp_path / "snippet.py"), ranks=2, folder=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "".join(result.stdout.split()) == "TrueTrue"  # the ranks' lines may run into each other
