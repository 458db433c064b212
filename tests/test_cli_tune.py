"""``cupy-zc bench --tune``: thresholds from figures, the file, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import group_workers
import pytest
from click.testing import CliRunner
from device_ranks import device
from emulated_driver import EmulatedDriver
from hypothesis import given
from hypothesis import strategies as st

from cupy_zc import Communicator, InvalidValueError
from cupy_zc.cli.app import cli
from cupy_zc.cli.bench import main, tuning
from cupy_zc.cli.bench.api import Case
from cupy_zc.cli.bench.tuning import FORCED, LINES, PUSH, SHOTS, TWO_STEPS, thresholds, write
from cupy_zc.cli.output import Exit
from cupy_zc.collectives.device_plan import device_plan
from cupy_zc.collectives.device_tables import MOST, Tables, load_tables
from cupy_zc.collectives.plan import Operation

__all__ = ["device"]  # a fixture

SIZES = [1 << power for power in range(10, 27)]


def rows(collective: str, **models: tuple[float, float]) -> list[dict[str, Any]]:
    """Figures of engines that take so long, and so long for each MiB."""
    names = dict(zip(("lines", "two_steps", "shots", "push"), FORCED, strict=True))
    return [
        {
            "metric": "device_us", "collective": collective, "bytes": size, "engine": names[kind],
            "us": fixed + each * size / (1 << 20),
        }
        for size in SIZES
        for kind, (fixed, each) in models.items()
    ]  # fmt: skip


def test_thresholds_are_where_one_algorithm_overtakes_another() -> None:
    figures = [
        *rows("all_reduce", lines=(2, 4), shots=(8, 3), push=(20, 2)),  # 6 MiB, 12 MiB
        *rows("reduce_scatter", lines=(2, 4), shots=(4, 3), push=(12, 2)),  # 2 MiB, 8 MiB
        *rows("all_gather", lines=(2, 4), shots=(5, 3)),  # 3 MiB
        *rows("broadcast", lines=(2, 4), shots=(22, 3)),  # 20 MiB
    ]
    assert thresholds(figures, 2) == {
        "ll128_one_step": {"2": 4 << 20},
        "ll128_two_steps": {"2": 4 << 20},
        "ll128_reduce_scatter": {"2": 1 << 20},  # of rows, which are half of a buffer
        "ll128_broadcast": {"2": 16 << 20},
        "ll128_row": {"2": 1 << 20},
        "push_reduce": {"2": 16 << 20},
        "push_reduce_scatter": {"2": 4 << 20},
    }


def test_two_steps_take_over_from_one_where_they_are_ahead() -> None:
    figures = [
        *rows("all_reduce", lines=(2, 8), two_steps=(4, 4), shots=(12, 3), push=(99, 3)),
        *rows("reduce_scatter", lines=(2, 1), shots=(4, 1), push=(9, 9)),
        *rows("all_gather", lines=(2, 1), shots=(4, 1)),
    ]
    found = thresholds(figures, 4)
    assert found["ll128_one_step"] == {"4": 1 << 19}
    assert found["ll128_two_steps"] == {"4": 8 << 20}
    assert found["push_reduce"] == found["push_reduce_scatter"] == {"4": MOST}  # never ahead
    assert found["ll128_row"] == found["ll128_reduce_scatter"] == {"4": SIZES[-1] // 4}
    assert found["ll128_broadcast"] == {"4": 0}  # not measured


@given(st.lists(st.tuples(*[st.floats(1, 9)] * 4), min_size=17, max_size=17), st.integers(2, 8))
def test_any_figures_give_tables_that_can_be_loaded(
    times: list[tuple[float, ...]], ranks: int
) -> None:
    figures = [
        {"metric": "device_us", "collective": name, "bytes": size, "engine": engine, "us": us}
        for name in tuning.COLLECTIVES
        for size, row in zip(SIZES, times, strict=True)
        for engine, us in zip((LINES, TWO_STEPS, SHOTS, PUSH), row, strict=True)
        if engine != LINES
        or size // (1 if name in ("all_reduce", "broadcast") else ranks) <= tuning.most_lines(ranks)
    ]
    Tables.with_entries("a test", thresholds(figures, ranks))


def test_a_file_keeps_what_was_measured_for_other_numbers_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write(path, {"push_reduce": {"2": 4096}}, {"gpus": ["one"]})
    write(path, {"push_reduce": {"4": 8192}}, {"gpus": ["two"]})
    tables = load_tables(str(path))
    assert tables is not None
    assert (tables.push_reduce[2], tables.push_reduce[4]) == (4096, 8192)
    assert json.loads(path.read_text())["measured"] == {"gpus": ["two"]}
    path.write_text("{}")
    with pytest.raises(InvalidValueError, match="version 1"):
        write(path, {"push_reduce": {"2": 4096}}, {})
    assert path.read_text() == "{}"


def test_without_two_gpus_there_is_nothing_to_tune() -> None:
    result = CliRunner().invoke(cli, ["bench", "--driver", "host", "--tune", "plan.json"])
    assert result.exit_code == Exit.USAGE
    assert "--tune needs two GPUs" in result.stderr


def test_the_command_measures_every_algorithm_and_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []

    def measure(plan: Any, listener: Any) -> str:
        plans.append(plan)
        listener.rows += [
            *rows("all_reduce", lines=(2, 4), shots=(8, 3), push=(20, 2)),
            *rows("reduce_scatter", lines=(2, 4), shots=(4, 3), push=(12, 2)),
            *rows("all_gather", lines=(2, 4), shots=(5, 3)),
            *rows("broadcast", lines=(2, 4), shots=(5, 3)),
        ]
        return ""

    monkeypatch.setattr(main, "_measure", measure)
    monkeypatch.setattr(main, "_show", lambda *_: None)
    monkeypatch.setattr("cupy_zc.cli.bench.options.gpus", lambda: 2)
    path = tmp_path / "plan.json"
    arguments = ["bench", "--driver", "cuda", "--tune", str(path), "-e", "32M"]
    result = CliRunner().invoke(cli, arguments, env={"CUPY_ZC_PLAN": ""})
    assert result.exit_code == Exit.OK, result.output
    assert f"set CUPY_ZC_PLAN={path}" in result.stderr
    (plan,) = plans
    assert plan.engines == FORCED
    assert (plan.graph, plan.placements, plan.sizes[-1]) == (True, (False,), 32 << 20)
    tables = load_tables(str(path))
    assert tables is not None
    assert tables.push_reduce[2] == 16 << 20


@pytest.mark.parametrize(
    ("engine", "small", "large"),
    [
        (tuning.Lines, "ll128", "two_shot"),
        (tuning.TwoSteps, "ll128", "two_shot"),
        (tuning.Shots, "two_shot", "two_shot"),
        (tuning.Push, "push_reduce", "push_reduce"),
    ],
)
def test_an_engine_of_a_tuning_run_takes_its_algorithm_whatever_the_size(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, engine: Any, small: str, large: str
) -> None:
    monkeypatch.setattr(tuning, "MOST_LINES", 1 << 12)
    monkeypatch.setattr(
        engine,
        "entries",
        {name: min(value, 1 << 12) if "ll128" in name else value
         for name, value in engine.entries.items()},
    )  # fmt: skip
    port = group_workers.free_port()

    def connect(rank: int) -> Communicator:
        made = engine.__new__(engine)
        made.context = SimpleNamespace(ranks=2, rank=rank)
        comm: Communicator = made.connect(port)
        return comm

    comms = list(group_workers.all_fine(group_workers.in_threads(2, connect)))
    for comm in comms:
        machine: Any = comm._engine._machine  # type: ignore[attr-defined]
        for nbytes, algorithm in ((1024, small), (8 << 20, large)):
            plan = device_plan(Operation.ALL_REDUCE, nbytes // 4, 4, machine)
            assert plan.algorithm == algorithm
    group_workers.in_threads(2, lambda rank: comms[rank].close())


def test_rows_that_are_too_large_for_lines_are_refused() -> None:
    lines, two = tuning.Lines.__new__(tuning.Lines), tuning.TwoSteps.__new__(tuning.TwoSteps)
    small, large = Case("all_reduce", 1 << 20, "float32", "sum", 4), 64 << 20
    assert (lines.refuses(small), two.refuses(small)) == ("", "")
    assert "too large" in lines.refuses(Case("all_reduce", large, "float32", "sum", 4))
    assert lines.refuses(Case("all_gather", large, "float32", "sum", 4)) == ""
    assert "too large" in two.refuses(Case("all_reduce", large, "float32", "sum", 4))
    assert "two steps" in two.refuses(Case("all_reduce", 1 << 20, "float32", "sum", 2))
    assert "two steps" in two.refuses(Case("all_gather", 1 << 20, "float32", "sum", 4))
