"""Ranks with multicast windows on the host driver, and what is really bound behind them.

No GPU is ever asked for a multicast object by these tests. Where the environment switches
multicast off, which nothing in a process can undo, the tests that need it run in a child process
whose environment does not, and in which no GPU is visible.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
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
from cupy_zc.driver.api import MemoryInfo
from cupy_zc.driver.host import HostDriver
from cupy_zc.memory.pool import reap
from cupy_zc.registration import HostProbe, MulticastStatus, Probe, SymmetricHeap
from cupy_zc.registration.multicast import Multicast

#: The heap's first segment, of the default segment size.
HEAP = 64 << 20

ON = MulticastStatus("on", "")

UNKNOWN = ("CUDA_ERROR_UNKNOWN", 999)
NOT_READY = ("CUDA_ERROR_SYSTEM_NOT_READY", 802)

#: Each driver call of the set-up and who makes it. ``write`` and ``read`` are those of the probe.
FIRST_RANK = ("multicast_create", "multicast_export")
OTHER_RANKS = ("multicast_import",)
EVERY_RANK = ("reserve", "multicast_add_device", "multicast_bind", "map", "set_access")
PROBE = ("write", "read")


def matrix(*steps: str) -> list[tuple[str, int]]:
    """Each step with each rank of three that takes it."""
    of = dict.fromkeys(FIRST_RANK, (0,)) | dict.fromkeys(OTHER_RANKS, (1, 2))
    return [(step, rank) for step in steps for rank in of.get(step, (0, 1, 2))]


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


def small(total: int) -> Any:
    """Makes the driver of a rank say that its device has so many bytes, once there is a heap."""

    def before(rank: Rank) -> None:
        real = rank.driver.memory_info

        def memory_info(device: int) -> MemoryInfo:
            return MemoryInfo(total, total) if rank.registry.windows.bases() else real(device)

        rank.driver.memory_info = memory_info

    return before


class _Second(list[tuple[str, int]]):
    """What fails from, and is empty again after the second time that it is looked at."""

    looks = 0

    def __bool__(self) -> bool:
        self.looks += 1
        return self.looks == 2


def second(result: tuple[str, int]) -> list[tuple[str, int]]:
    """For ``FaultyDriver.fail``: the second of the next calls fails."""
    return _Second([result])


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


def p2p_works(made: list[Rank]) -> None:
    """Arrays are registered, and every rank reads the bytes of every rank."""
    registrations = register(made, [rank.array(GRANULE, 7 + rank.rank) for rank in made])
    for rank, peer in itertools.product(made, range(len(made))):
        assert rank.read(peer, registrations[0].arrays[peer]) == bytes([7 + peer])


__all__ = [
    "EVERY_RANK",
    "FIRST_RANK",
    "GRANULE",
    "HEAP",
    "ON",
    "OTHER_RANKS",
    "PROBE",
    "UNKNOWN",
    "Rank",
    "arrays",
    "begin",
    "bindings",
    "casting",
    "each",
    "fine",
    "group_workers",
    "host",
    "live",
    "matrix",
    "multicast",
    "off",
    "one_status",
    "p2p_works",
    "published",
    "record",
    "register",
    "run_elsewhere",
    "second",
    "shut",
    "small",
    "statuses",
    "workers",
]  # fmt: skip
