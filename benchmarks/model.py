"""all_reduce on paper: a model of 1 to 4,096 nodes of 8 GPUs. It predicts, and measures nothing.

    python benchmarks/model.py [--json benchmarks/results/scaling-model.json]
                               [--plot docs/images/scaling.svg]

A time is a start, hops, and bytes over a rate. What a node does is read from the runs of two GPUs
in benchmarks/results; what is between nodes is stated below, each figure with its source. Sizes are
bytes of a rank's array; bytes of links are counted in one direction, at the busiest link.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from cupy_zc.collectives.device_tables import Tables, at

__all__ = [
    "ALGORITHMS", "CHUNKS", "NODES", "SIZES", "Algorithm", "Links", "Prediction", "Traffic",
    "bus_gbps", "calibration", "chunked", "draw", "hierarchical", "main", "markdown",
    "measured_links", "nccl_ring", "nccl_tree", "node_us", "predict", "rail", "report",
    "schedule", "sharp", "small", "traffic", "winners",
]  # fmt: skip

Algorithm: TypeAlias = Literal["flat ring", "tree", "hierarchical", "hierarchical + SHARP"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
Kind: TypeAlias = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
#: The model takes kernels from before thresholds of two GPUs moved, which eight do not share.
RUNS = Path(__file__).parent / "results" / "earlier" / "collectives-2xh200.jsonl"
GPUS, NODES, SIZES = 8, tuple(1 << power for power in range(13)), (MiB, 64 * MiB, GiB)
#: Sizes among which crossovers are looked for, and chunks among which `hierarchical` chooses.
SWEEP = tuple(KiB << power for power in range(23))
CHUNKS = tuple(MiB << power for power in range(2, 11))
#: Data in a line of LL128.
LINE = 120 / 128


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol of NCCL: microseconds of a start and of hops, and shares of the rate of a link.

    Source: `src/graph/tuning.cc` of NCCL 2.20.3, by which it chooses for itself.
    """

    name: str
    ring_start_us: float
    ring_nvlink_us: float
    ring_net_us: float
    tree_start_us: float
    tree_nvlink_us: float
    tree_net_us: float
    #: Of a ring, of one with a GPU a node, and of a tree.
    ring_share: float
    rail_share: float
    tree_share: float
    #: GB/s that the kernels of a GPU move at most, in several nodes; us that a hop costs its host.
    most_gbps: float
    post_us: float


_LL = Protocol("LL", 6.6, 0.6, 2.7, 6.8, 0.6, 5.0, 1 / 4, 1 / 4, 0.92 / 3.8, 20.4, 1.0)
_LL128 = Protocol("LL128", 14.0, 1.9, 4.0, 14.0, 1.25, 8.5, 0.92, 0.7, 0.92 * LINE, 1e9, 1.0)
_SIMPLE = Protocol("Simple", 8.4, 3.4, 14.0, 0.0, 28.0, 28.0, 1.0, 1.0, 0.92, 1e9, 3.0)


@dataclass(frozen=True, slots=True)
class Links:
    """Everything the model is told. GB/s are 1e9 bytes a second in one direction."""

    #: A GPU's NVLink with both directions busy, by stores of a kernel. Measured: the least "kernel
    #: writes peer" of the runs. Taken for a port to an NVSwitch too, whatever the number of peers.
    nvlink_gbps: float
    #: A collective in the node before its bytes: by LL128 (its time at 1 KiB), and by the kernels
    #: for more (its time at 4 MiB, less the bytes at the rate above). Measured on two GPUs, taken
    #: for more. `reduce` was not measured: that of reduce_scatter.
    quick_us: Mapping[Kind, float]
    bulk_us: Mapping[Kind, float]
    #: A kernel from a graph; saved where one kernel does two steps. Source: docs/performance.md.
    launch_us: float = 1.0
    #: From one stream to the other by an event of a graph. Assumed.
    cross_us: float = 1.5
    #: NDR InfiniBand, one NIC a GPU: 400 Gb/s, of which 96 % are assumed to be payload. Source: 48
    #: GB/s is what NCCL plans for such a NIC (`sm90SpeedArrayInter`, `src/graph/search.cc`).
    nic_gbps: float = 0.96 * 50.0
    #: A reduction in the switches of a rail. Source: "CollNetChain" in `tuning.cc`, as above.
    sharp_us: float = 30.0
    #: Of the rate of a NIC. Source: the correction of `tuning.cc` for CollNet with one GPU a node.
    sharp_share: float = 0.95
    protocols: tuple[Protocol, ...] = (_LL, _LL128, _SIMPLE)


class Prediction(NamedTuple):
    """Microseconds, and how."""

    us: float
    how: str


class Traffic(NamedTuple):
    """Bytes out of the busiest NIC and the busiest NVLink port; as many come in."""

    nic: float
    port: float


def _size(nbytes: float) -> str:
    units = ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"), (1, "B"))
    return next(f"{nbytes / unit:.4g} {name}" for unit, name in units if nbytes >= unit)


def _rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RUNS.read_text().splitlines()]


def _measured(engine: str, collective: str) -> dict[int, float]:
    """Microseconds by bytes."""
    rows = [row for row in _rows() if row["metric"] == "device_us" and row["engine"] == engine]
    return {row["bytes"]: row["us"] for row in rows if row["collective"] == collective}


def measured_links() -> Links:
    """The links, with what was measured in the node."""
    ceilings = [row for row in _rows() if row.get("name") == "kernel writes peer"]
    rate: float = min(row["both_gbps"] for row in ceilings)
    quick: dict[Kind, float] = {}
    bulk: dict[Kind, float] = {}
    kinds: tuple[Kind, ...] = ("reduce_scatter", "all_gather", "broadcast")
    for kind in kinds:
        times = _measured("cupy-zc", kind)
        quick[kind] = times[KiB]
        bulk[kind] = times[4 * MiB] - _port(kind, 4 * MiB, 2) / rate / 1e3
    for starts in (quick, bulk):
        # Not all_reduce of two GPUs, which is no input: the model is compared with it.
        starts["reduce"] = starts["all_reduce"] = starts["reduce_scatter"]
    return Links(rate, quick, bulk)


def _port(kind: Kind, size: float, gpus: int) -> float:
    """Bytes of an NVLink port in a collective of one node."""
    if kind in ("broadcast", "reduce"):
        return (gpus - 1) * size
    return (2 if kind == "all_reduce" else 1) * (gpus - 1) / gpus * size


def node_us(kind: Kind, size: float, gpus: int, links: Links) -> float:
    """A collective of the engine `device` in one node, as `device_plan` carries it out."""
    if gpus == 1 or not size:
        return 0.0
    tables, rate = Tables.own(), links.nvlink_gbps * 1e3
    row = size / gpus if kind in ("reduce_scatter", "all_gather") else size
    start, moved = links.quick_us[kind], _port(kind, size, gpus)
    most = at(tables.ll128_row, gpus)
    if kind == "all_reduce":
        most = at(tables.ll128_two_steps, gpus)
        if row <= at(tables.ll128_one_step, gpus):
            moved = (gpus - 1) * size
        else:
            start += links.quick_us["all_gather"] - links.launch_us
    if row <= most:
        return start + moved / LINE / rate
    return links.bulk_us[kind] + _port(kind, size, gpus) / rate


def _degree(nodes: int) -> int:
    """The most edges of a rank in both trees: three where it is inside, one where it is a leaf."""
    return {1: 0, 2: 2, 3: 3}.get(nodes, 4)


def traffic(algorithm: Algorithm, size: float, nodes: int, gpus: int = GPUS) -> Traffic:
    """Bytes that links carry; the rails of "hierarchical" are rings.

    A flat ring is one ring for each NIC of a node, with its part of the array, and a tree a pair of
    trees for each, which are chains inside the node.
    """
    ranks, part = nodes * gpus, size / gpus
    in_node = _port("all_reduce", size, gpus)
    if algorithm == "flat ring":
        every = 2 * (ranks - 1) / ranks * part
        return Traffic(every, (gpus - 1) * every) if nodes > 1 else Traffic(0, in_node)
    if algorithm == "tree":
        return Traffic(_degree(nodes) / 2 * part, in_node)
    if algorithm == "hierarchical":
        return Traffic(traffic("flat ring", part, nodes, 1).nic, in_node)
    return Traffic(part if nodes > 1 else 0, in_node)


def _transfer_us(moved: Traffic, share: float, protocol: Protocol, links: Links) -> float:
    link = max(moved.nic / links.nic_gbps, moved.port / links.nvlink_gbps) / share
    return max(link, sum(moved) / protocol.most_gbps if moved.nic else 0.0) / 1e3


def nccl_ring(size: float, nodes: int, gpus: int, links: Links) -> Prediction:
    """The flat ring with the best protocol; with one GPU a node, a ring on a rail."""
    steps = 2 * (nodes * gpus - 1)
    between = min(2 * nodes, steps) if nodes > 1 else 0
    moved = traffic("flat ring", size, nodes, gpus)
    found = []
    for kind in links.protocols:
        hop = max(kind.ring_nvlink_us, kind.post_us) if nodes > 1 else kind.ring_nvlink_us
        us = kind.ring_start_us + (steps - between) * hop + between * kind.ring_net_us
        share = kind.rail_share if gpus == 1 else kind.ring_share
        us += _transfer_us(moved, share, kind, links)
        found.append(Prediction(us, f"ring {kind.name}"))
    return min(found)


def nccl_tree(size: float, nodes: int, gpus: int, links: Links) -> Prediction:
    """The double binary tree with the best protocol."""
    moved, depth = traffic("tree", size, nodes, gpus), nodes.bit_length() - 1
    found = []
    for kind in links.protocols:
        us = kind.tree_start_us
        us += 2 * ((gpus - 1) * kind.tree_nvlink_us + depth * kind.tree_net_us)
        us += _transfer_us(moved, kind.tree_share, kind, links)
        found.append(Prediction(us, f"tree {kind.name}"))
    return min(found)


def sharp(size: float, links: Links) -> Prediction:
    """A rail whose switches add up: a NIC sends its array, and gets the sum."""
    us = links.sharp_us + size / links.nic_gbps / links.sharp_share / 1e3
    return Prediction(us, "SHARP")


def rail(size: float, nodes: int, links: Links, with_sharp: bool) -> Prediction:
    """all_reduce among one GPU of each node: as NCCL does, the best of what it has."""
    found = [nccl_ring(size, nodes, 1, links), nccl_tree(size, nodes, 1, links)]
    return min([*found, sharp(size, links)] if with_sharp else found)


def schedule(stages: Iterable[tuple[float, float, float]], cross_us: float) -> float:
    """When the last chunk is done.

    Args:
        stages: For each chunk the times of reduce_scatter, of the rail, and of all_gather. One
            stream does RS0, RS1, AG0, RS2, AG1 and so on, the other the rails, in order.
        cross_us: From the end of a call to what waits for it on the other stream.
    """
    node = rails = pending = 0.0
    reduced: float | None = None  # when the rail of the chunk before was done
    for scatter, across, gather in stages:
        node += scatter
        rails = max(rails, node + cross_us) + across
        if reduced is not None:
            node = max(node, reduced + cross_us) + pending
        reduced, pending = rails, gather
    return max(node, (reduced or 0.0) + cross_us) + pending


def chunked(
    size: float, nodes: int, gpus: int, links: Links, with_sharp: bool, chunk: float
) -> Prediction:
    """reduce_scatter in the node, all_reduce on the rails, all_gather in the node, in chunks."""
    how = rail(min(size, chunk) / gpus, nodes, links, with_sharp).how

    def stage(part: float) -> tuple[float, float, float]:
        across = rail(part / gpus, nodes, links, with_sharp)
        scatter = node_us("reduce_scatter", part, gpus, links)
        return scatter, across.us, node_us("all_gather", part, gpus, links)

    whole, rest = divmod(size, chunk)
    stages = [stage(chunk)] * int(whole) + ([stage(rest)] if rest else [])
    pieces = f"chunks of {_size(chunk)}" if len(stages) > 1 else "one chunk"
    return Prediction(schedule(stages, links.cross_us), f"{pieces}, {how}")


def small(size: float, nodes: int, gpus: int, links: Links, with_sharp: bool) -> Prediction:
    """Reduce to one GPU of the node, all_reduce on its rail alone, broadcast in the node."""
    across = rail(size, nodes, links, with_sharp)
    ends = node_us("reduce", size, gpus, links) + node_us("broadcast", size, gpus, links)
    return Prediction(ends + across.us, f"leaders, {across.how}")


def hierarchical(size: float, nodes: int, gpus: int, links: Links, with_sharp: bool) -> Prediction:
    """The engine `hierarchical`, in the best of its ways."""
    if nodes == 1:
        return Prediction(node_us("all_reduce", size, gpus, links), "node alone")
    chunks = [each for each in CHUNKS if each < size] + [size]
    found = [chunked(size, nodes, gpus, links, with_sharp, each) for each in chunks]
    return min([*found, small(size, nodes, gpus, links, with_sharp)])


def predict(
    algorithm: Algorithm, size: float, nodes: int, links: Links, gpus: int = GPUS
) -> Prediction:
    """How long an all_reduce takes."""
    if algorithm == "flat ring":
        return nccl_ring(size, nodes, gpus, links)
    if algorithm == "tree":
        return nccl_tree(size, nodes, gpus, links)
    return hierarchical(size, nodes, gpus, links, algorithm != "hierarchical")


def bus_gbps(us: float, size: float, ranks: int) -> float:
    """The bus bandwidth of nccl-tests."""
    return 2 * (ranks - 1) / ranks * size / us / 1e3


def winners(
    nodes: int, links: Links, algorithms: Sequence[Algorithm] = ALGORITHMS
) -> list[tuple[int, Algorithm]]:
    """The fastest algorithm, and from which size on. Of equals, the first."""
    found: list[tuple[int, Algorithm]] = []
    for size in SWEEP:
        best = min(algorithms, key=lambda each: predict(each, size, nodes, links).us)
        if not found or found[-1][1] != best:
            found.append((size, best))
    return found


def calibration(links: Links) -> list[dict[str, Any]]:
    """all_reduce of two GPUs, which is no input: measured, predicted, and the relative error."""
    found: list[dict[str, Any]] = []
    for engine in ("cupy-zc", "nccl"):
        for size, us in _measured(engine, "all_reduce").items():
            told = node_us("all_reduce", size, 2, links)
            if engine == "nccl":
                told = min(nccl_ring(size, 1, 2, links), nccl_tree(size, 1, 2, links)).us
            row = {"engine": engine, "bytes": size, "measured_us": us, "predicted_us": told}
            found.append({**row, "error": told / us - 1})
    return found


def report(links: Links, nodes: Sequence[int] = NODES, sizes: Sequence[int] = SIZES) -> Any:
    """Everything the model says, for a file of JSON."""
    rows = []
    for size, count, each in product(sizes, nodes, ALGORITHMS):
        us, how = predict(each, size, count, links)
        row = {"algorithm": each, "nodes": count, "bytes": size, "us": round(us, 2), "how": how}
        rows.append({**row, "bus_gbps": round(bus_gbps(us, size, count * GPUS), 2)})
    said = {
        "what": "Output of a model, nodes of 8 GPUs. Nothing but its calibration was measured.",
        "links": asdict(links),
        "calibration": calibration(links),
        "winners": {count: winners(count, links) for count in nodes},
        "winners_without_sharp": {count: winners(count, links, ALGORITHMS[:3]) for count in nodes},
        "rows": rows,
    }
    return json.loads(json.dumps(said))  # as it is read from the file


def markdown(said: Any) -> str:
    """The times of a report as a table."""
    cells: dict[tuple[int, int], list[str]] = {}
    for row in said["rows"]:
        told = f"{row['us']:,.0f}" if row["us"] >= 100 else f"{row['us']:.1f}"
        cells.setdefault((row["bytes"], row["nodes"]), []).append(told)
    lines = [["bytes", "nodes", *(f"{each}, us" for each in ALGORITHMS)], ["---"] * 6]
    lines += [[_size(size), f"{count:,}", *told] for (size, count), told in cells.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(said: Any, file: Path) -> None:
    """Plots against nodes: time, and bus bandwidth."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "cupy-zc", "font.size": 9})
    sizes = list(dict.fromkeys(row["bytes"] for row in said["rows"]))
    figure, _ = plt.subplots(2, len(sizes), figsize=(9, 6), layout="constrained")
    lines = (("us", "microseconds", "log"), ("bus_gbps", "bus bandwidth, GB/s", "linear"))
    for axes, ((key, label, scale), size) in zip(figure.axes, product(lines, sizes), strict=True):
        rows = [row for row in said["rows"] if row["bytes"] == size]
        for each, style in zip(ALGORITHMS, (":", "--", "-", "-."), strict=True):
            points = [(row["nodes"], row[key]) for row in rows if row["algorithm"] == each]
            axes.plot(*zip(*points, strict=True), style, marker=".", label=each)
        axes.set(xscale="log", yscale=scale, xlabel="nodes of 8 GPUs", ylabel=label)
        axes.set_title(f"{_size(size)}, model")
    figure.axes[0].legend(fontsize=7)
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()  # so that one sees a plot is old
    told = f"benchmarks/model.py, a model and no measurement, sha256 {digest}"
    figure.savefig(file, metadata={"Date": None, "Description": told})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plot", type=Path, help="draw to this file, an SVG")
    options = parser.parse_args(arguments)
    said = report(measured_links(), options.nodes, options.sizes)
    print(markdown(said))
    if options.json:
        options.json.write_text(json.dumps(said, indent=1) + "\n")
    if options.plot:
        draw(said, options.plot)


if __name__ == "__main__":
    main()
