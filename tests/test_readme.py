"""What the README shows is run: its snippets here, its commands in CI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs(number):
    environment = os.environ | {"CUPY_ZC_DRIVER": os.environ.get("CUPY_ZC_DRIVER", "auto")}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", SNIPPETS[number]],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert result.returncode == 0, result.stderr


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
