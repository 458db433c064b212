"""Multicast is off, for every library, in every process that measures.

A benchmark that makes multicast objects and dies can leave the switch of a machine without slots,
for everybody on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping

from ...config import MULTICAST_GUARDS

__all__ = ["guarded", "overruled", "unguarded"]


def unguarded(environment: Mapping[str, str]) -> list[str]:
    """The switches that are not set, as ``NAME=value``."""
    wanted = MULTICAST_GUARDS.items()
    return [f"{name}={value}" for name, value in wanted if environment.get(name) != value]


def overruled(environment: Mapping[str, str]) -> list[str]:
    """The switches that are set to something else, as they should be."""
    return [each for each in unguarded(environment) if environment.get(each.partition("=")[0])]


@contextlib.contextmanager
def guarded(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Set all switches, for the processes that are started meanwhile."""
    before = {name: environment.get(name) for name in MULTICAST_GUARDS}
    environment.update(MULTICAST_GUARDS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del environment[name]
            else:
                environment[name] = value
