"""The page of ``cupy-zc view``: one file with everything in it, which asks no server for anything.

The policy in its head forbids the browser to load anything at all. Text from the file is data: it
reaches the page inside JSON, in which no ``<`` is left, and is shown as text.
"""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from string import Template
from typing import Any

from .growth import Group, growing, sentence

__all__ = ["page"]


def page(film: dict[str, Any], found: list[Group], summary: str) -> str:
    """A film as HTML.

    Args:
        film: See :mod:`.film`.
        found: Its groups.
        summary: Text for browsers without scripts.
    """
    grown = [{"text": sentence(group), "key": group.key} for group in growing(found)]
    files = resources.files(__package__) / "static"
    values = {
        "title": escape(film["title"]),
        "style": (files / "page.css").read_text(encoding="utf-8"),
        "script": (files / "page.js").read_text(encoding="utf-8"),
        "summary": escape(summary),
        "data": json.dumps({**film, "growing": grown}).replace("<", "\\u003c"),
    }
    return Template((files / "page.html").read_text(encoding="utf-8")).substitute(values)
