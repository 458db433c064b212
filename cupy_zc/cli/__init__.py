"""``cupy-zc``, also ``python -m cupy_zc``: what a person sees of the package.

A command is a module here that defines ``command``; :mod:`.app` has the list, and imports a module
when its command is used. What a command prints is said in two forms: text, and with ``--json`` one
JSON value on standard output with the same facts.
"""

from __future__ import annotations

from .app import main

__all__ = ["main"]
