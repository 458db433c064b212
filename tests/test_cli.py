"""The frame of the command line: commands, exit codes, errors, colours; demo and selftest."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import cupy_zc
from cupy_zc.cli import demo, examples, selftest
from cupy_zc.cli.app import COMMANDS, cli
from cupy_zc.cli.examples import EXAMPLES, Example, facts
from cupy_zc.cli.output import Exit, console

ROOT = Path(__file__).parents[1]


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cupy_zc", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )


def test_the_module_is_the_program() -> None:
    done = process("--version")
    assert (done.returncode, done.stdout) == (0, f"cupy-zc {cupy_zc.__version__}\n")


def test_importing_the_package_imports_no_command_line() -> None:
    code = "import sys, cupy_zc; print([m for m in ('click', 'rich') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == Exit.OK
    assert "--json" in result.output


def test_the_help_lists_the_commands_and_the_exit_codes() -> None:
    output = CliRunner().invoke(cli, ["-h"]).output
    lines = output.split("Commands:")[1].splitlines()[1:][: len(COMMANDS)]
    assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert "3  the command could not do its work" in output


def test_a_command_that_does_not_exist_is_wrong_usage() -> None:
    result = CliRunner().invoke(cli, ["docter"])
    assert result.exit_code == Exit.USAGE
    assert "No such command 'docter'" in result.output


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (cupy_zc.Error("the pool is on fire"), "Error: the pool is on fire"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "Permission denied: '/x'"),
    ],
)
def test_errors_end_a_command_with_their_message(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command("fails")
    def fails() -> None:
        raise error

    monkeypatch.setattr(demo, "command", fails)
    result = CliRunner().invoke(cli, ["demo"])
    assert result.exit_code == Exit.CANNOT
    assert words in result.output
    assert "Traceback" not in result.output


def test_a_reader_that_leaves_is_no_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command("fails")
    def fails() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(demo, "command", fails)
    result = CliRunner().invoke(cli, ["demo"])
    assert (result.exit_code, result.output) == (1, "")


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command("fails")
    def fails() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(demo, "command", fails)
    assert isinstance(CliRunner().invoke(cli, ["demo"]).exception, ZeroDivisionError)


@pytest.mark.parametrize("verbose", [False, True])
def test_verbose_shows_the_log_of_the_package_and_of_nobody_else(verbose: bool) -> None:
    """It ends hundreds of lines of other packages, with none of ours among them."""
    code = (
        "import logging, click, sys; from cupy_zc.cli import app, demo\n"
        "def said():\n"
        "    logging.getLogger('cupy_zc').debug('of ours')\n"
        "    logging.getLogger('matplotlib').debug('of theirs')\n"
        "demo.command = click.command('said')(said)\n"
        "app.cli(sys.argv[1:])"
    )
    words = [*(["-v"] if verbose else []), "demo"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert ("cupy_zc DEBUG: of ours" in done.stderr) == verbose
    assert "of theirs" not in done.stderr


class Terminal:
    """A file that says it is a terminal."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal: Any = Terminal()
    console(terminal).print("x", style="red")
    assert "\x1b[31m" in terminal.text
    monkeypatch.setenv("NO_COLOR", "1")
    plain: Any = Terminal()
    console(plain).print("x", style="red")
    assert "\x1b[31m" not in plain.text
    monkeypatch.delenv("NO_COLOR")
    with (tmp_path / "out").open("w+") as file:
        console(file).print("x" * 130, style="red")
        file.seek(0)
        assert file.read() == "x" * 130 + "\n"


# demo


def test_a_demo_says_what_the_example_says(tmp_path: Path) -> None:
    done = process("demo", "leak", "--steps", "4", str(tmp_path / "leak.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 steps recorded")
    assert (tmp_path / "leak.json").exists()


def test_a_demo_as_json_has_the_facts() -> None:
    result = CliRunner().invoke(cli, ["demo", "-n", "2", "--json", "poisson", "--size", "9"])
    assert result.exit_code == Exit.OK, result.output
    said = json.loads(result.stdout)
    assert (said["example"], said["returncode"]) == ("poisson", 0)
    assert said["facts"]["ranks"].startswith("2, ")
    assert said["facts"]["against SciPy"].startswith("equal")


def test_a_demo_with_a_wrong_result_is_a_finding() -> None:
    words = ["demo", "-n", "1", "--json", "poisson", "--size", "9", "--iterations", "1"]
    assert CliRunner().invoke(cli, words).exit_code == Exit.FINDING


def test_wrong_arguments_of_an_example_are_wrong_usage() -> None:
    result = CliRunner().invoke(cli, ["demo", "--json", "leak", "--steps", "many"])
    assert result.exit_code == Exit.USAGE
    assert "invalid int value: 'many'" in result.output


def test_ranks_of_one_process_are_refused() -> None:
    result = CliRunner().invoke(cli, ["demo", "-n", "2", "pool"])
    assert result.exit_code == Exit.USAGE
    assert "-n 2: pool is one process" in result.output


def test_an_example_that_crashes_is_told_from_one_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crash = [sys.executable, "-c", "import os; os.abort()"]
    monkeypatch.setattr(Example, "command", lambda self, ranks, arguments: crash)
    result = CliRunner().invoke(cli, ["demo", "leak"])
    assert result.exit_code == Exit.CANNOT
    assert "the example ended with exit code -6" in result.output


def test_what_an_example_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needy = Example("pool_map.py", "", 2, (("no_such_module", "no-such-package"),))
    monkeypatch.setitem(EXAMPLES, "digits", needy)
    monkeypatch.setattr(examples, "mpiexec", lambda: None)
    result = CliRunner().invoke(cli, ["demo"])
    assert result.exit_code == Exit.CANNOT
    assert "needs no-such-package, mpiexec: pip install 'cupy-zc[examples,mpi]'" in result.output


def test_an_example_that_is_not_shipped_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXAMPLES, "pool", Example("gone.py", "", 1))
    result = CliRunner().invoke(cli, ["demo", "pool"])
    assert result.exit_code == Exit.CANNOT
    assert "there is no gone.py in " in result.output


def test_every_example_file_is_a_demo() -> None:
    files = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert {example.file for example in EXAMPLES.values()} == files


def test_the_launcher_of_this_python_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert examples.mpiexec() is None
    for folder in (tmp_path / "bin", tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / "mpiexec").touch(mode=0o755)
        assert examples.mpiexec() == str(folder / "mpiexec")


def test_facts_are_the_lines_of_two_columns() -> None:
    assert facts("a b      1, 2\nnothing here\n  c  3  4\n") == {"a b": "1, 2", "c": "3  4"}


# selftest


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Selftest with one example, of the given code."""

    def use(code: str, **about: Any) -> None:
        example = Example("pool_map.py", "", 1, **about)
        command = [sys.executable, "-c", code]
        monkeypatch.setattr(Example, "command", lambda self, ranks, arguments: command)
        monkeypatch.setattr(selftest, "EXAMPLES", {"one": example})

    return use


@pytest.mark.parametrize(
    ("code", "outcome", "reason", "exit_code"),
    [
        ("print(1)", "passed", "", Exit.OK),
        ("raise ValueError('bad')", "failed", "exit code 1: ValueError: bad", Exit.FINDING),
        ("print('DIFFERENT'); raise SystemExit(1)", "failed", "1: DIFFERENT", Exit.FINDING),
    ],
)
def test_selftest_says_what_came_out(
    one: Any, code: str, outcome: str, reason: str, exit_code: Exit
) -> None:
    one(code)
    result = CliRunner().invoke(cli, ["selftest", "--json"])
    (said,) = json.loads(result.stdout)
    assert said["outcome"] == outcome
    assert said["reason"].endswith(reason)
    assert result.exit_code == exit_code
    text = CliRunner().invoke(cli, ["selftest"])
    assert text.exit_code == exit_code
    assert text.stdout.startswith(f"{outcome:<8}  one ")


def test_selftest_gives_up_on_what_hangs(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_PATIENCE", 0.2)
    one("import time; time.sleep(60)")
    result = CliRunner().invoke(cli, ["selftest"])
    assert result.exit_code == Exit.FINDING
    assert "did not end in 0.2 s" in result.stdout


def test_an_example_that_cannot_be_started_is_a_failure_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Example, "command", lambda self, ranks, arguments: ["/nonexistent"])
    examples = {name: Example("pool_map.py", "", 1) for name in ("one", "two")}
    monkeypatch.setattr(selftest, "EXAMPLES", examples)
    result = CliRunner().invoke(cli, ["selftest"])
    assert result.exit_code == Exit.FINDING
    assert result.stdout.count("cannot be started") == 2


def test_selftest_names_what_it_could_not_run(one: Any) -> None:
    one("", needs=(("no_such_module", "no-such-package"),))
    result = CliRunner().invoke(cli, ["selftest"])
    assert result.exit_code == Exit.OK
    assert "not run" in result.stdout
    assert "no-such-package" in result.stdout


@pytest.mark.slow
def test_selftest_passes() -> None:
    result = CliRunner().invoke(cli, ["selftest", "--json"])
    assert {each["name"]: each["outcome"] for each in json.loads(result.stdout)} == dict.fromkeys(
        EXAMPLES, "passed"
    )
