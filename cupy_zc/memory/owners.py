"""Which arrays are in a block, and what keeps them alive.

Python does not tell who holds an object, so all objects the garbage collector knows are asked what
they refer to: once for the arrays, once for the lists and dicts those are in, and so on. That is
for people who look for a leak, not for a loop.
"""

from __future__ import annotations

import collections
import gc
import sys
from collections.abc import Collection, Iterator
from types import CellType, FrameType, GetSetDescriptorType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import cupy

if TYPE_CHECKING:
    from .blocks import Block

__all__ = ["find_arrays"]

#: What a path goes on through; everything else is named and ends it.
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque, CellType, cupy.ndarray)
#: How many containers deep a path may be.
_DEPTH = 4
#: Frames of this package hold arrays only because they look.
_PACKAGE = __name__.partition(".")[0]

#: Who refers to an object, by its id: the referrer, or a path that ends there.
_Holders: TypeAlias = "dict[int, list[Any]]"


class _Path(str):
    """The end of a path: the name of a global or of a local variable."""

    __slots__ = ()


def find_arrays(blocks: Collection[Block]) -> dict[Block, list[dict[str, Any]]]:
    """The arrays in blocks, views left out: shape, dtype, and ``held_by``, as an expression.

    ``held_by`` is a path such as ``__main__.history[3]``, ``<Model>.weights['bias']`` or
    ``local batch of step()``; None where nothing that Python knows of holds the array.

    Args:
        blocks: The ones of interest.
    """
    everything = gc.get_objects()  # once: what is made from here on does not show
    arrays: list[tuple[Block, Any]] = []
    for thing in everything:
        # isinstance() would ask proxies for their class, which runs user code.
        if issubclass(type(thing), cupy.ndarray) and thing.data is not None and thing.base is None:
            block: Block | None = getattr(thing.data.mem, "_block", None)
            if block is not None and block in blocks:
                arrays.append((block, thing))
    holders = _holders(everything, {id(array) for _, array in arrays})
    found: dict[Block, list[dict[str, Any]]] = {}
    for block, array in arrays:
        about = {
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "held_by": _path(array, holders, _DEPTH),
        }
        found.setdefault(block, []).append(about)
    return found


def _holders(everything: list[Any], wanted: set[int]) -> _Holders:
    """Who holds the wanted objects, and who holds the containers among those, and so on."""
    found: _Holders = {}
    variables = list(_variables()) if wanted else []
    for _ in range(_DEPTH if wanted else 0):
        new: _Holders = {}
        for number, path in variables:
            if number in wanted:
                new.setdefault(number, []).append(path)
        for thing in everything:
            for number in map(id, gc.get_referents(thing)):
                if number in wanted:
                    new.setdefault(number, []).append(thing)
        found |= new
        held_by = (holder for holders in new.values() for holder in holders)
        wanted = {id(holder) for holder in held_by if _goes_on(holder)} - found.keys()
        if not wanted:
            break
    return found


def _goes_on(holder: Any) -> bool:
    return issubclass(type(holder), _CONTAINERS)


def _variables() -> Iterator[tuple[int, _Path]]:
    """Globals of modules, then locals of running functions: the id of the value, and its name."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] not in (_PACKAGE, "cupy"):
            for variable, value in list(vars(module).items()):
                yield id(value), _Path(f"{name}.{variable}")
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            inside = at.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE
            if not inside and at.f_code.co_name != "<module>":
                for variable, value in list(at.f_locals.items()):
                    yield id(value), _Path(f"local {variable} of {at.f_code.co_name}()")
            at = at.f_back


def _path(thing: Any, holders: _Holders, depth: int) -> str | None:
    """The first path to an object that ends at a name; else any; else None."""
    loose = None
    for holder in sorted(holders.get(id(thing), ()), key=lambda each: type(each) is not _Path):
        if type(holder) is _Path:
            return str(holder)
        place = _place(holder, thing)
        if not _goes_on(holder):
            return f"<{type(holder).__name__}>{place}"
        if type(holder) is dict:
            owner = next((o for o in holders.get(id(holder), ()) if _attributes(o) is holder), None)
            if owner is not None:
                return f"<{type(owner).__name__}>{_attribute(holder, thing)}"
            if "__builtins__" in holder:  # globals, which have been looked at by name
                continue
        inside = _path(holder, holders, depth - 1) if depth else None
        if inside is not None:
            return f"{inside}{place}"
        loose = f"<{type(holder).__name__}>{place}"
    return loose


def _place(holder: Any, thing: Any) -> str:
    """Where in its holder an object is, as the end of an expression."""
    kind = type(holder)
    if issubclass(kind, cupy.ndarray):
        return ".base"
    if issubclass(kind, (list, tuple, collections.deque)):
        return next((f"[{at}]" for at, each in enumerate(list(holder)) if each is thing), "")
    if issubclass(kind, dict):
        keys = [key for key, each in list(holder.items()) if each is thing]
        simple = bool(keys) and type(keys[0]) in (str, int)
        return f"[{keys[0]!r}]" if simple else "[...]"
    attributes = _attributes(holder)
    return "" if attributes is None else _attribute(attributes, thing)


def _attribute(attributes: dict[str, Any], thing: Any) -> str:
    return next((f".{name}" for name, each in list(attributes.items()) if each is thing), "")


def _attributes(holder: Any) -> dict[str, Any] | None:
    """The attributes of an instance, without running code of its class."""
    for base in type(holder).__mro__:
        descriptor = base.__dict__.get("__dict__")
        if type(descriptor) is GetSetDescriptorType:
            attributes: dict[str, Any] | None = descriptor.__get__(holder)
            return attributes
    return None
