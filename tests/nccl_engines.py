"""What tests of the NCCL engine share: a double of the library, and looks inside."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import group_workers as workers
import pytest
from emulated_driver import EmulatedDriver
from fake_nccl import FakeNccl, FakeWorld, fake_nccl
from several_nodes import pretend

from cupy_zc import Communicator, config
from cupy_zc.collectives import hierarchical, nccl_health, nccl_setup, opening
from cupy_zc.collectives import nccl as engine
from cupy_zc.collectives.acts import Sizes
from cupy_zc.collectives.nccl import NcclEngine
from cupy_zc.group import Topology, in_process

__all__ = [
    "PLACES", "SETUP", "SHORT", "careless", "engines_of", "eventually", "nccl", "opened", "places",
    "play", "ranks", "short_setup", "watchers", "within",
]  # fmt: skip

#: By name: backend, and the node of each rank.
PLACES = {
    "one node": ("nccl", (0, 0)),
    "one rank a node": ("nccl", (0, 1)),
    "uneven": ("nccl", (0, 0, 1)),
    "2 x 1": ("hierarchical", (0, 1)),
    "2 x 2": ("hierarchical", (0, 0, 1, 1)),
}
#: Seconds of the set-up where a test makes it short.
SETUP = 0.5
#: Seconds that a call may take where a test waits for that.
SHORT = 1.0

places = pytest.mark.parametrize(
    ("backend", "node_of"), PLACES.values(), ids=[name.replace(" ", "-") for name in PLACES]
)


def ranks(
    device: EmulatedDriver, node_of: tuple[int, ...] = (0, 1), backend: str = "nccl",
    sizes: Sizes | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Communicators in threads; nothing is registered that a test does not register."""
    options = {"register": "manual", "timeout": 10, **options}
    return pretend(node_of, sizes, driver=device, backend=backend, **options)


def play(patch: pytest.MonkeyPatch, made: FakeNccl) -> None:
    """Let engines use a double, and forget what they set in the environment."""
    for module in (engine, opening):
        patch.setattr(module, "load_nccl", lambda: made)
    patch.setattr(nccl_health, "SETTLE", 0.5)
    patch.setattr(engine, "LEAVING", 0.05)
    for name in ("NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE", "NCCL_GRAPH_REGISTER"):
        patch.setenv(name, "")  # so that it is as before in the end, whoever sets it
        patch.delenv(name)


@pytest.fixture
def nccl(device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    """With which no mistake is made, and whose communicators are all given back."""
    with fake_nccl(device, distinct_devices=False) as made:
        play(monkeypatch, made)
        yield made


@pytest.fixture
def careless(device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    """Whose mistakes and communicators a test looks at by itself."""
    made = FakeNccl(FakeWorld(device, deadline=30))
    play(monkeypatch, made)
    yield made
    made.world.stop()


def short_setup(patch: pytest.MonkeyPatch, seconds: float = SETUP) -> None:
    """Let the set-up of NCCL take no longer."""
    short = dataclasses.replace(config.settings(), setup_timeout=seconds)
    for module in (engine, nccl_setup, hierarchical):
        patch.setattr(module, "settings", lambda: short)


def opened(
    driver: EmulatedDriver, node_of: Sequence[int], backend: str | Sequence[str], **options: Any
) -> list[Any]:
    """What each rank gets that opens a communicator: it, or an exception."""
    group = in_process(len(node_of))
    backends = [backend] * len(node_of) if isinstance(backend, str) else backend
    topology = Topology(0, tuple(node_of), (0,) * len(node_of))

    def start(rank: int) -> Communicator:
        chosen = opening.Options.of(
            "test", driver=driver, backend=backends[rank], register="manual", timeout=10, **options
        )
        chosen = dataclasses.replace(chosen, threads=True)
        return opening.start(Communicator, group[rank], chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            opening, "discover", lambda ranks: dataclasses.replace(topology, rank=ranks.rank)
        )
        return workers.in_threads(len(node_of), start)


def engines_of(comm: Communicator) -> list[NcclEngine]:
    """Those that a communicator uses: for rails, and for all ranks."""
    made: Any = comm._engine
    engines = [made] if isinstance(made, NcclEngine) else [made._rail.engine, made._whole.engine]
    return [each for each in engines if isinstance(each, NcclEngine)]


def watchers() -> list[threading.Thread]:
    """Threads of NCCL engines."""
    return [each for each in threading.enumerate() if each.name.startswith("cupy-zc nccl")]


def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait for a condition."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """A block that takes no longer."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds
