"""``cupy-zc view``: a snapshot or a recording of a pool as text, as a page and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from ..memory.snapshot import render, show_bytes
from .film import film_of, load
from .growth import Group, groups, growing, sentence
from .output import CannotError, console, json_option, print_json
from .page import page

__all__ = ["command", "summary"]

#: Groups that the text shows.
_MOST = 12


@click.command("view")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path), help="Write a page to this file.")
@click.option("--png", type=click.Path(path_type=Path), help="Write a picture to this file.")
@json_option
def command(file: Path, html: Path | None, png: Path | None, *, as_json: bool) -> None:
    """Show what is in a memory pool, where, since when, and what only ever grows.

    FILE is what a program saved, with `pool.record(path=FILE)` around what it does, which also
    works while the program runs, or with `json.dump(pool.snapshot(arrays=True), file)`.

    The page needs no network. It has the segments along the address axis, what is in each block
    under the pointer, and a slider over what was recorded.
    """
    data = load(file)
    film = film_of(data, file.name)
    found = groups(film)
    if html is not None:
        html.write_text(page(film, found, summary(data, film, found)), encoding="utf-8")
    if png is not None:
        _write_png(film, found, png)
    if as_json:
        print_json(
            {
                "file": str(file),
                "kind": film["kind"],
                "seconds": film["seconds"],
                "devices": film["frames"][-1]["devices"],
                "growing": [
                    {**group.as_dict(), "text": sentence(group)} for group in growing(found)
                ],
                "groups": [group.as_dict() for group in found],
            }
        )
        return
    out = console()
    out.print(summary(data, film, found), soft_wrap=True)
    if found:
        out.print(_table(found[:_MOST]))
    for path in (html, png):
        if path is not None:
            out.print(f"wrote {path}", soft_wrap=True)


def summary(data: dict[str, Any], film: dict[str, Any], found: list[Group]) -> str:
    """What the text says first, and a page without scripts: the map, totals, what grows."""
    last = data if film["kind"] == "snapshot" else data["last"]
    return "\n".join([render(last), "", *_totals(film), *_growth(film, found)])


def _totals(film: dict[str, Any]) -> Iterator[str]:
    for figures in film["frames"][-1]["devices"]:
        free, hole = figures["free_bytes"], figures["largest_hole"]
        yield (
            f"device {figures['device']}: {figures['used_blocks']} blocks in use, peak "
            f"{show_bytes(figures['peak_used_bytes'])}; the largest hole is {show_bytes(hole)} of "
            f"{show_bytes(free)} free"
        )
    if film["kind"] == "recording":
        yield f"recorded: {film['seconds']:.3g} s in {len(film['frames'])} looks"
        if film["forgotten"]:
            yield f"forgotten: the {film['forgotten']} blocks that were given back first"


def _growth(film: dict[str, Any], found: list[Group]) -> Iterator[str]:
    if film["kind"] == "snapshot":
        return
    grown = growing(found)
    yield "" if grown else "nothing grows from beginning to end"
    for group in grown:
        yield f"GROWS: {sentence(group)}"


def _table(found: list[Group]) -> Table:
    table = Table(title="what is in use, largest first", title_justify="left", box=None)
    for name in ("bytes", "blocks", "each"):
        table.add_column(name, justify="right")
    for name in ("array", "held by", "from"):
        table.add_column(name, overflow="fold")
    for group in found:
        table.add_row(
            show_bytes(group.bytes),
            str(group.count),
            group.each,
            group.array or "-",
            group.held_by or "-",
            group.site[0] if group.site else "-",
            style="red" if group.grows else None,
        )
    return table


def _write_png(film: dict[str, Any], found: list[Group], path: Path) -> None:
    try:
        from .picture import write_png
    except ImportError as error:
        raise CannotError(
            f"--png needs matplotlib ({error}): pip install 'cupy-zc[plot]'; --html needs nothing"
        ) from error
    write_png(film, found, path)
