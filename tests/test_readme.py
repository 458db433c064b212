"""What the README shows is run: its snippets here, its commands in CI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_zc.cli.app import COMMANDS
from cupy_zc.cli.output import Exit

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CLI = (ROOT / "docs" / "cli.md").read_text()
SNIPPETS = [
    snippet
    for page in (README, CLI)
    for snippet in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
]


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs(number, tmp_path):
    environment = os.environ | {"CUPY_ZC_DRIVER": os.environ.get("CUPY_ZC_DRIVER", "auto")}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", SNIPPETS[number]],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr


def test_every_command_that_is_shown_exists():
    shown = {
        word
        for page in (README, CLI, (ROOT / "docs" / "examples.md").read_text())
        for word in re.findall(r"(?:^|`)cupy-zc ([a-z]\w+)", page, flags=re.MULTILINE)
    }
    assert {"doctor", "demo", "selftest", "view"} <= shown <= set(COMMANDS)


def test_every_command_and_every_exit_code_is_in_the_page():
    for command in COMMANDS:
        assert f"| `{command}` |" in CLI
    for code in Exit:
        assert f"| {code} |" in CLI


def test_every_link_of_the_pages_leads_somewhere():
    for folder, page in ((ROOT, README), (ROOT / "docs", CLI)):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page):
            assert (folder / target).is_file(), target


def test_there_are_snippets():
    assert len(SNIPPETS) >= 3


def test_every_make_command_exists():
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    assert {"demo", "test"} <= set(commands)
    for command in commands:
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE)


def test_ci_runs_the_commands_of_the_readme():
    ci = (ROOT / ".ci" / "run").read_text()
    assert "make demo" in ci
    assert "make test" in ci


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_an_example_runs_alone(example, tmp_path):
    result = subprocess.run(
        [sys.executable, "-W", "error", example],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout
