"""Set-up of many ranks: what one sends, receives and keeps, and what leaves rank 0."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_ranks import device
from fake_nccl import fake_nccl

import cupy_zc.collectives.schedule as schedule
from cupy_zc import Communicator, config
from cupy_zc.collectives import nccl as engine
from cupy_zc.collectives import opening
from cupy_zc.group import Bootstrap, bootstrap_mpi
from cupy_zc.group.bootstrap import Offer
from cupy_zc.group.waiting import Wait
from cupy_zc.group.wire import pack_offer, pack_offers

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import setup_job
import setup_model

__all__ = ["device"]  # a fixture

ROOT = Path(__file__).parents[1]
REPORT = json.loads((ROOT / "benchmarks" / "results" / "setup-model.json").read_text())
PAGE = (ROOT / "docs" / "scaling.md").read_text()
ROWS = {row["ranks"]: row for row in REPORT["rows"]}
TABLES = (setup_model.of_a_rank, setup_model.of_rank_0, setup_model.of_steps)
KB, MB = 1000, 1000**2


@cache
def job_of(ranks: int) -> tuple[setup_job.Job, dict[str, Any]]:
    job = setup_job.Job(ranks)
    return job, setup_model.measure_rank(job)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Pretends nodes of a size, as there is one machine only."""

    def nodes_of(ranks: int) -> None:
        monkeypatch.setenv("CUPY_ZC_NODE_SIZE", str(ranks))
        config.settings.cache_clear()

    yield nodes_of
    monkeypatch.undo()
    config.settings.cache_clear()


def test_the_ranks_that_are_made_up_say_what_real_ones_do(pretend):
    pretend(4)
    real = setup_job.together(8, lambda group: setup_job.set_up(group).close())
    for rank, log in enumerate(real):
        job = setup_job.Job(8, rank, local=4, pretend=True)
        setup_model.measure_rank(job)
        assert len(job.log) == 3
        assert sorted(each for part in job.log.values() for each in part) == sorted(log)


def test_a_communicator_asks_what_is_counted(pretend, device, monkeypatch):
    """And opens the channels of its node, besides."""
    pretend(2)

    def make(group: Bootstrap) -> None:
        options = opening.Options.of("test", driver=device, spread=True)
        opening.start(Communicator, group, replace(options, threads=True)).close()

    with fake_nccl(device) as nccl:
        monkeypatch.setattr(engine, "load_nccl", lambda: nccl)
        real = setup_job.together(4, make)
    plans = setup_job.together(4, lambda group: setup_job.set_up(group).close())
    for asked, counted in zip(real, plans, strict=True):
        calls = [each.call for each in asked]
        assert calls.pop() == "all_gather('leave')"  # of close()
        for _ in range(2):
            at = calls.index("all_gather('open channel')")
            del calls[at : at + 2]  # with its vote
        assert calls == [each.call for each in counted]


class Mpi:
    """An MPI whose other ranks have said something already."""

    BYTE, Exception = None, OSError

    def __init__(self) -> None:
        self.said: dict[int, list[bytes]] = {}
        self.received = 0

    def Get_rank(self) -> int:  # noqa: N802
        return 0

    def Irecv(self, place: Any, peer: int, _: int) -> SimpleNamespace:  # noqa: N802
        data = self.said[peer].pop(0)
        place[0][:] = np.frombuffer(data, np.uint8)
        self.received += len(data)
        return SimpleNamespace(Test=lambda: True)

    def Isend(self, *_: Any) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(Test=lambda: True)


def test_what_is_told_of_mpi_is_what_its_messages_have(monkeypatch):
    job, _ = job_of(64)
    mpi = Mpi()
    shared = SimpleNamespace(comm=mpi, mpi=mpi, users=0)
    group = bootstrap_mpi._MpiBootstrap(shared, range(64), 0)  # type: ignore[arg-type]
    gathers = setup_model.gathers_by_mpi(job)
    for offers in gathers:
        for peer, offer in enumerate(offers):
            packed = pack_offer(offer)
            head = struct.pack("!I8s", len(packed), blake2b(packed, digest_size=8).digest())
            mpi.said[peer] = [head, packed] if offer != offers[0] else [head]
        assert group._gather(offers[0], Wait("", 1.0)) == offers
        assert not any(left for peer, left in mpi.said.items() if peer)
    assert len(gathers) > 10
    assert mpi.received == setup_model.bytes_by_mpi(job)


@pytest.mark.parametrize("rank", [0, 1, 300, 511])
def test_a_rank_knows_after_set_up_where_all_ranks_are(rank):
    job = setup_job.Job(512, rank)
    with job.playing():
        plan = setup_job.set_up(job.meet())
    plan.close()
    assert plan.topology.nodes == tuple(tuple(range(at, at + 8)) for at in range(0, 512, 8))
    assert plan.world.rail == tuple(range(rank % 8, 512, 8))
    assert [group.rank for group in plan.groups] == [rank, rank % 8, rank // 8]
    assert [group.size for group in plan.groups] == [512, 8, 64]


@pytest.mark.parametrize("ranks", [64, 512])
def test_what_a_rank_sends_does_not_depend_on_how_many_there_are(ranks):
    assert job_of(ranks)[1]["sent"] == job_of(8 * ranks)[1]["sent"] < 3 * KB


@pytest.mark.parametrize("ranks", [64, 512])
@pytest.mark.parametrize("key", ["received", "kept", "peak"])
def test_what_a_rank_receives_and_keeps_grows_no_faster_than_the_ranks(ranks, key):
    assert job_of(8 * ranks)[1][key] <= 8.2 * job_of(ranks)[1][key]


def test_gathers_in_which_all_ranks_agree_have_one_length():
    few, many = (job_of(ranks)[1]["steps"] for ranks in (64, 4096))
    growing = {"machines", "GPUs", "addresses of the stores of nodes and rails"}
    assert {step for step in many if many[step] > few[step] + 16} == growing
    assert many["machines"] < 512 * 128  # one a node
    assert many["GPUs"] < 4096 * 40


def test_the_set_up_of_4096_ranks_is_small_for_each():
    _, rank = job_of(4096)
    assert rank["received"] < 300 * KB
    assert rank["peak"] < 4 * MB
    assert rank["seconds"] < 1


def test_ranks_that_are_not_sorted_by_node_receive_hardly_more():
    """As a launcher may have it that fills nodes in turns."""
    sorted_, in_turns = (
        len(pack_offers([Offer(b"", b"%085d" % node) for node in nodes]))
        for nodes in ([rank // 8 for rank in range(512)], [rank % 64 for rank in range(512)])
    )
    assert in_turns - sorted_ <= 8 * 512


def test_the_store_of_rank_0_sends_each_rank_what_a_rank_receives_and_holds_it_once():
    small, large = (setup_model.measure_store(job_of(ranks)[0]) for ranks in (64, 512))
    assert large["out"] / 512 <= job_of(512)[1]["received"]
    assert large["peak"] - small["peak"] < (512 - 64) * 5 * KB  # a connection, and its part


def test_schedules_that_are_kept_have_a_bound_whatever_the_number_of_nodes():
    few, many = map(setup_model.measure_schedules, (512, 4096))
    assert many["acts"] > 7 * few["acts"]
    assert many["peak"] < 1.2 * few["peak"] < 40 * MB


@pytest.mark.parametrize("ranks", [8, 64, 512, 4096])
def test_the_file_is_what_is_measured_now(ranks):
    again = "run: python benchmarks/setup_model.py, with --json and --plot"
    row, (job, rank) = ROWS[ranks], job_of(ranks)
    for key, within in (("sent", 0.02), ("received", 0.02), ("kept", 0.4), ("peak", 0.4)):
        assert rank[key] == pytest.approx(row["rank"][key], rel=within), again
    out = sum(len(each) for (group, _), each in job.answers.items() if group == "all") * ranks
    assert out == pytest.approx(row["store"]["out"], rel=0.02), again


def test_the_plot_is_that_of_the_file():
    assert setup_model.digest(REPORT) in (ROOT / "docs" / "images" / "setup.svg").read_text()


@pytest.mark.parametrize("table", TABLES)
def test_the_page_has_the_tables_of_the_file(table):
    assert table(REPORT) in PAGE


def test_what_the_page_says_beside_its_tables_is_in_the_file():
    figures = [
        f"4,096 ranks get {setup_model.size_of(ROWS[4096]['host_out'])} from its host",
        f"32,768 get {setup_model.size_of(ROWS[32768]['host_out'])}",
        f"A rank of 4,096 receives {setup_model.size_of(ROWS[4096]['mpi'])}",
        f"gives each {setup_model.size_of(REPORT['channels'])}",
        f"on 512 nodes has {ROWS[4096]['schedules']['acts']:,} of them",
        f"on 4,096 nodes {ROWS[32768]['schedules']['acts']:,}",
        f"up to {schedule._KEPT:,} steps",
        f"{len(setup_model.gathers_of(job_of(64)[0]))} gathers of 4,096 ranks",
    ]
    words = " ".join(PAGE.split())
    assert [each for each in figures if each not in words] == []


def test_what_the_page_says_of_the_busiest_host_is_what_all_stores_there_send():
    for ranks, row in ROWS.items():
        assert row["store"]["out"] <= row["host_out"] < 1.2 * row["store"]["out"]
        assert row["store"]["out"] < ranks * row["rank"]["received"]
    assert ROWS[4096]["host_out"] < 1.1e9
    assert ROWS[32768]["host_out"] / ROWS[4096]["host_out"] == pytest.approx(64, rel=0.02)


def test_the_program_writes_what_it_prints(tmp_path, capsys):
    files = [tmp_path / "said.json", tmp_path / "plot.svg"]
    setup_model.main(["--ranks", "8", "64", "--json", str(files[0]), "--plot", str(files[1])])
    said = json.loads(files[0].read_text())
    printed = capsys.readouterr().out
    assert printed == "\n\n".join(table(said) for table in TABLES) + "\n"
    assert [row["ranks"] for row in said["rows"]] == [8, 64]
    assert said["channels"] > 1000
    assert setup_model.digest(said) in files[1].read_text()


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.23 KB"), (65_240_000_000, "65.2 GB"), (4e8, "400 MB")],
)
def test_sizes_have_three_digits(nbytes, told):
    assert setup_model.size_of(nbytes) == told
