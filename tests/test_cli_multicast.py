"""``cupy-zc selftest --multicast``: what is printed, and that it says why where it cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from cupy_zc.cli import selftest
from cupy_zc.cli.app import cli
from cupy_zc.cli.checks import switch
from cupy_zc.cli.checks.switch import Tried
from cupy_zc.cli.output import CannotError, Exit
from cupy_zc.collectives import device_multimem
from cupy_zc.errors import DriverError

FINE = Tried("all_reduce", "float32", "sum", ("multimem_ll", "multimem"), 0, 4032)
WRONG = Tried("reduce_scatter", "int64", "max", ("multimem",), 3, 4032)
ELSEWHERE = Tried("broadcast", "uint8", "none", ("multimem", "push"), 0, 4032)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with GPUs on which the test of multicast gives these results."""

    def use(count: int, *results: Tried) -> list[int]:
        asked: list[int] = []
        monkeypatch.setattr(
            selftest, "select", lambda name: SimpleNamespace(device_count=lambda: count)
        )
        monkeypatch.setattr(selftest, "measure", lambda ranks: asked.append(ranks) or results)
        return asked

    return use


@pytest.mark.parametrize(
    ("results", "words", "exit_code"),
    [
        ([FINE], ["passed", "0 of 4,032 wrong", "multimem_ll, multimem"], Exit.OK),
        ([FINE, WRONG], ["failed    reduce_scatter  int64", "3 of 4,032"], Exit.FINDING),
        ([ELSEWHERE], ["failed", "multimem, push"], Exit.FINDING),
    ],
)
def test_the_report_has_a_line_for_each_kind_of_call(
    gpus: Any, results: list[Tried], words: list[str], exit_code: Exit
) -> None:
    asked = gpus(4, *results)
    result = CliRunner().invoke(cli, ["selftest", "--multicast"])
    assert result.exit_code == exit_code
    assert "cupy-zc: " in result.stdout  # versions, for a report that is pasted
    assert all(word in result.stdout for word in words)
    shown = CliRunner().invoke(cli, ["selftest", "--multicast", "--json", "-n", "3"])
    assert shown.exit_code == exit_code
    said = json.loads(shown.stdout)
    assert [each["wrong"] for each in said["results"]] == [each.wrong for each in results]
    assert any(line.startswith("CuPy") for line in said["machine"])
    assert asked == [4, 3]


@pytest.mark.parametrize(("count", "ranks"), [(1, []), (4, ["-n", "5"]), (0, [])])
def test_a_rank_without_a_gpu_is_told(gpus: Any, count: int, ranks: list[str]) -> None:
    assert gpus(count) == []
    result = CliRunner().invoke(cli, ["selftest", "--multicast", *ranks])
    assert result.exit_code == Exit.CANNOT
    assert f"there are {count}" in result.stderr


def test_a_machine_without_a_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise DriverError("cuInit", "CUDA_ERROR_NO_DEVICE", 100)

    monkeypatch.setattr(selftest, "select", refuse)
    result = CliRunner().invoke(cli, ["selftest", "--multicast"])
    assert result.exit_code == Exit.CANNOT
    assert "multicast needs GPUs: cuInit" in result.stderr


def process(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """What runs in the place of the process that measures."""
    start = subprocess.run
    monkeypatch.setattr(
        switch.subprocess,
        "run",
        lambda command, **about: start([sys.executable, "-c", code], **about),
    )


def test_results_come_from_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"algorithms": ["multimem"], "collective": "broadcast", "dtype": "uint8", "op": "none"}
    said = json.dumps([line | {"wrong": 0, "compared": 9}])
    process(monkeypatch, f"print('noise'); print({said!r})")
    assert switch.measure(4) == [Tried("broadcast", "uint8", "none", ("multimem",), 0, 9)]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit('NCCL_NVLS_ENABLE=0 switches it off')", "NVLS_ENABLE=0 switches"),
        ("import os; os._exit(9)", "exit code 9"),
        ("import time; time.sleep(60)", "did not end in 0.5 s"),
    ],
)
def test_a_process_without_results_is_told_in_its_words(
    monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    process(monkeypatch, code)
    with pytest.raises(CannotError) as caught:
        switch.measure(2, patience=0.5 if "sleep" in code else 60)
    assert words in caught.value.message


def test_the_process_says_why_where_there_is_no_gpu() -> None:
    code = "import sys; from cupy_zc.cli.checks.switch import main; sys.exit(main(['2']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 1
    assert "cuInit" in done.stderr
    assert done.stdout == ""


def test_a_probe_is_a_communicator_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(
        switch.subprocess,
        "run",
        lambda command, **_: (
            asked.append(command) or SimpleNamespace(returncode=0, stdout="[]\n", stderr="")
        ),
    )
    switch.probe(4)
    assert asked[0][-2:] == ["4", "probe"]
    made: list[dict[str, Any]] = []
    closed: list[bool] = []
    comm = SimpleNamespace(close=lambda force: closed.append(force))
    monkeypatch.setattr(switch, "select", lambda name: SimpleNamespace(make_current=None))
    monkeypatch.setattr(
        switch.Communicator, "in_process", lambda n, **options: made.append(options) or [comm] * n
    )
    before = dict(device_multimem.MULTIMEM)
    assert switch.main(["4", "probe"]) == 0
    assert (made[0]["multicast"], made[0]["devices"]) == ("require", [0, 1, 2, 3])
    assert closed == [True] * 4
    assert before == device_multimem.MULTIMEM
