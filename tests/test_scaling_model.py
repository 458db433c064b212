"""The model of several nodes: bytes against messages sent one by one, times against two GPUs."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import model

ROOT = Path(__file__).parents[1]
LINKS = model.measured_links()
REPORT = ROOT / "benchmarks" / "results" / "scaling-model.json"
PAGE = ROOT / "docs" / "scaling.md"
MiB, GiB = 1 << 20, 1 << 30

nodes_of = st.integers(1, 6)
gpus_of = st.sampled_from([1, 2, 3, 4])
sizes = st.integers(1, 1 << 33)
counts = st.integers(1, 4096)
algorithms = st.sampled_from(model.ALGORITHMS)

#: Node, and GPU of the node.
Rank = tuple[int, int]


class Fabric:
    """Carries messages, adds up, and counts the bytes of an array of one byte."""

    def __init__(self, nodes: int, gpus: int) -> None:
        self.ranks = [(node, gpu) for node in range(nodes) for gpu in range(gpus)]
        self.sent: defaultdict[tuple[str, Rank], Fraction] = defaultdict(Fraction)
        self.held: dict[tuple[Rank, object], Counter[Rank]] = {}

    def start(self, part: object) -> None:
        """Every rank has its own contribution to a part."""
        for rank in self.ranks:
            self.held[rank, part] = Counter([rank])

    def send(self, source: Rank, target: Rank, part: object, size: Fraction, add: bool) -> None:
        link = "port" if source[0] == target[0] else "nic"
        self.sent[f"{link} out", source] += size
        self.sent[f"{link} in", target] += size
        got = self.held[source, part].copy()
        self.held[target, part] = self.held[target, part] + got if add else got

    def switch(self, ranks: list[Rank], part: object, size: Fraction) -> None:
        """SHARP: everybody sends a part once, and gets the sum once."""
        total = sum((self.held[rank, part] for rank in ranks), Counter[Rank]())
        for rank in ranks:
            self.held[rank, part] = total.copy()
            self.sent["nic out", rank] += size
            self.sent["nic in", rank] += size

    def traffic(self) -> dict[str, Fraction]:
        """The busiest of each kind, once everybody has everything exactly once."""
        assert all(held == Counter(self.ranks) for held in self.held.values())
        most = dict.fromkeys(("nic out", "nic in", "port out", "port in"), Fraction(0))
        for (link, _), size in self.sent.items():
            most[link] = max(most[link], size)
        return most


def ring(fabric: Fabric, order: list[Rank], number: int, size: Fraction) -> None:
    """reduce_scatter and all_gather of the parts (number, 0) and so on, along a ring."""
    length = len(order)
    for step in range(2 * (length - 1)):
        moves = [(at, (number, (at - step) % length)) for at in range(length)]
        before = [fabric.held[order[at], part] for at, part in moves]
        for (at, part), held in zip(moves, before, strict=True):
            assert fabric.held[order[at], part] == held  # nobody sends on what came in this step
            target = order[(at + 1) % length]
            fabric.send(order[at], target, part, size / length, step < length - 1)


def flat_rings(nodes: int, gpus: int, rings: int | None = None) -> Fabric:
    """Ring number r leaves each node by the NIC of GPU r."""
    fabric = Fabric(nodes, gpus)
    rings = rings or gpus
    for number in range(rings):
        inside = [(number + 1 + gpu) % gpus for gpu in range(gpus)]
        order = [(node, gpu) for node in range(nodes) for gpu in inside]
        for block in range(len(order)):
            fabric.start((number, block))
        ring(fabric, order, number, Fraction(1, rings))
    return fabric


def edges(ranks: int, mirrored: bool) -> Iterator[tuple[int, int]]:
    """Children and parents of a binary tree of ranks, children first; see Sanders et al., 2009."""
    by_height = sorted(range(1, ranks), key=lambda rank: rank & -rank)
    for child in by_height:
        low = child & -child
        parent = child - low + 2 * low if (child & 2 * low) == 0 else child - low
        parent = parent if parent < ranks else child - low
        if not mirrored:
            yield child, parent
        elif ranks % 2:
            yield (child + 1) % ranks, (parent + 1) % ranks
        else:
            yield ranks - 1 - child, ranks - 1 - parent


def double_trees(nodes: int, gpus: int) -> Fabric:
    """A pair of trees for each GPU c, in whose nodes a chain leads to c."""
    fabric = Fabric(nodes, gpus)
    for number in range(gpus):
        for mirrored in (False, True):
            part, size = (number, mirrored), Fraction(1, 2 * gpus)
            fabric.start(part)
            chain = [(number + at) % gpus for at in range(gpus)]
            inner = list(pairwise(chain))[::-1]
            up = [((node, a), (node, b)) for node in range(nodes) for b, a in inner]
            up += [((a, number), (b, number)) for a, b in edges(nodes, mirrored)]
            for child, parent in up:
                fabric.send(child, parent, part, size, True)
            for child, parent in reversed(up):
                fabric.send(parent, child, part, size, False)
    return fabric


def hierarchical(nodes: int, gpus: int, sharp: bool) -> Fabric:
    """A piece for each GPU of a node: reduced in the node, on its rail, and spread in the node."""
    fabric = Fabric(nodes, gpus)
    for number in range(gpus):
        parts = [0] if sharp else list(range(nodes))
        size = Fraction(1, gpus * len(parts))
        rail = [(node, number) for node in range(nodes)]
        inside = [
            ((node, gpu), (node, number), (number, block))
            for node in range(nodes) for gpu in range(gpus) if gpu != number for block in parts
        ]  # fmt: skip
        for block in parts:
            fabric.start((number, block))
        for source, target, part in inside:
            fabric.send(source, target, part, size, True)
        if sharp:
            fabric.switch(rail if nodes > 1 else [], (number, 0), size)
        else:
            ring(fabric, rail, number, Fraction(1, gpus))
        for source, target, part in inside:
            fabric.send(target, source, part, size, False)
    return fabric


BY_HAND: dict[model.Algorithm, Callable[[int, int], Fabric]] = {
    "flat ring": flat_rings,
    "tree": double_trees,
    "hierarchical": lambda nodes, gpus: hierarchical(nodes, gpus, False),
    "hierarchical + SHARP": lambda nodes, gpus: hierarchical(nodes, gpus, True),
}


@given(st.sampled_from(model.ALGORITHMS), nodes_of, gpus_of)
def test_bytes_of_links_are_those_of_messages_sent_one_by_one(algorithm, nodes, gpus):
    found = BY_HAND[algorithm](nodes, gpus).traffic()
    told = model.traffic(algorithm, 1.0, nodes, gpus)
    assert told.nic == pytest.approx(float(found["nic out"]))
    assert told.nic == pytest.approx(float(found["nic in"]))
    assert told.port == pytest.approx(float(found["port out"]))
    assert told.port == pytest.approx(float(found["port in"]))


@given(st.integers(2, 6), gpus_of)
def test_a_single_ring_takes_the_bytes_of_all_nics_through_one(nodes, gpus):
    found = flat_rings(nodes, gpus, rings=1).traffic()
    every = 2 * (nodes * gpus - 1) / (nodes * gpus)
    assert float(found["nic out"]) == pytest.approx(every)
    assert float(found["port out"]) == pytest.approx(every if gpus > 1 else 0)
    assert every == pytest.approx(gpus * model.traffic("flat ring", 1.0, nodes, gpus).nic)


@given(nodes_of, gpus_of)
def test_the_way_of_small_arrays_loads_the_links_of_the_leader(nodes, gpus):
    fabric = Fabric(nodes, gpus)
    others = [((node, gpu), (node, 0)) for node in range(nodes) for gpu in range(1, gpus)]
    for block in range(nodes):
        fabric.start((0, block))
        for source, leader in others:
            fabric.send(source, leader, (0, block), Fraction(1, nodes), True)
    ring(fabric, [(node, 0) for node in range(nodes)], 0, Fraction(1))
    for block in range(nodes):
        for source, leader in others:
            fabric.send(leader, source, (0, block), Fraction(1, nodes), False)
    found = fabric.traffic()
    assert found["nic out"] == found["nic in"] == Fraction(2 * (nodes - 1), nodes)
    assert found["port out"] == found["port in"] == gpus - 1


@given(st.integers(2, 4096))
def test_only_sharp_saves_bytes_of_nics(nodes):
    """Rails send hardly less than flat rings do: all NICs of a node share the array either way."""
    flat, rails, switches = (
        model.traffic(each, GiB, nodes).nic
        for each in ("flat ring", "hierarchical", "hierarchical + SHARP")
    )
    assert rails <= flat <= rails + GiB / nodes / 4
    assert switches == GiB / model.GPUS
    assert rails == pytest.approx(2 * (nodes - 1) / nodes * switches)


def in_order(stages: list[tuple[float, float, float]], cross: float) -> float:
    """The same as `schedule`, from what each call waits for."""
    chunks = range(len(stages))
    node = ["RS 0"] + [name for at in chunks[1:] for name in (f"RS {at}", f"AG {at - 1}")]
    streams = [[*node, f"AG {chunks[-1]}"], [f"AR {at}" for at in chunks]]
    waits = {f"AR {at}": f"RS {at}" for at in chunks} | {f"AG {at}": f"AR {at}" for at in chunks}
    took = {
        f"{name} {at}": stages[at][column]
        for column, name in enumerate(("RS", "AR", "AG")) for at in chunks
    }  # fmt: skip
    before = {name: last for stream in streams for last, name in pairwise(stream)}

    @cache
    def end(name: str) -> float:
        start = end(before[name]) if name in before else 0.0
        if name in waits:
            start = max(start, end(waits[name]) + cross)
        return start + took[name]

    return max(map(end, took))


spans = st.floats(0, 1e4)


@given(st.lists(st.tuples(spans, spans, spans), min_size=1, max_size=8), st.floats(0, 10))
def test_the_schedule_is_that_of_two_streams(stages, cross):
    end = model.schedule(stages, cross)
    assert end == pytest.approx(in_order(stages, cross))
    scatter, rails, gather = (sum(column) for column in zip(*stages, strict=True))
    assert end >= max(scatter + gather, rails) - 1e-6
    assert end <= scatter + rails + gather + 2 * cross * len(stages) + 1e-6


@given(algorithms, sizes, sizes, counts)
def test_more_bytes_are_never_faster(algorithm, one, other, nodes):
    less, more = sorted((one, other))
    fast, slow = (model.predict(algorithm, size, nodes, LINKS).us for size in (less, more))
    assert fast <= slow * (1 + 1e-12)


@given(algorithms, sizes, counts, counts)
def test_more_nodes_are_never_faster(algorithm, size, one, other):
    less, more = sorted((one, other))
    fast, slow = (model.predict(algorithm, size, nodes, LINKS).us for nodes in (less, more))
    assert fast <= slow * (1 + 1e-12)


@given(sizes, counts)
def test_sharp_is_never_slower(size, nodes):
    with_it, without = (
        model.predict(each, size, nodes, LINKS).us
        for each in ("hierarchical + SHARP", "hierarchical")
    )
    assert with_it <= without


@given(st.integers(16 * MiB, GiB), st.integers(3, 4096))
def test_a_large_rail_is_faster_through_switches(size, nodes):
    assert model.sharp(size, LINKS).us < model.rail(size, nodes, LINKS, False).us


@given(sizes, st.sampled_from([1, 2, 4, 8]))
def test_one_node_is_the_node_alone(size, gpus):
    alone = model.node_us("all_reduce", size, gpus, LINKS)
    for algorithm in ("hierarchical", "hierarchical + SHARP"):
        assert model.predict(algorithm, size, 1, LINKS, gpus).us == alone


@given(sizes, st.integers(2, 4096))
def test_a_gpu_a_node_has_no_work_in_the_node(size, nodes):
    alone = model.rail(size, nodes, LINKS, False).us
    assert model.hierarchical(size, nodes, 1, LINKS, False).us == pytest.approx(alone)


@pytest.mark.parametrize(
    ("engine", "sizes", "bound"),
    [
        ("cupy-zc", (16 * MiB, GiB), 0.05),
        ("cupy-zc", (1 << 10, 64 << 10), 0.15),
        ("cupy-zc", (1 << 10, GiB), 0.20),
        ("nccl", (256 * MiB, GiB), 0.20),
        ("nccl", (1 << 10, GiB), 0.40),
    ],
)
def test_two_gpus_are_predicted_within(engine, sizes, bound):
    rows = [
        row for row in model.calibration(LINKS)
        if row["engine"] == engine and sizes[0] <= row["bytes"] <= sizes[1]
    ]  # fmt: skip
    assert len(rows) >= 2
    for row in rows:
        assert row["error"] == row["predicted_us"] / row["measured_us"] - 1
        assert abs(row["error"]) <= bound, row


def test_what_is_predicted_of_two_gpus_was_no_input(monkeypatch, tmp_path):
    lines = model.RUNS.read_text().splitlines(keepends=True)
    monkeypatch.setattr(model, "RUNS", tmp_path / "runs.jsonl")
    model.RUNS.write_text("".join(line for line in lines if '"all_reduce"' not in line))
    assert model.calibration(LINKS) == []
    assert model.measured_links() == LINKS


@pytest.fixture(scope="module")
def report():
    return model.report(LINKS)


def test_the_file_and_the_plot_are_what_the_model_says_now(report):
    again = "run: python benchmarks/model.py, with --json and --plot"
    assert json.loads(REPORT.read_text()) == report, again
    digest = hashlib.sha256(json.dumps(report).encode()).hexdigest()
    assert digest in (ROOT / "docs" / "images" / "scaling.svg").read_text(), again
    assert "model" in report["what"]


def test_the_page_has_the_figures_of_the_model(report):
    page = PAGE.read_text()
    for line in model.markdown(report).splitlines():
        if line.split(" | ")[1] in ("nodes", "1", "2", "8", "64", "512", "4,096"):
            assert line in page
    for row in report["calibration"]:
        told = f"{row['measured_us']:.4g} | {row['predicted_us']:.4g} | {row['error']:+.1%}"
        assert f"| {told} |" in page


@pytest.mark.parametrize("nodes", [8, 64, 4096])
def test_what_the_page_says_about_who_wins(nodes, report):
    assert report["winners"][str(nodes)] == [[1024, "hierarchical + SHARP"]]
    without = dict(report["winners_without_sharp"][str(nodes)])
    assert without[1024] == without[32 << 10] == "hierarchical"
    assert "tree" in {without.get(2 * MiB), without.get(4 * MiB), without.get(8 * MiB)}
    for with_sharp, most in ((False, 16 << 10), (True, 32 << 10)):
        ways = {
            size: model.hierarchical(size, nodes, model.GPUS, LINKS, with_sharp).how
            for size in model.SWEEP
        }
        assert [size for size in ways if ways[size].startswith("leaders")][-1] == most


def test_the_program_writes_what_it_prints(tmp_path, capsys):
    files = [tmp_path / "said.json", tmp_path / "plot.svg"]
    flags = ["--nodes", "1", "16", "--sizes", "1048576", "--json", str(files[0])]
    model.main([*flags, "--plot", str(files[1])])
    said = json.loads(files[0].read_text())
    assert capsys.readouterr().out == model.markdown(said) + "\n"
    assert said == model.report(LINKS, [1, 16], [MiB])
    assert {row["nodes"] for row in said["rows"]} == {1, 16}
    assert hashlib.sha256(json.dumps(said).encode()).hexdigest() in files[1].read_text()


def test_the_program_writes_nothing_that_was_not_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model.main(["--nodes", "2", "--sizes", "1024"])
    assert capsys.readouterr().out.count("\n") == 3
    assert not list(tmp_path.iterdir())
