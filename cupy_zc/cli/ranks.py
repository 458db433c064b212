"""``cupy-zc doctor --rank-table``: what each rank is and sees, and where they differ."""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cupy
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..config import multicast_refusal, settings
from ..driver import select
from ..driver.cuda_reports import driver_version
from ..errors import DriverError
from ..group import discover, from_mpi
from ..group.naming import sides
from .checks import Finding, Status
from .output import Exit, console, print_json

__all__ = ["compare", "here", "rank_table"]

#: What must be equal on all ranks, and what comes of it where it is not.
_EQUAL = {
    "cupy_zc": (Status.MISSING, "ranks may not understand each other", "install one version"),
    "driver": (Status.MISSING, "they cannot make a communicator", "set CUPY_ZC_DRIVER alike"),
    "cupy": (Status.LIMITED, "kernels may be compiled differently", "install one version"),
    "cuda": (Status.LIMITED, "what one driver can, another may not", "install one driver"),
    "python": (Status.LIMITED, "nothing by itself; it hints at other differences", ""),
    "multicast": (Status.LIMITED, "all ranks go without multicast", "set the switch alike"),
    "settings": (Status.LIMITED, "deadlines and segments differ", "set CUPY_ZC_... alike"),
}


def here() -> dict[str, Any]:
    """What this rank is and sees."""
    chosen = select(None)
    try:
        cuda = driver_version()
    except DriverError:
        cuda = "none"
    devices = [chosen.device_info(device) for device in range(chosen.device_count())]
    common = replace(settings(), secret="")
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "cupy_zc": __version__,
        "cupy": cupy.__version__,
        "cuda": cuda,
        "driver": chosen.name,
        "current_device": chosen.current_device(),
        "gpus": [info.uuid.hex() for info in devices] if chosen.name == "cuda" else [],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "all"),
        "multicast": multicast_refusal() or "not off",
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "settings": repr(common),
    }


def compare(said: Sequence[dict[str, Any]], node_of: Sequence[int]) -> list[Finding]:
    """Where ranks differ, and should not. Pure.

    Args:
        said: :func:`here` of each rank.
        node_of: For each rank, the number of its node.
    """
    findings = []
    for name, (status, means, remedy) in _EQUAL.items():
        values = {rank: str(each[name]) for rank, each in enumerate(said)}
        if len(set(values.values())) > 1:
            findings.append(Finding("ranks", name, status, sides(values, "has"), means, remedy))
        else:
            findings.append(Finding("ranks", name, Status.OK, "equal on all ranks"))
    findings += [_visible(said, node_of), _shared(said)]
    return findings


def _visible(said: Sequence[dict[str, Any]], node_of: Sequence[int]) -> Finding:
    sights: dict[int, set[tuple[str, ...]]] = {}
    for each, node in zip(said, node_of, strict=True):
        sights.setdefault(node, set()).add(tuple(sorted(each["gpus"])))
    different = any(len(sight) > 1 for sight in sights.values())
    if not different:
        return Finding("ranks", "visible GPUs", Status.OK, "equal on all ranks of a node")
    values = {rank: f"CUDA_VISIBLE_DEVICES={each['visible']}" for rank, each in enumerate(said)}
    return Finding(
        "ranks", "visible GPUs", Status.MISSING, sides(values, "has"),
        "a rank cannot map the memory of a GPU that it does not see",
        "show every GPU of a node to all of its ranks, and choose with cupy.cuda.Device(n).use()",
    )  # fmt: skip


def _shared(said: Sequence[dict[str, Any]]) -> Finding:
    users: dict[str, list[int]] = {}
    for rank, each in enumerate(said):
        if each["gpus"]:
            users.setdefault(each["gpus"][each["current_device"]], []).append(rank)
    crowded = [ranks for ranks in users.values() if len(ranks) > 1]
    if not crowded:
        found = "no two ranks share one" if users else "there is none"
        return Finding("ranks", "current GPU", Status.OK, found)
    return Finding(
        "ranks", "current GPU", Status.LIMITED,
        "; ".join(f"ranks {', '.join(map(str, ranks))} have the same" for ranks in crowded),
        "they take turns on it, and share its memory",
        "call cupy.cuda.Device(local_rank).use() before anything else; this command did not",
    )  # fmt: skip


def rank_table(*, as_json: bool) -> int:
    """Compare the ranks that mpiexec started; rank 0 prints. The exit code, equal on all."""
    with from_mpi() as group:
        topology = discover(group)
        own = json.dumps(here()).encode()
        said = [json.loads(each) for each in group.all_gather(own, tag="rank table")]
        rank = group.rank
    findings = compare(said, topology.node_of)
    bad = any(finding.status is Status.MISSING for finding in findings)
    if rank == 0 and as_json:
        ranks = [{"node": node, **s} for s, node in zip(said, topology.node_of, strict=True)]
        print_json({"ranks": ranks, "findings": [finding.as_dict() for finding in findings]})
    elif rank == 0:
        _show(said, topology.node_of, findings)
    return int(Exit.FINDING if bad else Exit.OK)


def _show(
    said: Sequence[dict[str, Any]], node_of: Sequence[int], findings: Sequence[Finding]
) -> None:
    out = console()
    table = Table(box=None)
    names = ("host", "pid", "driver", "current_device", "cuda", "cupy", "visible", "open_files")
    for name in ("rank", "node", *names):
        table.add_column(name.replace("_", " "), overflow="fold")
    for rank, (each, node) in enumerate(zip(said, node_of, strict=True)):
        table.add_row(str(rank), str(node), *(str(each[name]) for name in names))
    out.print(table)
    out.print()
    if len(said) == 1:
        out.print("one rank only: start several with mpiexec -n 4 cupy-zc doctor --rank-table")
    for finding in findings:
        line = Text(f"  {finding.status.value:<8}{finding.name}: {finding.found}")
        out.print(line, soft_wrap=True)
        if finding.status is not Status.OK:
            out.print(Text(f"            means: {finding.means}"), soft_wrap=True)
            if finding.remedy:
                out.print(Text(f"            do:    {finding.remedy}"), soft_wrap=True)
