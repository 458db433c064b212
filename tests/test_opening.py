"""Which driver and engine a communicator gets when none is named."""

from __future__ import annotations

from types import SimpleNamespace

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
