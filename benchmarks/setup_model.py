"""Set-up on paper: what it sends and keeps, for one rank of 8 to 32,768 on nodes of 8. No data.

    python benchmarks/setup_model.py [--json benchmarks/results/setup-model.json]
                                     [--plot docs/images/setup.svg]

Over the TCP store. One rank is real, with others made up for it: see `setup_job.py`. Rank 0's store
is real as well, with a socket for each rank, as far as one process can have them. Left out is what
the ranks of a node tell each other by themselves, which does not depend on the number of nodes.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import platform
import socket
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from setup_job import LIMIT, LOCAL, Gather, Job, Plan, open_channels, set_up, together

from cupy_zc.collectives.acts import Shape, Sizes, World
from cupy_zc.collectives.plan import Operation
from cupy_zc.collectives.schedule import Schedules
from cupy_zc.group import bootstrap_tcp
from cupy_zc.group.bootstrap import Offer
from cupy_zc.group.bootstrap_mpi import _HEAD
from cupy_zc.group.tcp_store import Store
from cupy_zc.group.waiting import Wait
from cupy_zc.group.wire import FrameReader, Kind, frame, pack_offer, unpack_offers

__all__ = [
    "RANKS", "bytes_by_mpi", "digest", "draw", "gathers_by_mpi", "gathers_of", "main",
    "measure_rank", "measure_schedules", "measure_store", "of_a_rank", "of_rank_0", "of_steps",
    "report", "size_of",
]  # fmt: skip

RANKS = (8, 64, 512, 4096, 32768)
#: Ranks for which one process can have the sockets, at both ends.
MOST_SOCKETS = 4096
#: What calls are for.
STEPS = {
    "": "handshakes with three stores",
    "all_gather('identity')": "machines",
    "all_gather('devices of the ranks')": "GPUs",
    "all_gather('vote')": "votes",
    "split(), addresses": "addresses of the stores of nodes and rails",
    "broadcast(root=0)": "ids of NCCL",
    "barrier()": "barriers",
}

_T = TypeVar("_T")


def _traced(do: Callable[[], _T]) -> tuple[_T, int, int]:
    """What something gives, the bytes that are kept of it, and those it had at its peak."""
    gc.collect()  # else what is freed may be used again, and not be seen
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = do()
        kept, peak = (size - before for size in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    return made, kept, peak


def _run(job: Job) -> Plan:
    with job.playing():
        return set_up(job.meet())


def measure_rank(job: Job) -> dict[str, Any]:
    """The set-up of one rank. What others say is made up before, and not measured."""
    _run(job).close()
    began = time.perf_counter()
    _run(job).close()
    seconds = time.perf_counter() - began
    plan, kept, peak = _traced(lambda: _run(job))
    plan.close()
    gathers = [each for log in job.log.values() for each in log]
    return {
        "sent": sum(each.sent for each in gathers),
        "received": sum(each.received for each in gathers),
        "steps": _by_step(gathers),
        "kept": kept,
        "peak": peak,
        "seconds": round(seconds, 3),
    }


def _by_step(gathers: Sequence[Gather]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in gathers:
        step = STEPS.get(each.call, "options")
        found[step] = found.get(step, 0) + each.received
    return found


def gathers_of(job: Job) -> list[list[Offer]]:
    """What all ranks give, by gather of all of them. ``job`` was measured."""
    answers = [answer for (group, _), answer in job.answers.items() if group == "all"]
    frames = [next(FrameReader(LIMIT).feed(answer)) for answer in answers]
    return [unpack_offers(payload, job.ranks) for _, payload in frames]


def gathers_by_mpi(job: Job) -> list[list[Offer]]:
    """The same over MPI, where the ranks have met, and the groups of a split have a tag."""
    tags = [Offer(b"split(), tags", bytes(8))] * job.ranks
    return [
        tags if offers[0].call == b"split(), addresses" else offers
        for offers in gathers_of(job)[1:]
        if b"open the store" not in offers[0].payload
    ]


def bytes_by_mpi(job: Job) -> int:
    """What rank 0 receives over MPI: of each rank a head, and what it gives where that differs."""
    received = 0
    for first, *others in gathers_by_mpi(job):
        differ = [pack_offer(offer) for offer in others if offer != first]
        received += _HEAD.size * len(others) + sum(map(len, differ))
    return received


def measure_store(job: Job) -> dict[str, Any]:
    """Rank 0's store with all ranks connected to it."""
    answers = [answer for (group, _), answer in job.answers.items() if group == "all"]
    said = {"out": sum(map(len, answers)) * job.ranks}
    if job.ranks > MOST_SOCKETS:
        return said
    gathers = gathers_of(job)
    began = time.perf_counter()
    received = _serve(job.ranks, gathers)
    seconds = time.perf_counter() - began
    assert received == said["out"]
    _, _, peak = _traced(lambda: _serve(job.ranks, gathers))
    return {**said, "peak": peak, "seconds": round(seconds, 2)}


def _serve(ranks: int, gathers: Sequence[Sequence[Offer]]) -> int:
    """Make gathers on a store, and count the bytes of answers."""
    received = 0
    with ExitStack() as stack:
        store = Store("127.0.0.1", 0, ranks, b"")
        stack.callback(store.close)
        connections: list[bootstrap_tcp._Connection] = []
        for rank in range(ranks):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", store.port)))
            connections.append(bootstrap_tcp._Connection(raw))
            bootstrap_tcp._shake_hands(connections[-1], rank, ranks, b"", Wait("set-up", 60.0))
            connections[-1].reader.limit = LIMIT
        for offers in gathers:
            for connection, offer in zip(connections, offers, strict=True):
                connection.send(Kind.GATHER, pack_offer(offer), 60.0)
            for connection in connections:
                answer = connection.receive(60.0)
                assert answer is not None
                received += len(frame(*answer))
    return received


def measure_schedules(ranks: int) -> dict[str, Any]:
    """What a rank keeps of schedules, when it has called as many as there is room for."""
    nodes = [tuple(range(first, first + LOCAL)) for first in range(0, ranks, LOCAL)]
    world, sizes = World(len(nodes), LOCAL, 0, 0, tuple(nodes)), Sizes()

    def fill() -> tuple[Schedules, int]:
        kept, calls, acts = Schedules(world, sizes), 0, 0
        while len(kept._made) == calls:
            calls += 1
            columns = sizes.scratch // ranks + calls  # of one byte, too many for scratch
            plan = kept.of(Shape(Operation.REDUCE_SCATTER, columns, 1, 0, False, 0, False))
            assert plan is not None
            acts = len(plan.acts)
        return kept, acts

    (_, acts), _, peak = _traced(fill)
    return {"acts": acts, "peak": peak}


def report(ranks: Sequence[int] = RANKS) -> Any:
    """Everything, for a file of JSON."""
    rows = []
    for count in ranks:
        job = Job(count)
        row: dict[str, Any] = {"ranks": count, "rank": measure_rank(job)}
        row["store"] = measure_store(job)
        row["mpi"] = bytes_by_mpi(job)
        # On rank 0's node are the stores of all rails too: of each, the first rank keeps one.
        members = {"all": count, "node": LOCAL, "rail": count}
        row["host_out"] = sum(
            each.received * members[group] for group, log in job.log.items() for each in log
        )
        if count > LOCAL:
            row["schedules"] = measure_schedules(count)
        rows.append(row)
    said = {
        "what": "Set-up over the TCP store, nodes of 8 ranks: bytes, and seconds of one process.",
        "python": platform.python_version(),
        "channels": max(
            sum(each.received for each in log if each.call.startswith("all_gather"))
            for log in together(LOCAL, open_channels)
        ),
        "rows": rows,
    }
    return json.loads(json.dumps(said))  # as it is read from the file


def size_of(nbytes: float) -> str:
    """In words, with three digits."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1, "B"))
    unit, name = next((each for each in units if nbytes >= each[0]), units[-1])
    return f"{float(f'{nbytes / unit:.3g}'):g} {name}"


def _table(lines: Sequence[Sequence[str]]) -> str:
    first, *others = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [first, ["---"] * len(first), *others])


def of_a_rank(said: Any) -> str:
    """The rows of a report as a table: a rank."""
    lines = [
        ["ranks", "sends", "receives", "the same by MPI", "keeps", "at its peak",
         "schedules, at most", "works"],
    ]  # fmt: skip
    for row in said["rows"]:
        rank = row["rank"]
        told = [rank["sent"], rank["received"], row["mpi"], rank["kept"], rank["peak"]]
        schedules = size_of(row["schedules"]["peak"]) if "schedules" in row else ""
        lines.append(
            [f"{row['ranks']:,}", *map(size_of, told), schedules, f"{1e3 * rank['seconds']:.0f} ms"]
        )
    return _table(lines)


def of_rank_0(said: Any) -> str:
    """The rows of a report as a table: the store of rank 0."""
    lines = [["ranks", "sends", "sends, with other stores of the host", "at its peak", "works"]]
    for row in said["rows"]:
        store = row["store"]
        told = [f"{row['ranks']:,}", size_of(store["out"]), size_of(row["host_out"])]
        told += (
            [size_of(store["peak"]), f"{store['seconds']:.1f} s"] if "peak" in store else ["", ""]
        )
        lines.append(told)
    return _table(lines)


def of_steps(said: Any) -> str:
    """What a rank receives in each step, as a table."""
    columns = [row["rank"]["steps"] for row in said["rows"]]
    lines = [["step", *(f"{row['ranks']:,}" for row in said["rows"])]]
    lines += [
        [step, *(size_of(each[step]) if step in each else "" for each in columns)]
        for step in sorted(columns[-1], key=lambda step: -columns[-1][step])
    ]
    return _table(lines)


def draw(said: Any, file: Path) -> None:
    """Plots against ranks: bytes and memory."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "cupy-zc", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    lines: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (left, "a rank receives", lambda row: row["rank"]["received"]),
        (left, "rank 0's store sends", lambda row: row["store"]["out"]),
        (right, "a rank, at its peak", lambda row: row["rank"]["peak"]),
        (right, "rank 0's store, at its peak", lambda row: row["store"].get("peak")),
    ]
    for axes, label, value in lines:
        points = [(row["ranks"], value(row)) for row in said["rows"] if value(row)]
        axes.plot(*zip(*points, strict=True), marker=".", label=label)
    for axes, title in ((left, "bytes of set-up"), (right, "host memory, bytes")):
        axes.set(xscale="log", yscale="log", xlabel="ranks, 8 a node", title=title)
        axes.legend(fontsize=7)
    told = f"benchmarks/setup_model.py, sha256 {digest(said)}"
    figure.savefig(file, metadata={"Date": None, "Description": told})
    plt.close(figure)


def digest(said: Any) -> str:
    """By which one sees whether a plot is that of a report."""
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="multiples of 8")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plot", type=Path, help="draw to this file, an SVG")
    options = parser.parse_args(arguments)
    said = report(options.ranks)
    print(*(table(said) for table in (of_a_rank, of_rank_0, of_steps)), sep="\n\n")
    if options.json:
        options.json.write_text(json.dumps(said, indent=1) + "\n")
    if options.plot:
        draw(said, options.plot)


if __name__ == "__main__":
    main()
