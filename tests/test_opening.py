"""Which driver and engine a communicator gets when none is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import group_workers as workers
import pytest

import cupy_zc
from cupy_zc import Communicator
from cupy_zc.collectives import opening
from cupy_zc.driver.host import HostDriver
from cupy_zc.group import Topology, in_process


def test_it_is_the_driver_of_the_installed_pool():
    pool = cupy_zc.install(cupy_zc.MemoryPool(driver=HostDriver()))
    try:
        assert opening.Options.of("test").driver is pool.driver
    finally:
        cupy_zc.uninstall()


@pytest.mark.parametrize(("driver", "engine"), [("host", "host"), ("cuda", "device")])
def test_each_driver_has_its_engine(monkeypatch, driver, engine):
    there = SimpleNamespace(name=driver, current_device=lambda: 0)
    monkeypatch.setattr(opening, "select", lambda name: there)
    one_node = Topology(0, (0, 0))
    assert opening.choose(opening.Options.of("test"), one_node) == engine
    assert opening.choose(opening.Options.of("test", backend=engine), one_node) == engine


@pytest.mark.parametrize(("driver", "engine"), [("host", "device"), ("cuda", "host")])
def test_an_engine_of_another_driver_is_refused_with_what_there_is(monkeypatch, driver, engine):
    there = SimpleNamespace(name=driver)
    monkeypatch.setattr(opening, "select", lambda name: there)
    with pytest.raises(cupy_zc.Error, match=f"what the {driver} driver has"):
        opening.Options.of("test", driver=driver, backend=engine)


def test_the_host_engine_can_be_asked_for_by_name(monkeypatch):
    select = opening.select

    def no_auto(name):
        assert name == "host"
        return select(name)

    monkeypatch.setattr(opening, "select", no_auto)
    assert opening.Options.of("test", backend="host").driver.name == "host"


def test_ranks_of_a_node_that_have_one_device_and_see_more_get_one_each():
    driver, size = HostDriver(devices=3), 5
    group = in_process(size)

    def open_and_use(rank):
        options = opening.Options.of("test", driver=driver, spread=True)
        with opening.start(Communicator, group[rank], options) as comm:
            return comm._device, driver.current_device()

    chosen = workers.all_fine(workers.in_threads(size, open_and_use))
    assert chosen == [(rank % 3, rank % 3) for rank in range(size)]


def test_ranks_that_chose_their_devices_keep_them():
    driver, size = HostDriver(devices=3), 2
    group = in_process(size)

    def open_and_use(rank):
        driver.make_current(2 - rank)
        options = opening.Options.of("test", driver=driver, spread=True)
        with opening.start(Communicator, group[rank], options) as comm:
            return comm._device

    assert workers.all_fine(workers.in_threads(size, open_and_use)) == [2, 1]


def _on(driver: str, backend: str) -> Any:
    return SimpleNamespace(driver=SimpleNamespace(name=driver), backend=backend)


@pytest.mark.parametrize(
    ("driver", "asked", "node_of", "engine"),
    [
        ("host", "auto", (0, 1), "hierarchical"),
        ("host", "auto", (0, 0, 1), "host"),
        ("host", "host", (0, 1), "host"),
        ("host", "hierarchical", (0, 0), "hierarchical"),
        ("cuda", "auto", (0, 0, 1, 1), "hierarchical"),
        ("cuda", "auto", (0, 0, 1), "nccl"),
        ("cuda", "nccl", (0, 0), "nccl"),
        ("cuda", "device", (0, 1), "device"),
    ],
)
def test_pretend_nodes_of_a_machine_have_an_engine_of_their_own(driver, asked, node_of, engine):
    topology = Topology(0, node_of, (0,) * len(node_of))
    assert opening.choose(_on(driver, asked), topology) == engine


@pytest.mark.parametrize("node_of", [(0, 1), (0, 0, 1)])
def test_several_machines_have_nccl_on_gpus(node_of):
    even = len(node_of) == 2
    assert opening.choose(_on("cuda", "auto"), Topology(0, node_of)) == (
        "hierarchical" if even else "nccl"
    )


@pytest.mark.parametrize(
    ("driver", "asked", "node_of", "words"),
    [
        ("host", "auto", (0, 0, 1), "ranks 0, 1 are at node 0; rank 2 is at node 1"),
        ("host", "host", (0, 1), "the host driver brings together ranks of one machine"),
        ("cuda", "device", (0, 1), "backend='device' is for one node, 'auto' for any"),
        ("cuda", "hierarchical", (0, 0, 1), "needs as many ranks on each node, and they have 2, 1"),
    ],
)
def test_ranks_that_an_engine_cannot_bring_together_are_told(driver, asked, node_of, words):
    with pytest.raises(cupy_zc.Error, match=words):
        opening.choose(_on(driver, asked), Topology(0, node_of))


def test_ranks_on_pretend_nodes_of_a_machine_have_a_device_each_all_the_same():
    driver, size = HostDriver(devices=2), 2
    group = in_process(size)

    def open_and_use(rank):
        options = opening.Options.of("test", driver=driver, spread=True)
        with opening.start(Communicator, group[rank], options) as comm:
            return comm._device, comm.backend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "discover", lambda b: Topology(b.rank, (0, 1), (0, 0)))
        chosen = workers.all_fine(workers.in_threads(size, open_and_use))
    assert chosen == [(0, "hierarchical"), (1, "hierarchical")]
