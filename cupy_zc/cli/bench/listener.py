"""Hears what the ranks of a run tell, and puts it where it belongs: table, file, progress bar."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import table
from .report import Row, append, show_bytes
from .worker import Plan

__all__ = ["STDOUT", "Listener"]

#: The name of standard output among the files for JSON lines.
STDOUT = Path("-")
_ROOT = Path(__file__).resolve().parents[3]


class Listener:
    """What :func:`.supervisor.supervise` tells comes here.

    Args:
        plan: What is measured.
        file: Gets a JSON line for each figure, at once; :data:`STDOUT` instead of the table.
    """

    def __init__(self, plan: Plan, file: Path | None) -> None:
        self.rows: list[Row] = []
        self._plan = plan
        self._file = file
        self._said: set[str] = set()
        #: Figures that are in no table yet, and the collective of the table that is open.
        self._pending: list[Row] = []
        self._open = ""
        self._progress = _progress(len(plan.collectives) * len(plan.sizes))
        #: The machine, and versions.
        self.about: Row = {
            "benchmark": "collectives",
            "driver": plan.platform,
            "machine": platform.platform(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "commit": _commit(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def showing(self) -> AbstractContextManager[object]:
        """The progress bar, where standard error is a terminal."""
        return nullcontext() if self._progress is None else self._progress

    def __call__(self, kind: str, value: Any) -> None:
        """Take a message."""
        if kind == "about":
            self.about |= value
        elif kind == "unavailable":
            name, reason = value
            self._note(f"{name}: not available: {reason}")
        elif kind == "refused":
            name, collective, reason = value
            self._note(f"{name}, {collective}: not measured: {reason}")
        elif kind == "row":
            self._row(value)
        elif kind == "step":
            self.flush()
            if self._progress is not None:
                self._progress.update(self._progress.task_ids[0], advance=1, description=value)

    def _row(self, row: Row) -> None:
        if self._file == STDOUT:
            click.echo(json.dumps(self.about | row))
        elif self._file is not None:
            append(self._file, self.about | row)
        if "skipped" in row:
            words = f"{row['engine']}, {row['collective']} of {show_bytes(row['asked'])}"
            verdict = "WRONG" if row.get("correct") is False else "not measured"
            self._note(f"{words}: {verdict}: {row['skipped']}")
        self.rows.append(row)
        if row["metric"] == self._plan.metric:
            self._pending.append(row)

    def flush(self) -> None:
        """Print the lines of what was measured since the last time."""
        rows, self._pending = self._pending, []
        if not rows or self._file == STDOUT:
            return
        collective = rows[0]["collective"]
        if collective != self._open:
            self.close_table()
            self._open = collective
            click.echo(table.header(collective, table.about(rows[0], self._plan.platform)))
        for line in table.lines(rows):
            click.echo(line)

    def close_table(self) -> None:
        """Print what stands below the table that is open, if any."""
        of_table = [
            row
            for row in self.rows
            if row["metric"] == self._plan.metric and row["collective"] == self._open
        ]
        if self._open:
            click.echo("\n".join([*table.averages(of_table), ""]))
        self._open = ""

    def _note(self, text: str) -> None:
        """Say something once."""
        if text not in self._said:
            self._said.add(text)
            click.echo(text, err=True)

    @property
    def wrong(self) -> bool:
        """Whether any result was."""
        return any(row.get("correct") is False for row in self.rows)

    def title(self) -> str:
        """Machine and settings in a line or two."""
        about, plan = self.about, self._plan
        gpus = about.get("gpus") or []
        where = f"{len(gpus)} x {gpus[0]}" if gpus else f"{about['cpus']} processors, no GPU"
        op = f", {plan.op}" if any(row.get("op") for row in self.rows) else ""
        how = "graph" if plan.graph else "eager"
        return (
            f"cupy-zc bench: {plan.ranks} ranks, {plan.dtype}{op}, {plan.platform} driver, {how}\n"
            f"{where}; {about['time'][:10]}"
        )


def _progress(steps: int) -> Progress | None:
    """A bar on standard error; None where that is no terminal."""
    if not sys.stderr.isatty():
        return None
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty(),
    )  # fmt: skip
    progress.add_task("starting", total=steps)
    return progress


def _commit() -> str:
    """The commit of a source tree; nothing for an installed package, whose version says it."""
    git = shutil.which("git")
    if git is None or not (_ROOT / ".git").exists():
        return ""
    said = subprocess.run(
        [git, "describe", "--always", "--dirty"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return said.stdout.strip()
