"""Finds the sources of the CUDA kernels.

An installed wheel holds them in ``cupy_zc/_kernels``; in a source tree, and in an editable install
of one, they are in ``cuda/`` beside the package.
"""

from __future__ import annotations

from pathlib import Path

from .errors import InvalidValueError

__all__ = ["path", "source"]

_PACKAGE = Path(__file__).resolve().parent
#: Where to look, in this order.
_PLACES = (_PACKAGE / "_kernels", _PACKAGE.parent / "cuda")


def path(name: str) -> Path:
    """The file of a kernel source.

    Args:
        name: Its file name, for instance ``"pattern.cu"``.

    Raises:
        InvalidValueError: there is no such file in either place, or the name is not a file name.
    """
    if Path(name).name == name:
        for place in _PLACES:
            if (place / name).is_file():
                return place / name
    places = " or ".join(str(place) for place in _PLACES)
    raise InvalidValueError("kernels.path", "name", name, f"the name of a file in {places}")


def source(name: str) -> str:
    """The text of a kernel source; arguments and errors as for :func:`path`."""
    return path(name).read_text(encoding="utf-8")
