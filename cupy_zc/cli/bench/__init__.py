"""``cupy-zc bench``: one harness for collectives of this package and of others.

:mod:`.options` reads the command line into a plan, :mod:`.supervisor` has a process started for
each rank, :mod:`.worker` is what runs there: it makes the engines and measures them by turns. An
engine is one file that enqueues collectives of some library, :mod:`.api` what it must do.
"""

from __future__ import annotations

from .main import command

__all__ = ["command"]
