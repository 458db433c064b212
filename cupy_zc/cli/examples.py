"""The examples, as `cupy-zc demo` and `cupy-zc selftest` run them: the files, as a person would.

A source tree has them in ``examples/``, an installed wheel in ``cupy_zc/_examples``.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .output import CannotError

__all__ = ["EXAMPLES", "Example", "facts", "mpiexec"]

_PACKAGE = Path(__file__).resolve().parents[1]
#: Where to look, in this order.
_PLACES = (_PACKAGE / "_examples", _PACKAGE.parent / "examples")


@dataclass(frozen=True, slots=True)
class Example:
    """One of the programs. Each checks its own result, and says so in its exit status."""

    file: str
    title: str
    #: Ranks of a demo; 1 starts it without mpiexec.
    ranks: int
    #: What it imports besides this package, by import name and by what pip calls it.
    needs: tuple[tuple[str, str], ...] = ()
    #: Arguments that make it short.
    short: tuple[str, ...] = ()

    def command(self, ranks: int, arguments: Sequence[str]) -> list[str]:
        """How it is started.

        Raises:
            CannotError: something that it needs is not installed.
        """
        missing = self.missing()
        if missing:
            raise CannotError(f"{self.file} needs {missing}")
        found = [place / self.file for place in _PLACES if (place / self.file).is_file()]
        if not found:
            places = " or ".join(map(str, _PLACES))
            raise CannotError(f"there is no {self.file} in {places}; reinstall cupy-zc")
        launch = [] if self.ranks == 1 else [mpiexec() or "mpiexec", "-n", str(ranks)]
        return [*launch, sys.executable, str(found[0]), *arguments]

    def missing(self) -> str:
        """What is not installed, with the command that installs it; empty where nothing is."""
        needs = (*self.needs, *([("mpi4py", "mpi4py")] if self.ranks > 1 else []))
        lacks = [pip for module, pip in needs if importlib.util.find_spec(module) is None]
        if self.ranks > 1 and mpiexec() is None:
            lacks.append("mpiexec")
        if not lacks:
            return ""
        return f"{', '.join(lacks)}: pip install 'cupy-zc[examples,mpi]'"


#: By the name that the command line has for them.
EXAMPLES = {
    "digits": Example(
        "data_parallel_digits.py", "training on several ranks with an all-reduced gradient", 4,
        (("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")), ("--steps", "150"),
    ),
    "poisson": Example(
        "conjugate_gradient.py", "a solver that swaps edges and adds up scalars", 4,
        (("scipy", "scipy"),), ("--size", "33"),
    ),
    "graph": Example(
        "cuda_graph.py", "an iteration captured into a CUDA graph and replayed", 2,
        short=("--size", "48", "--iterations", "50"),
    ),
    "pool": Example("pool_map.py", "where arrays lie in the memory pool", 1),
    "leak": Example("leak.py", "a leak, recorded for cupy-zc view", 1, short=("--steps", "10")),
}  # fmt: skip


def mpiexec() -> str | None:
    """The launcher that belongs to this Python, or the first in PATH; None where there is none."""
    own = Path(sys.executable).with_name("mpiexec")
    return str(own) if own.exists() else shutil.which("mpiexec")


def facts(text: str) -> dict[str, str]:
    """What an example printed: lines of a name, two spaces or more, and a value."""
    lines = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in text.splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 2}


def run(
    command: Sequence[str], *, timeout: float | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run an example and keep what it says.

    Raises:
        CannotError: it cannot be started, or did not end in time.
    """
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, cwd=cwd, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CannotError(f"it did not end in {timeout:g} s") from error
    except OSError as error:
        raise CannotError(f"it cannot be started: {error}") from error
