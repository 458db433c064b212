"""The plots and tables of docs/performance.md, from the runs in benchmarks/results.

    python docs/plots.py    # needs matplotlib (the extra `plot`)

An SVG names the file it shows and the digest of that file, so that a test sees when it is old.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tables import fill

__all__ = ["PLOTS", "RESULTS", "SECTIONS", "digest", "rows"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
PAGE = ROOT / "docs" / "performance.md"

GPUS, HOST, POOL = "collectives-2xh200", "host-collectives", "pool-h200"
#: Runs, by the plot that shows them.
PLOTS = {"performance-gpus": GPUS, "performance-host": HOST, "performance-pool": POOL}
#: The last column of the table of GPUs: below 1, this package is ahead.
RATIO = "to the best other"

Row = dict[str, Any]


def rows(name: str) -> list[Row]:
    """The figures of one file of results."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def digest(name: str) -> str:
    """What an SVG carries: which runs it shows."""
    data = (RESULTS / f"{name}.jsonl").read_bytes()
    return f"{name}.jsonl sha256 {hashlib.sha256(data).hexdigest()}"


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def _table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    ruled = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in ruled)


def _runs(name: str) -> str:
    """Which runs a section shows."""
    found = {(row["time"], row["commit"]): row for row in rows(name)}
    told = [
        f"{time} at commit {commit.rstrip('+')}"
        + (" with changes not committed" if commit.endswith("+") else "")
        + (f", Python {row['python']}" if "python" in row else "")
        for (time, commit), row in sorted(found.items())
    ]
    return f"Runs: {'; '.join(told)}. File: `benchmarks/results/{name}.jsonl`."


def _gpus() -> str:
    by_size: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    ceilings, host = [], []
    for row in rows(GPUS):
        if row["metric"] == "ceiling":
            ceilings.append((row["name"], row["one_gbps"], row["both_gbps"], row["time"]))
        elif row["metric"] == "device_us" and row["us"] is not None:
            by_size[row["collective"], row["bytes"]][row["engine"]] = row["us"]
        elif row["metric"] == "host_us" and row["us"] is not None:
            host.append((row["collective"], row["engine"], row["us"]))
    engines = list(dict.fromkeys(name for cells in by_size.values() for name in cells))
    lines = []
    for (kind, size), cells in by_size.items():
        best = min(us for name, us in cells.items() if not name.startswith("cupy-zc"))
        figures = (f"{cells[name]:.4g}" if name in cells else "" for name in engines)
        lines.append((kind, _size(size), *figures, f"{cells['cupy-zc'] / best:.2f}"))
    calls = [(engine, f"{us:.1f}") for kind, engine, us in host if kind == "all_reduce"]
    return "\n\n".join(
        (
            _table(["collective", "bytes", *(f"{name}, us" for name in engines), RATIO], lines),
            _table(["an eager all_reduce of 1 KiB", "us of Python thread time"], calls),
            _table(
                ["what the link can do, 256 MiB", "one way, GB/s", "both, GB/s", "in"], ceilings
            ),
            _runs(GPUS),
        )
    )


def _host() -> str:
    lines = [
        (
            row["case"],
            f"{row['ms']:.2f}",
            f"{row['mpi_ms']:.2f}" if "mpi_ms" in row else "",
            f"{row['ratio']:.2f}" if "ratio" in row else "",
        )
        for row in rows(HOST)
    ]
    head = ["case", "cupy-zc, ms", "MPICH, ms", "MPICH / cupy-zc"]
    return f"{_table(head, lines)}\n\n{_runs(HOST)}"


def _pool_cases() -> dict[str, list[Row]]:
    cases: dict[str, list[Row]] = defaultdict(list)
    for row in rows(POOL):
        cases[row["case"]].append(row)
    return cases


def _pool() -> str:
    lines = [
        (
            case,
            ", ".join(f"{row['us']:.2f}" for row in found),
            ", ".join(f"{row['cupy_us']:.2f}" for row in found),
            f"{statistics.median(row['ratio'] for row in found):.2f}",
        )
        for case, found in _pool_cases().items()
    ]
    head = ["case", "this pool, us", "CuPy's pool, us", "median ratio"]
    return f"{_table(head, lines)}\n\n{_runs(POOL)}"


#: Text of the generated sections of the page, by name.
SECTIONS = {"gpus": _gpus, "host": _host, "pool": _pool}


def _draw_gpus(axes: Any) -> None:
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows(GPUS):
        measured = row["metric"] == "device_us" and row["us"] is not None
        if measured and row["collective"] == "all_reduce" and row["engine"] != "cupy-zc-plain":
            lines[row["engine"]].append((row["bytes"], row["us"]))
    for engine, points in lines.items():
        own = engine == "cupy-zc"
        style = {"color": "black", "linewidth": 2.2, "zorder": 3} if own else {"linewidth": 1}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=engine, **style)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds")
    axes.set_title("all_reduce between two H200")
    axes.legend()


def _draw_host(axes: Any) -> None:
    both = [row for row in rows(HOST) if "mpi_ms" in row]
    for shift, key, label in ((-0.2, "ms", "cupy-zc, host engine"), (0.2, "mpi_ms", "MPICH")):
        axes.bar(
            [n + shift for n in range(len(both))], [row[key] for row in both], 0.4, label=label
        )
    axes.set_xticks(range(len(both)), [row["case"].removeprefix("all_reduce ") for row in both])
    axes.set(ylabel="milliseconds")
    axes.set_title("all_reduce without a GPU, four processes")
    axes.legend()


def _draw_pool(axes: Any) -> None:
    cases = _pool_cases()
    for at, found in enumerate(cases.values()):
        axes.plot([row["ratio"] for row in found], [at] * len(found), "o", color="C0")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(cases)), list(cases))
    axes.set(xlabel="time of this pool / time of CuPy's pool", xlim=(0.8, 2.1))
    axes.set_title("the memory pool, H200: a point is a run")


def main() -> None:
    """Draw the plots, and fill the page."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "cupy-zc", "font.size": 9})
    drawings = (_draw_gpus, _draw_host, _draw_pool)
    for (plot, name), draw in zip(PLOTS.items(), drawings, strict=True):
        figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
        draw(axes)
        about = {"Date": None, "Description": digest(name), "Title": axes.get_title()}
        figure.savefig(IMAGES / f"{plot}.svg", metadata=about)
        plt.close(figure)
    fill(PAGE, {name: section() for name, section in SECTIONS.items()})


if __name__ == "__main__":
    main()
