"""Every block of Python in the README and in docs/*.md runs, or the page says why it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from snippets import PAGES, Snippet, snippets

MPIEXEC = Path(sys.executable).with_name("mpiexec")


def _parameter(snippet: Snippet) -> object:
    marks = []
    if snippet.marker:
        marks.append(getattr(pytest.mark, snippet.marker))
    if snippet.skipped:
        marks.append(pytest.mark.skip(reason=f"the page says: {snippet.skipped}"))
    return pytest.param(snippet, marks=marks, id=snippet.name)


ALL = [snippet for page in PAGES for snippet in snippets(page)]


def run(snippet: Snippet, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a block as its page says."""
    (folder / "work.py").write_text(snippet.code)
    start = [] if snippet.ranks == 1 else [str(MPIEXEC), "-n", str(snippet.ranks)]
    # A rank for each GPU is the real thing; where there are fewer, ranks run without one.
    driver = {} if snippet.ranks == 1 else {"CUPY_ZC_DRIVER": "host"}
    return subprocess.run(
        [*start, sys.executable, "-W", "error", "work.py"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**driver, **os.environ},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.mark.parametrize("snippet", [_parameter(each) for each in ALL])
def test_a_block_runs(snippet: Snippet, tmp_path: Path) -> None:
    result = run(snippet, tmp_path)
    assert result.returncode == 0, result.stderr


def test_a_rank_that_fails_fails_its_block(tmp_path: Path) -> None:
    code = "from mpi4py import MPI\nassert MPI.COMM_WORLD.rank == 0, 'rank one'\n"
    result = run(Snippet("page.md:1", code, ranks=2), tmp_path)
    assert result.returncode != 0
    assert "rank one" in result.stderr


def test_most_blocks_are_run() -> None:
    run = [snippet for snippet in ALL if not (snippet.skipped or snippet.marker)]
    assert len(run) >= 25
    assert len(run) >= 0.8 * len(ALL)


def test_blocks_on_ranks_are_found() -> None:
    assert {snippet.ranks for snippet in ALL} >= {1, 2}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Words, and nothing else.", ""),
        ("*Not run by the tests: it needs PyTorch.*", "it needs PyTorch"),
    ],
)
def test_the_line_above_a_block_says_whether_it_is_skipped(
    said: str, expected: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{said}\n\n```python\npass\n```\n")
    (snippet,) = snippets(page)
    assert (snippet.skipped, snippet.ranks, snippet.name) == (expected, 1, "page.md:6")


def test_the_line_above_a_block_says_on_how_many_ranks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("*Start it with `mpiexec -n 3 python work.py`:*\n\n```python\npass\n```\n")
    assert [snippet.ranks for snippet in snippets(page)] == [3]


def test_a_line_that_nobody_understands_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("*Needs a quantum computer:*\n\n```python\npass\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:4: nobody knows how to run this"):
        snippets(page)
