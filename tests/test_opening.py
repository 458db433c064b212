"""Which driver and engine a communicator gets when none is named."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

import cupy_zc
from cupy_zc.collectives import opening
from cupy_zc.driver.host import HostDriver


def test_it_is_the_driver_of_the_installed_pool():
    pool = cupy_zc.install(cupy_zc.MemoryPool(driver=HostDriver()))
    try:
        assert opening.Options.of("test").driver is pool.driver
    finally:
        cupy_zc.uninstall()


def test_a_driver_without_an_engine_is_told_and_not_used(monkeypatch, caplog):
    cuda = SimpleNamespace(name="cuda")
    select = opening.select
    monkeypatch.setattr(opening, "select", lambda name: cuda if name is None else select(name))
    with caplog.at_level(logging.WARNING):
        assert opening.Options.of("test").driver.name == "host"
    assert "no engine for the cuda driver" in caplog.text


def test_a_driver_without_an_engine_that_was_asked_for_is_an_error(monkeypatch):
    monkeypatch.setattr(opening, "select", lambda name: SimpleNamespace(name="cuda"))
    with pytest.raises(cupy_zc.Error, match="CUPY_ZC_DRIVER=host"):
        opening.Options.of("test", driver="cuda")


def test_the_host_engine_can_be_asked_for_by_name(monkeypatch):
    select = opening.select

    def no_auto(name):
        assert name == "host"
        return select(name)

    monkeypatch.setattr(opening, "select", no_auto)
    assert opening.Options.of("test", backend="host").driver.name == "host"
