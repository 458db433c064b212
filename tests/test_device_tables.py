"""Thresholds: those of the package, those of a file, and ranks that have different ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import group_workers
import pytest
from device_ranks import device, engine_of, ranks
from emulated_driver import EmulatedDriver
from hypothesis import given
from hypothesis import strategies as st
from test_device_plan import places_of

from cupy_zc import Communicator, Error, InvalidValueError
from cupy_zc.collectives import opening
from cupy_zc.collectives.device_multimem import MULTIMEM
from cupy_zc.collectives.device_plan import PATTERN_BYTES, Machine, device_plan, sizes
from cupy_zc.collectives.device_tables import MOST_BUFFERED, Tables, load_tables
from cupy_zc.collectives.plan import Operation
from cupy_zc.config import settings
from cupy_zc.group import in_process

__all__ = ["device"]  # a fixture

NAMES = (
    "ll128_one_step", "ll128_two_steps", "ll128_reduce_scatter", "ll128_broadcast", "ll128_row",
    "ll_one_step", "push_reduce",
    "push_reduce_scatter", "multimem_ll",
)  # fmt: skip


def file_of(folder: Path, tables: Any, version: Any = 1) -> str:
    path = folder / "plan.json"
    path.write_text(json.dumps({"version": version, "tables": tables}))
    return str(path)


def test_without_a_file_the_tables_are_those_of_the_package() -> None:
    assert load_tables("") is None
    assert Machine(2, 8, True, sizes(2)).thresholds == Tables.own()


def test_a_file_changes_what_it_says_and_nothing_else(tmp_path: Path) -> None:
    tables = load_tables(
        file_of(tmp_path, {"push_reduce": {"2": 4096}, "multimem": {"broadcast": {"4": 77}}})
    )
    assert tables is not None
    own = Tables.own()
    assert tables.push_reduce == {**own.push_reduce, 2: 4096}
    assert tables.multimem[Operation.BROADCAST] == {**own.multimem[Operation.BROADCAST], 4: 77}
    assert tables.multimem[Operation.ALL_REDUCE] == own.multimem[Operation.ALL_REDUCE]
    assert MULTIMEM[Operation.BROADCAST] == own.multimem[Operation.BROADCAST]  # as it was
    assert [getattr(tables, name) for name in NAMES if name != "push_reduce"] == [
        getattr(own, name) for name in NAMES if name != "push_reduce"
    ]
    assert tables.digest != own.digest


@given(
    st.sampled_from(NAMES),
    st.integers(2, 8),
    st.integers(0, MOST_BUFFERED),
    st.integers(0, 1 << 28),
)
def test_every_plan_of_a_file_fits_the_lanes_that_are_made_for_it(
    name: str, ranks: int, threshold: int, count: int
) -> None:
    tables = Tables.with_entries("a test", {name: {str(ranks): threshold}})
    machine = Machine(
        ranks, 8, name != "ll_one_step", sizes(ranks, tables), "hardware", False, tables
    )
    assert machine.sizes.ll128_lines * 112 >= PATTERN_BYTES  # which set-up sends
    assert machine.sizes.lane_bytes(ranks) >= ranks * PATTERN_BYTES  # and writes, to every peer
    for operation in Operation:
        plan = device_plan(operation, count, 4, machine, in_switch=True)
        if plan.algorithm == "ll128":
            lines = max(1, -(-count * 4 // 120))
            assert places_of(plan, lines, ranks) <= machine.sizes.ll128_lines
        if plan.algorithm == "ll":
            assert -(-count * 4 // 16) <= machine.sizes.ll_packs
        if plan.algorithm == "multimem_ll":
            assert -(-count * 4 // 16) <= machine.sizes.ll_packs * (ranks - 1) // ranks


def test_a_file_that_knows_one_table_of_rows_says_all_of_them(tmp_path: Path) -> None:
    """Files were written before broadcast and reduce_scatter had tables of their own."""
    tables = load_tables(file_of(tmp_path, {"ll128_row": {"2": 0}, "push_reduce": {"4": 7}}))
    assert tables is not None
    assert tables.ll128_row[2] == tables.ll128_broadcast[2] == tables.ll128_reduce_scatter[2] == 0
    assert tables.ll128_broadcast[4] == Tables.own().ll128_broadcast[4]
    both = {"ll128_row": {"2": 0}, "ll128_broadcast": {"4": 9}}
    for entries in (both, dict(reversed(both.items()))):
        tables = load_tables(file_of(tmp_path, entries))
        assert tables is not None
        assert tables.ll128_broadcast == {**Tables.own().ll128_broadcast, 4: 9}
        assert tables.ll128_reduce_scatter[2] == 0


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([], "the tables=.*a JSON object"),
        ({"ll256": {}}, "a table=.*ll256.*one of ll128_one_step"),
        ({"push_reduce": 7}, "push_reduce=.*a JSON object"),
        ({"push_reduce": {"two": 7}}, "push_reduce=.*two.*from 2 to 8"),
        ({"push_reduce": {"9": 7}}, "push_reduce=.*9.*from 2 to 8"),
        ({"push_reduce": {"2": -1}}, r"push_reduce\[2\]=.*bytes from 0"),
        ({"push_reduce": {"2": True}}, r"push_reduce\[2\]=.*bytes from 0"),
        ({"ll128_row": {"2": 1 << 30}}, r"ll128_row\[2\]=.*to 67,108,864"),
        ({"multimem": {"gather": {}}}, "multimem=.*gather.*all_reduce"),
        ({"multimem": {"broadcast": {"4": "x"}}}, r"multimem.broadcast\[4\]"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, tables: Any, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words) as caught:
        load_tables(file_of(tmp_path, tables))
    assert "plan.json" in str(caught.value)


def test_what_is_no_such_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="No such file"):
        load_tables(str(tmp_path / "nothing"))
    (tmp_path / "words").write_text("words")
    with pytest.raises(InvalidValueError, match="Expecting value"):
        load_tables(str(tmp_path / "words"))
    for version in (2, None):
        with pytest.raises(InvalidValueError, match="version 1"):
            load_tables(file_of(tmp_path, {}, version))
    (tmp_path / "list").write_text("[]")
    with pytest.raises(InvalidValueError, match="version 1"):
        load_tables(str(tmp_path / "list"))


def test_a_communicator_plans_by_the_file_of_the_settings(
    device: EmulatedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path, {"ll128_one_step": {"2": 0}, "ll128_two_steps": {"2": 0}})
    monkeypatch.setenv("CUPY_ZC_PLAN", path)
    settings.cache_clear()
    try:
        with ranks(2, device) as comms:
            engine = engine_of(comms[0])
            assert engine._machine.tables == load_tables(path)
            plan = device_plan(Operation.ALL_REDUCE, 10, 4, engine._machine)
            assert plan.algorithm == "two_shot"
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def test_ranks_with_other_tables_are_told_on_every_rank(device: EmulatedDriver) -> None:
    group = in_process(2)

    def made(rank: int) -> Communicator:
        options = opening.Options.of("test", driver=device, timeout=20.0)
        tables = Tables.with_entries("a test", {"push_reduce": {"2": 4096 + rank}})
        options = dataclasses.replace(options, threads=True, tables=tables)
        return opening.start(Communicator, group[rank], options)

    outcomes = group_workers.in_threads(2, made)
    assert all(isinstance(each, Error) for each in outcomes)
    assert all("the files of CUPY_ZC_PLAN differ" in str(each) for each in outcomes)
    assert "rank 0 has" in str(outcomes[1])
