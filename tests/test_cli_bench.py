"""``cupy-zc bench`` on the host driver: table, plot, JSON lines, what is wrong, wrong usage."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cupy_zc.cli.app import cli
from cupy_zc.cli.bench import launch, listener, main, options, supervisor, table
from cupy_zc.cli.bench.api import COLLECTIVES, Case
from cupy_zc.cli.bench.report import Row, ceiling, figure, skipped
from cupy_zc.cli.bench.supervisor import Outcome
from cupy_zc.cli.bench.worker import Plan
from cupy_zc.cli.output import Exit
from cupy_zc.config import MULTICAST_GUARDS

ROOT = Path(__file__).parents[1]
EXACT, WRONG = "bench_engines:Environment", "bench_engines:WrongInPlace"
QUICK = ("--driver", "host", "-n", "2", "-w", "1", "--deadline", "60")


def bench(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program, as a user runs it: no guard in the environment."""
    kept = {name: value for name, value in os.environ.items() if name not in MULTICAST_GUARDS}
    paths = f"{ROOT}:{Path(__file__).parent}"
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "cupy_zc", "bench", *map(str, arguments)],
        env={**kept, "PYTHONPATH": paths, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def lines_of(text: str) -> list[list[str]]:
    """The lines of figures in nccl-tests' table, as words."""
    body = text.partition("\nall_reduce, us\n")[0]
    return [line.split() for line in body.splitlines() if line and not line.startswith("#")]


def test_the_table_is_that_of_nccl_tests_with_every_collective_in_and_out_of_place(
    tmp_path: Path,
) -> None:
    file, plot = tmp_path / "figures.jsonl", tmp_path / "bench.png"
    done = bench(
        *QUICK, "-b", "1K", "-e", "1K", "-c", "1", "-d", "float", "-g", "2", "-r", "1",
        "--collective", "all", "--against", "mpi", "--json", file, "--plot", plot,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    heads = [line.split() for line in done.stdout.splitlines() if line.startswith("#       size")]
    half = ["time", "algbw", "busbw", "#wrong"]
    left = ["#", "size", "count", "type", "redop", "root"]
    assert heads == [[*left, *half, *half, "engine"]] * len(COLLECTIVES)
    found = lines_of(done.stdout)
    assert [words[-1] for words in found] == ["cupy-zc", "mpi"] * len(COLLECTIVES)
    assert {tuple(words[3:5]) for words in found} == {
        ("sum", "-1"),
        ("none", "-1"),
        ("sum", "1"),
        ("none", "1"),
    }
    for words in found:
        assert (words[0], words[2], len(words)) == ("1024", "float32", 14)
        assert float(words[5]) > 0
        assert words[8] == "0"
        assert words[12] == "0" or (words[12], words[-1]) == ("N/A", "mpi")
    assert done.stdout.count("# Wrong elements : 0 OK") == len(COLLECTIVES)
    assert done.stdout.count("# Avg bus bandwidth : ") == 2 * len(COLLECTIVES)
    assert "mpi, reduce_scatter in place: not measured: in place, MPI leaves" in done.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["name"] for row in rows if row["metric"] == "ceiling"] == ["memory copy"]
    figures = {(r["engine"], r["collective"], r["in_place"]): r for r in rows if "us" in r}
    assert len(figures) == 2 * 2 * len(COLLECTIVES) - 1
    for row in figures.values():
        assert (row["metric"], row["ranks"], row["checked"]) == ("eager_us", 2, True)
        assert row["root"] in (None, 1)
        assert row["mpi"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 20_000


def test_wrong_elements_are_counted_and_every_rank_has_multicast_switched_off(
    tmp_path: Path,
) -> None:
    file, plot = tmp_path / "figures.jsonl", tmp_path / "bench.svg"
    done = bench(
        *QUICK, "-e", "4K", "--engines", f"{EXACT},{WRONG}", "--json", file, "--plot", plot
    )
    assert done.returncode == Exit.FINDING, done.stderr
    found = lines_of(done.stdout)
    assert [(words[0], words[8], words[12], words[-1]) for words in found] == [
        (size, "0", wrong, engine)
        for size in ("1024", "4096")
        for engine, wrong in ((EXACT, "0"), (WRONG, "4"))
    ]
    assert [words[9] for words in found if words[-1] == WRONG] == ["-", "-"]  # no figure
    assert "# Wrong elements : 8 FAILED" in done.stdout
    assert "WRONG: 2 wrong elements, the first at 0:" in done.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert sum(row.get("wrong", 0) for row in rows) == 8
    for row in rows[1:]:  # the first, a ceiling, was measured before there were engines
        assert {name: row[name] for name in MULTICAST_GUARDS} == dict(MULTICAST_GUARDS)
        assert row["refusal"] == "NCCL_NVLS_ENABLE=0"
    drawn = ET.parse(plot).getroot()
    assert drawn.tag.endswith("svg")
    assert len(list(drawn.iter())) > 100


# What needs no processes of ranks.


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-b", "0"], "'0' is not a size"),
        (["-b", "4"], "2 ranks of float32 need 8 bytes"),
        (["-e", "64"], "-e 64 B is less than -b 1 KiB"),
        (["-f", "1"], "1 is not in the range x>=2"),
        (["-n", "0"], "0 is not in the range x>=1"),
        (["-c", "maybe"], "'maybe' is not one of 'on', 'off', '1', '0'"),
        (["-d", "complex64"], "'complex64' is none of"),
        (["-o", "avg"], "'avg' is not one of"),
        (["-g", "2", "-r", "2"], "-r 2: there are 2 ranks"),
        (["--collective", "gossip"], "'gossip' is none of all_reduce"),
        (["--against", "ncll"], "'ncll' is none of cupy-zc"),
        (["--engines", "none"], "'none' is none of"),
        (["--engines", "mpi", "--against", "mpi"], "leave --against away"),
        (["--plot", "bench.pdf"], "'bench.pdf' ends neither in .png nor in .svg"),
        (["--plot", "/no/such/bench.png"], "there is no folder '/no/such'"),
        (["--deadline", "-1"], "'-1' is no positive number of seconds"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_wrong_usage_is_a_sentence_and_exit_code_2(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "supervise", lambda *_: pytest.fail("it started"))
    result = invoke("--driver", "host", *arguments)
    assert result.exit_code == Exit.USAGE
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_under_mpiexec_it_says_that_it_starts_its_ranks_itself(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "supervise", lambda *_: pytest.fail("it started"))
    monkeypatch.setenv(variable, "4")
    result = invoke("--driver", "host")
    assert result.exit_code == Exit.USAGE
    assert "it starts its ranks itself, -g 4" in result.output


@pytest.mark.parametrize("name", MULTICAST_GUARDS)
def test_an_environment_that_wants_multicast_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "supervise", lambda *_: pytest.fail("it started"))
    for other in MULTICAST_GUARDS:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "2")
    result = invoke("--driver", "host")
    assert result.exit_code == Exit.USAGE
    assert f"set {name}={MULTICAST_GUARDS[name]}, or unset it" in result.output


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(main, "supervise", lambda *_: pytest.fail("it started"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = invoke("--driver", "host", "--plot", str(tmp_path / "bench.png"))
    assert result.exit_code == Exit.CANNOT
    assert "pip install 'cupy-zc[plot]'" in result.output


def test_json_lines_on_standard_output_come_without_a_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = figure(Case("all_reduce", 1024, "float32", "sum", 2), "cupy-zc", "eager_us", [[3.0]], 1)
    monkeypatch.setattr(main, "supervise", _hear([row, row]))
    result = invoke("--driver", "host", "--json", "-")
    assert [json.loads(line)["us"] for line in result.stdout.splitlines()] == [3.0, 3.0]


def _hear(rows: list[Row]) -> Any:
    def supervise(plan: Any, hear: Any) -> list[int]:
        for row in rows:
            hear("row", row)
        hear("step", "all_reduce of 1 KiB")
        raise Outcome("the deadline has passed; rank 0 was at: timing")

    return supervise


def test_what_was_measured_before_the_deadline_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = figure(Case("all_reduce", 1024, "float32", "sum", 2), "cupy-zc", "eager_us", [[3.0]], 1)
    monkeypatch.setattr(main, "supervise", _hear([row | {"checked": False}]))
    plot = tmp_path / "bench.png"
    result = invoke("--driver", "host", "--against", "none", "--plot", str(plot))
    assert result.exit_code == Exit.CANNOT
    assert "stopped: the deadline has passed; rank 0 was at: timing" in result.output
    (line,) = lines_of(result.stdout)
    assert line[5:] == ["3.00", "0.34", "0.34", "N/A", "-", "-", "-", "N/A", "cupy-zc"]
    assert plot.exists()


def test_a_run_without_a_figure_writes_no_plot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(main, "supervise", _hear([]))
    plot = tmp_path / "bench.png"
    assert invoke("--driver", "host", "--plot", str(plot)).exit_code == Exit.CANNOT
    assert not plot.exists()


def test_a_plot_has_every_engine_and_the_ceiling(tmp_path: Path) -> None:
    from cupy_zc.cli.bench.plot import write_plot

    rows = [ceiling("kernel writes peer", 1, 390.0, 385.0)]
    for engine in ("cupy-zc", "nccl"):
        for in_place in (False, True):
            case = Case("all_gather", 4096, "float32", "sum", 2, 0, in_place)
            rows.append(figure(case, engine, "device_us", [[3.0], [4.0]], 20))
    rows.append(skipped(case, "broken", "device_us", "no memory"))
    file = tmp_path / "bench.svg"
    write_plot(rows, "two ranks", file)
    text = file.read_text()
    for words in ("cupy-zc", "nccl", "in place", "ceiling, 385 GB/s", "all_gather: bus bandwidth"):
        assert f"<!-- {words}" in text
    assert "<!-- broken" not in text


def _note(plans: list[Plan]) -> Callable[..., list[int]]:
    def supervise(plan: Plan, _: Any) -> list[int]:
        plans.append(plan)
        return []

    return supervise


def test_without_a_gpu_the_host_driver_is_measured_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> int:
        raise RuntimeError("cudaErrorNoDevice")

    plans: list[Plan] = []
    monkeypatch.setattr(options, "gpus", none)
    monkeypatch.setattr(options, "settings", lambda: type("S", (), {"driver": "auto"}))
    monkeypatch.setattr(main, "supervise", _note(plans))
    result = invoke()
    assert result.exit_code == Exit.OK
    assert "no GPU: the host driver is measured" in result.stderr
    (plan,) = plans
    assert (plan.platform, plan.ranks, plan.engines) == ("host", 2, ("cupy-zc", "mpi"))
    assert (plan.sizes[-1], plan.placements, plan.graph) == (16 << 20, (False, True), False)


def test_with_gpus_the_peers_are_nccl_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr(options, "gpus", lambda: 4)
    monkeypatch.setattr(options, "settings", lambda: type("S", (), {"driver": "auto"}))
    monkeypatch.setattr(main, "supervise", _note(plans))
    assert invoke("--graph").exit_code == Exit.OK
    (plan,) = plans
    assert (plan.platform, plan.ranks, plan.graph) == ("cuda", 4, True)
    torch = ("torch-one-shot", "torch-two-shot")
    assert plan.engines == ("cupy-zc", "nccl", "nccl-window", *torch)


def test_the_progress_bar_is_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listener._progress(3) is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = listener._progress(3)
    assert bar is not None
    assert [task.total for task in bar.tasks] == [3]


PLAN = Plan(
    ranks=2, platform="host", engines=("cupy-zc", "mpi"), collectives=(), sizes=(8,),
    iterations=1, warm_up=0, check=False, dtype="int32", op="sum", root=0, graph=False,
    placements=(False,), host_cost=False, deadline=1e12,
)  # fmt: skip


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("#!/bin/sh\nexit 7\n", "mpiexec ended with exit code 7"),
        ("#!/no/such/shell\n", "No such file or directory"),
        ("", "there is no mpiexec"),
    ],
)
def test_an_mpiexec_that_fails_costs_only_mpi(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mpiexec"
    program.write_text(script)
    program.chmod(0o755)
    heard: list[Any] = []
    monkeypatch.setattr(launch, "mpiexec", lambda: str(program) if script else None)
    monkeypatch.setattr(launch.Spawned, "start", lambda *_: None)
    left, _ = supervisor._start(PLAN, lambda *said: heard.append(said))
    ((kind, (engine, reason)),) = heard
    assert (kind, engine) == ("unavailable", "mpi")
    assert words in reason
    assert left.engines == ("cupy-zc",)


def test_ranks_that_mpiexec_does_not_bring_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mpiexec"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(launch, "mpiexec", lambda: str(program))
    monkeypatch.setattr(launch, "_PATIENCE", 0.3)
    monkeypatch.setattr(launch, "_DEATH", 0.3)
    under = launch.UnderMpi()
    with pytest.raises(launch.LaunchError, match="mpiexec brought 0 of 2 ranks"):
        under.start(PLAN)
    assert under._launcher is not None
    assert under._launcher.returncode == -9


@pytest.mark.slow
def test_ranks_of_mpiexec_that_hang_are_killed_at_the_deadline() -> None:
    done = bench(
        *("--driver", "host", "-n", "1", "-e", "4K", "--deadline", "6", "--no-in-place"),
        *("--engines", "mpi,bench_engines:Hanging"),
    )
    assert done.returncode == Exit.CANNOT
    assert "rank 1 was at: bench_engines:Hanging, all_reduce of 4,096 bytes" in done.stderr
    assert [words[-1] for words in lines_of(done.stdout)] == ["mpi", "bench_engines:Hanging"]
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert "cupy_zc.cli.bench.launch import join" not in left.stdout


def test_long_times_and_unchecked_results_fit_the_columns() -> None:
    case = Case("all_reduce", 1 << 30, "bfloat16", "sum", 2)
    row = figure(case, "cupy-zc", "eager_us", [[1234567.891]], 1) | {"checked": False}
    (line,) = table.lines([row])
    assert line.split()[5:9] == ["1234568", "0.87", "0.87", "N/A"]
    assert len(line) == 120 + len("  cupy-zc")
