"""``cupy-zc doctor``: what this machine offers to zero-copy, what it lacks, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..memory.snapshot import show_bytes
from .checks import (
    Devices,
    Finding,
    Machine,
    Status,
    look_at_devices,
    look_at_machine,
    look_at_network,
    look_at_software,
)
from .checks.switch import probe
from .output import Exit, console, json_option, print_json
from .ranks import rank_table

__all__ = ["command", "verdict"]

_STYLES = {Status.OK: "green", Status.LIMITED: "yellow", Status.MISSING: "bold red"}


@click.command("doctor", epilog="Ranks: mpiexec -n 4 cupy-zc doctor --rank-table")
@click.option(
    "--rank-table", "table", is_flag=True, help="Compare the ranks instead, under mpiexec."
)
@click.option("--multicast", is_flag=True, help="Try multicast, which makes multicast objects.")
@json_option
@click.pass_context
def command(ctx: click.Context, *, table: bool, multicast: bool, as_json: bool) -> None:
    """Look at this machine: software, GPUs, links, multicast, limits, container, network.

    A line is OK; or limited: zero-copy between GPUs works, and something that could be is not; or
    missing: without it there is no zero-copy between GPUs. Exit code 1 where a line is missing, or
    where the ranks differ.

    No multicast object is created without --multicast. Where there are several GPUs, a process of
    its own makes a communicator of them and tests every link.
    """
    if table:
        ctx.exit(rank_table(as_json=as_json))
    machine = Machine()
    devices = look_at_devices(probe=probe if multicast else None)
    findings = [
        *look_at_software(machine),
        *devices.findings,
        *look_at_machine(machine),
        *look_at_network(machine),
    ]
    if as_json:
        print_json(_as_dict(devices, findings))
    else:
        _show(console(), devices, findings)
    ctx.exit(_code(findings))


def verdict(findings: Sequence[Finding]) -> str:
    """The report in a sentence."""
    missing = [finding.name for finding in findings if finding.status is Status.MISSING]
    if missing:
        return f"No zero-copy between GPUs here. Missing: {', '.join(missing)}."
    limited = sum(finding.status is Status.LIMITED for finding in findings)
    return f"Zero-copy between GPUs works here. {limited} of {len(findings)} lines are limited."


def _code(findings: Sequence[Finding]) -> int:
    bad = any(finding.status is Status.MISSING for finding in findings)
    return int(Exit.FINDING if bad else Exit.OK)


def _as_dict(devices: Devices, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "verdict": verdict(findings),
        "findings": [finding.as_dict() for finding in findings],
        "devices": list(devices.table),
        "peers": [[None if way is None else asdict(way) for way in row] for row in devices.matrix],
    }


def _show(out: Console, devices: Devices, findings: Sequence[Finding]) -> None:
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            out.print(Text(topic, style="bold"))
        line = Text("  ")
        line.append(f"{finding.status.value:<8}", style=_STYLES[finding.status])
        line.append(f"{finding.name}: {finding.found}")
        out.print(line, soft_wrap=True)
        if finding.means and finding.status is not Status.OK:
            out.print(Text(f"            means: {finding.means}"), soft_wrap=True)
        if finding.remedy and finding.status is not Status.OK:
            out.print(Text(f"            do:    {finding.remedy}"), soft_wrap=True)
    if devices.table:
        out.print()
        out.print(_device_table(devices))
    if len(devices.matrix) > 1:
        out.print()
        out.print(_peer_table(devices))
    out.print()
    out.print(Text(verdict(findings), style="bold"), soft_wrap=True)


def _device_table(devices: Devices) -> Table:
    table = Table(title="GPUs", title_justify="left", box=None)
    yes = {
        "posix_fd": "POSIX fd", "fabric": "FABRIC", "gpu_direct_rdma": "RDMA",
        "multicast": "multicast",
    }  # fmt: skip
    for name in ("#", "name", "capability", "free of total", *yes.values(), "UUID"):
        table.add_column(name, overflow="fold")
    for row in devices.table:
        memory = f"{show_bytes(row['free'])} of {show_bytes(row['total'])}"
        answers = ["yes" if row[name] else "no" for name in yes]
        about = [str(row["device"]), row["name"], row["capability"], memory]
        table.add_row(*about, *answers, row["uuid"])
    return table


def _peer_table(devices: Devices) -> Table:
    table = Table(title="from GPU (row) to memory of GPU (column)", title_justify="left", box=None)
    table.add_column("")
    for column in range(len(devices.matrix)):
        table.add_column(str(column))
    for number, row in enumerate(devices.matrix):
        cells = []
        for peer, way in enumerate(row):
            atomics = "" if way is None or way.atomics else ", no atomics"
            cell = "?" if way is None else f"P2P{atomics}" if way.access else "no"
            cells.append("-" if peer == number else cell)
        table.add_row(str(number), *cells)
    return table
