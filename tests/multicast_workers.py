"""Ranks with multicast windows on the host driver, and what is really bound behind them.

No GPU is ever asked for a multicast object by these tests. Where the environment switches
multicast off, which nothing in a process can undo, the tests that need it run in a child process
whose environment does not, and in which no GPU is visible.
"""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import group_workers
import pytest
import registration_workers as workers
from probes import clean_environment
from registration_workers import GRANULE, Rank, each, fine

from cupy_zc.config import multicast_refusal
from cupy_zc.driver.host import HostDriver
from cupy_zc.memory.pool import reap
from cupy_zc.registration import HostProbe, MulticastStatus, Probe, SymmetricHeap
from cupy_zc.registration.multicast import Multicast

#: The heap's first segment, of the default segment size.
HEAP = 64 << 20

ON = MulticastStatus("on", "")

off = pytest.mark.skipif(
    multicast_refusal() is not None,
    reason=f"{multicast_refusal()}; runs in the child of test_the_rest_of_this_file",
)


def run_elsewhere(path: str) -> None:
    """Run a file of tests where multicast is not switched off."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", path]
    result = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout


def begin(rank: Rank, *, require: bool, probe: Probe | None = None) -> None:
    """A heap, and multicast. Collective."""
    heap = SymmetricHeap(rank.registry, timeout=10)
    rank.heaps.append(heap)
    heap.reserve_private(512)  # as an engine does
    probe = probe or HostProbe(rank.registry)
    multicast(rank).start(probe, heap.reserve_private, "test", require=require)


@contextlib.contextmanager
def casting(
    n: int = 3, *, require: bool = False, before: Callable[[Rank], object] = bool, **options: Any
) -> Iterator[list[Rank]]:
    """Ranks as of ``registration_workers``, and what ``begin`` makes of them."""
    with workers.ranks(n, **options) as made:
        for rank in made:
            before(rank)
        fine(made, lambda rank: begin(rank, require=require))
        yield made


def multicast(rank: Rank) -> Multicast:
    return rank.registry.multicast


def host(rank: Rank) -> HostDriver:
    driver: HostDriver = rank.driver._driver
    return driver


def bindings(rank: Rank) -> dict[tuple[int, int], tuple[int, Any]]:
    """What the driver of a rank has bound: size and handle by arena and offset."""
    found = {}
    for arena, window in multicast(rank)._windows.items():
        for piece, handle in window._objects.items():
            for each_one in host(rank).multicast_bindings(handle):
                if each_one.device == rank.registry.device:
                    offset = piece * multicast(rank)._team.piece + each_one.offset
                    found[arena, offset] = (each_one.size, each_one.segment)
    return found


def published(rank: Rank) -> dict[tuple[int, int], tuple[int, int, Any]]:
    """What a rank has published: size, generation and handle by arena and offset."""
    return {
        (entry.name.arena, entry.name.offset): (segment.size, segment.generation, segment.handle)
        for segment, entry in rank.registry._published.items()
    }


def live(rank: Rank) -> int:
    """Multicast objects that the driver of a rank holds."""
    return len(host(rank)._multicast.live())


def statuses(made: list[Rank]) -> list[MulticastStatus]:
    return [multicast(rank).status for rank in made]


def one_status(made: list[Rank]) -> MulticastStatus:
    """The status, which must be the same on all ranks."""
    assert len(set(statuses(made))) == 1
    return multicast(made[0]).status


def record(made: list[Rank], *names: str) -> list[tuple[int, str]]:
    """Log these driver calls of all ranks in one list, in the order in which they are made."""
    log: list[tuple[int, str]] = []
    for rank in made:
        for name in names:
            setattr(rank.driver, name, _logged(log, rank.rank, name, getattr(rank.driver, name)))
    return log


def _logged(log: list[tuple[int, str]], rank: int, name: str, call: Any) -> Any:
    def logged(*arguments: Any) -> Any:
        log.append((rank, name))
        return call(*arguments)

    return logged


def shut(rank: Rank) -> None:
    """Close the driver of a rank, which gives back what the driver refused to; nobody uses it."""
    del rank.pool
    rank.heaps.clear()
    gc.collect()
    reap()
    host(rank).close()


def register(made: list[Rank], arrays: list[Any]) -> list[Any]:
    """Register one array of each rank; the registrations."""
    return fine(made, lambda rank: rank.registry.register(arrays[rank.rank]))


def arrays(made: list[Rank], nbytes: int = GRANULE, fill: int | None = None) -> list[Any]:
    return [rank.array(nbytes, fill) for rank in made]


__all__ = [
    "GRANULE", "HEAP", "ON", "Rank", "arrays", "begin", "bindings", "casting", "each", "fine",
    "group_workers", "host", "live", "multicast", "off", "one_status", "published",
    "record", "register", "run_elsewhere", "shut", "statuses", "workers",
]  # fmt: skip
