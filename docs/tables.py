"""Parts of pages that are made from the package; here the table of docs/settings.md.

    python docs/tables.py

A part stands between ``<!-- NAME: generated -->`` and ``<!-- NAME: end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from cupy_zc.config import MULTICAST_GUARDS, TABLE

__all__ = ["SECTIONS", "fill", "section"]

PAGE = Path(__file__).parent / "settings.md"


def _pattern(name: str) -> re.Pattern[str]:
    begin, end = f"<!-- {name}: generated -->\n\n", f"<!-- {name}: end -->"
    return re.compile(rf"({begin})(.*?)({end})", re.DOTALL)


def section(page: Path, name: str) -> str:
    """What stands in a page where a part was generated."""
    found = _pattern(name).search(page.read_text())
    if found is None:
        raise ValueError(f"{page.name} has no generated part {name!r}")
    return found[2].rstrip("\n")


def fill(page: Path, parts: Mapping[str, str]) -> None:
    """Write the generated parts of a page anew."""
    text = page.read_text()
    for name, part in parts.items():
        found = _pattern(name).search(text)
        if found is None:
            raise ValueError(f"{page.name} has no generated part {name!r}")
        text = f"{text[: found.end(1)]}{part}\n\n{text[found.start(3) :]}"
    page.write_text(text)


def _settings() -> str:
    lines = ["| variable | default | allowed | meaning |", "|---|---|---|---|"]
    for row in TABLE:
        default = f"`{row.default}`" if row.default else "empty"
        lines.append(f"| `{row.variable}` | {default} | {row.allowed} | {row.meaning} |")
    return "\n".join(lines)


def _guards() -> str:
    return "\n".join(f"* `{name}={value}`" for name, value in MULTICAST_GUARDS.items())


#: Text of the generated parts of the page, by name.
SECTIONS = {"settings": _settings, "guards": _guards}

if __name__ == "__main__":
    fill(PAGE, {name: make() for name, make in SECTIONS.items()})
