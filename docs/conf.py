"""How Sphinx builds these pages: ``make docs``. Every warning is an error there.

A name of the package that is shown in the reference and has no docstring is a warning as well.
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

import cupy_zc

_log = logging.getLogger(__name__)

project = "cupy-zc"
author = "The cupy-zc developers"
copyright = author  # noqa: A001 - the name that Sphinx wants
version = release = cupy_zc.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"cupy-zc {release}"

autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

#: Names of other packages: nothing of them is looked up, as that would need the network.
nitpick_ignore_regex = [
    (r"py:.*", r"(cupy|numpy|np|mpi4py|collections|contextlib|types|typing|typing_extensions)\..*"),
    (r"py:.*", r"(Any|Self|Callable|Mapping|Sequence|Iterator|TracebackType|ExitStack)"),
    (r"py:.*", r"(bool|bytes|dict|float|int|list|object|str|tuple|type|None|optional)"),
    (
        r"py:class",
        r"os\.PathLike|cupy_zc\.(driver\.api\.Driver|memory\..*|.*\.Segment)|PooledMemory",
    ),
    (r"py:exc", r"(ValueError|TypeError|TimeoutError|Exception|BaseException)"),
]


def _insist_on_words(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    if what != "attribute" and not any(line.strip() for line in lines):
        _log.warning("%s %s has no docstring", what, name)


def setup(app: Sphinx) -> None:
    """Ask for a docstring of everything in the reference."""
    app.connect("autodoc-process-docstring", _insist_on_words)
