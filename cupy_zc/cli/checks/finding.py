"""A finding: what is there, what it means for zero-copy, and what to do."""

from __future__ import annotations

import enum
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Finding", "Machine", "Status"]


class Status(enum.Enum):
    """How something is."""

    OK = "OK"
    #: Zero-copy between the GPUs of this machine works, and something that could be is not.
    LIMITED = "limited"
    #: Without it there is no zero-copy between GPUs here.
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    topic: str
    name: str
    status: Status
    #: What was found, with the words of who was asked.
    found: str
    #: What that means for zero-copy; empty where the status says it all.
    means: str = ""
    #: What to do; empty where nothing needs to be done.
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return {
            "topic": self.topic,
            "name": self.name,
            "status": self.status.value,
            "found": self.found,
            "means": self.means,
            "do": self.remedy,
        }


@dataclass(frozen=True, slots=True)
class Machine:
    """What is asked about the machine itself; tests put another one in its place."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    #: ``resource.getrlimit``.
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit

    def path(self, name: str) -> Path:
        """The file that is called ``/name`` there."""
        return self.root / name

    def read(self, name: str) -> str:
        """The text of a file; empty where there is none, or it may not be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def entries(self, name: str) -> list[str]:
        """The names in a folder; none where there is no such folder, or it may not be read."""
        try:
            return sorted(entry.name for entry in self.path(name).iterdir())
        except OSError:
            return []
