"""The commands that the README shows exist, and CI runs them."""

from __future__ import annotations

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
