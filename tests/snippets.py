"""The Python of the README and of docs/*.md: each block, and how its text says it is run.

A block runs by itself in a process of its own, unless the line above it says more. That line is
part of the page, so a reader sees it too:

    *... `mpiexec -n 2 python work.py` ...:*     run so, on that many ranks
    *Needs a GPU:*   *Needs two GPUs:*           run where there are as many
    *Not run by the tests: WHY.*                 skipped, for that reason
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Snippet", "snippets"]

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(r"(?:^(\*[^\n]+\*)\n\n?)?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_RANKS = re.compile(r"`mpiexec -n (\d+) python work\.py`")
_SKIPPED = re.compile(r"\*Not run by the tests: (.+)\.\*")
_GPUS = {"*Needs a GPU:*": "gpu", "*Needs two GPUs:*": "multi_gpu"}


@dataclass(frozen=True, slots=True)
class Snippet:
    """One block."""

    name: str
    code: str
    #: How many processes; 1 is one without an MPI.
    ranks: int = 1
    #: The marker of what it needs, and why it is not run at all; empty for nothing.
    marker: str = ""
    skipped: str = ""


def snippets(page: Path) -> list[Snippet]:
    """The blocks of a page, in order.

    Raises:
        ValueError: a line above a block begins like one of the above and is none.
    """
    found = []
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        said, code = match[1] or "", match[2]
        name = f"{page.name}:{text.count(chr(10), 0, match.start(2)) + 1}"
        ranks, skipped = _RANKS.search(said), _SKIPPED.fullmatch(said)
        if said.startswith(("*Needs", "*Not run")) and not (said in _GPUS or skipped):
            raise ValueError(f"{name}: nobody knows how to run this: {said}")
        found.append(
            Snippet(
                name,
                code,
                int(ranks[1]) if ranks else 1,
                _GPUS.get(said, ""),
                skipped[1] if skipped else "",
            )
        )
    return found
