"""The harness of collectives, as far as it goes without a GPU: real processes, fake engines.

It is run as ``benchmarks/collectives.py``, whose flags other people's notes use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import collectives

from cupy_zc.cli.bench import options
from cupy_zc.cli.bench.api import COLLECTIVES
from cupy_zc.cli.bench.engines import ENGINES
from cupy_zc.cli.bench.guard import guarded, overruled, unguarded
from cupy_zc.config import MULTICAST_GUARDS

ROOT = Path(__file__).parents[1]
GUARDS = dict(MULTICAST_GUARDS)
OWN = "cupy_zc.cli.bench.own:Registered"


def bench(*arguments, environment=GUARDS):
    """The program, as a user runs it."""
    kept = {name: value for name, value in os.environ.items() if name not in GUARDS}
    return subprocess.run(
        [sys.executable, "-W", "error", ROOT / "benchmarks" / "collectives.py", *arguments],
        env=kept | environment | {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def on_host(engines, *arguments, sizes=("1K", "1K"), collective="all_reduce"):
    """The program without a GPU, with engines of this file."""
    names = ",".join(
        name if name in ENGINES or ":" in name else f"bench_engines:{name}" for name in engines
    )
    return bench(
        *("--driver", "host", "--engines", names, "--collective", collective),
        *("-b", sizes[0], "-e", sizes[1], "-n", "2", "-w", "1", "--deadline", "50", *arguments),
    )


def rows_of(file):
    """The figures of a file, without the ceilings."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in rows if row["metric"] != "ceiling"]


@pytest.mark.parametrize("missing", [*GUARDS, None])
def test_it_does_not_start_unless_every_guard_is_set(missing):
    environment = {name: value for name, value in GUARDS.items() if name != missing}
    result = bench("--driver", "host", environment=environment if missing else {})
    assert (result.returncode, result.stdout) == (2, "")
    for name in [missing] if missing else GUARDS:
        assert f"{name}={GUARDS[name]}" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_with_another_value_does_not_count(name):
    flipped = {"0": "1", "1": "0"}[GUARDS[name]]
    assert unguarded(GUARDS | {name: flipped}) == [f"{name}={GUARDS[name]}"]
    assert unguarded(GUARDS) == []


def test_guards_are_set_for_a_while_and_then_as_they_were():
    name, other = list(GUARDS)[:2]
    environment = {name: GUARDS[name], other: "", "HOME": "/"}
    before = dict(environment)
    with guarded(environment):
        assert environment == before | GUARDS
    assert environment == before


def test_a_guard_that_is_not_set_is_not_overruled():
    name = next(iter(GUARDS))
    assert overruled({}) == []
    assert overruled({name: "2"}) == [f"{name}={GUARDS[name]}"]


def test_every_collective_is_measured_and_written_down(tmp_path):
    file = tmp_path / "figures.jsonl"
    result = on_host(
        ["Exact", "Consuming"],
        *("--json", file),
        sizes=("1K", "16K"),
        collective=",".join(COLLECTIVES),
    )
    assert result.returncode == 0, result.stderr
    rows = rows_of(file)
    figures = [(row["metric"], row["engine"], row["collective"], row["bytes"]) for row in rows]
    assert len(figures) == len(set(figures)) == len(COLLECTIVES) * 2 * (3 + 1)
    for row in rows:
        assert 0 < row["least_us"] <= row["us"] <= row["most_us"] or row["metric"] == "host_us"
        assert (row["ranks"], row["rounds"], row["exact"], row["driver"]) == (2, 7, "1", "host")
        assert row["calls"] == (2 if row["metric"] == "device_us" else 100)
        assert row["commit"]
        assert row["machine"]
        assert row["time"].endswith("Z")
    for name in COLLECTIVES:
        assert f"{name}, us\n" in result.stdout
    assert "eager call" in result.stdout


def test_figures_are_added_to_a_file(tmp_path):
    file = tmp_path / "figures.jsonl"
    file.write_text('{"metric": "before"}\n')
    assert on_host(["Exact"], "--json", file, "-c", "off").returncode == 0
    assert [row["metric"] for row in rows_of(file)] == ["before", "device_us", "host_us"]


@pytest.mark.parametrize(("engine", "words"), [("Wrong", "1 wrong elements"), ("Idle", "wrong")])
def test_a_wrong_result_is_no_figure_and_a_failure(engine, words, tmp_path):
    file = tmp_path / "figures.jsonl"
    result = on_host([engine, "Exact"], "--json", file)
    assert result.returncode == 1
    assert "WRONG" in result.stdout
    assert words in result.stderr
    wrong = [row for row in rows_of(file) if row["engine"].endswith(engine)]
    assert [("us" in row, row["correct"]) for row in wrong] == [(False, False)] * 2
    assert sum("us" in row for row in rows_of(file)) == 2  # the other engine's


def test_what_is_not_checked_is_not_found(tmp_path):
    assert on_host(["Wrong"], "-c", "off").returncode == 0


def test_an_engine_that_is_missing_on_one_rank_is_named_and_left_out():
    result = on_host(["Absent", "HalfMade", "nosuch:Engine", "Exact"])
    assert result.returncode == 0, result.stderr
    assert "Absent: not available: no such library (rank 1)" in result.stderr
    assert "HalfMade: not available: OSError: out of descriptors (rank 0)" in result.stderr
    assert "nosuch:Engine: not available: " in result.stderr
    assert result.stdout.count("let go") == 1
    assert "Exact" in result.stdout
    assert "Absent" not in result.stdout


def test_this_package_is_measured_as_often_as_it_is_named():
    result = on_host(["cupy-zc", OWN], collective=",".join(COLLECTIVES))
    assert (result.returncode, "WRONG" in result.stdout) == (0, False), result.stderr
    header = next(line for line in result.stdout.splitlines() if "to best peer" in line)
    assert header.split() == ["cupy-zc", OWN, "to", "best", "peer"]


def test_engines_that_need_a_gpu_say_so_without_one():
    result = on_host(["nccl", "nccl-window", "torch-one-shot", "cupy-zc-plain", "Exact"])
    assert result.returncode == 0, result.stderr
    for name in ("nccl", "nccl-window", "torch-one-shot", "cupy-zc-plain"):
        assert f"\n{name}: not available: " in f"\n{result.stderr}"


def test_a_case_that_fails_on_one_rank_is_skipped_on_all():
    result = on_host(["Broken", "Exact"])
    assert result.returncode == 0, result.stderr
    assert "not measured: RuntimeError: no memory (rank 1)" in result.stderr
    assert " - " in result.stdout


def test_at_the_deadline_all_processes_are_killed_and_figures_kept(tmp_path):
    file = tmp_path / "figures.jsonl"
    start = time.monotonic()
    result = on_host(["Exact", "Hanging"], "--json", file, "--deadline", "8", sizes=("1K", "4K"))
    assert time.monotonic() - start < 30
    assert result.returncode == 3
    assert "the deadline has passed" in result.stderr
    assert "rank 1 was at: bench_engines:Hanging, all_reduce of 4,096 bytes" in result.stderr
    assert {row["engine"].partition(":")[2] for row in rows_of(file)} == {"Exact", "Hanging"}
    assert "1 KiB" in result.stdout


def test_a_rank_that_dies_ends_the_run():
    result = on_host(["Dying"])
    assert result.returncode == 3
    assert "rank 1 ended with exit code -9 at: bench_engines:Dying" in result.stderr


def test_a_rank_that_does_not_close_is_told_and_costs_no_figure():
    result = on_host(["Unclosable"])
    assert result.returncode == 0
    assert "rank 1 measured everything but did not close" in result.stderr
    assert "Unclosable" in result.stdout


def test_wrong_usage_is_refused(monkeypatch, capsys):
    for name, value in GUARDS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:  # more of it in test_cli_bench.py
        collectives.main(["--driver", "host", "-d", "complex64"])
    assert caught.value.code == 2
    assert "'complex64' is none of" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "words"), [(2, "-g 3: there are 2 GPUs"), (0, "no usable GPU")])
def test_more_ranks_than_gpus_are_refused(gpus, words, monkeypatch, capsys):
    def count():
        if not gpus:
            raise RuntimeError("cudaErrorNoDevice")
        return gpus

    monkeypatch.setattr(options, "gpus", count)
    for name, value in GUARDS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        collectives.main(["-g", "3"])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_a_plan_takes_all_gpus_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(options, "gpus", lambda: 4)
    read = []

    @click.command()
    @options.flags
    def command(values):
        read.append(options.plan_of(values, 100.0))

    command(list(collectives.DEFAULTS), standalone_mode=False)
    (plan,) = read
    assert (plan.ranks, plan.platform, plan.deadline) == (4, "cuda", 380.0)
    assert plan.sizes == tuple(1024 * 4**step for step in range(11))
    assert plan.engines == tuple(ENGINES)
    assert plan.collectives == COLLECTIVES
    assert (plan.graph, plan.placements, plan.host_cost) == (True, (False,), True)
