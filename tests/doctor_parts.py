"""What tests of ``cupy-zc doctor`` share: machines with fake GPUs, and machines in a folder."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from fake_bindings import FakeBindings, cuda_driver

from cupy_zc.cli.checks import Devices, Finding, Machine, devices, look_at_devices
from cupy_zc.cli.checks.peers import Measured

__all__ = ["ALL", "GOOD", "by_name", "fake_gpus", "looked", "machine_at", "put"]

#: Everything a device can do.
ALL = ("POSIX_FILE", "FABRIC", "RDMA", "MULTICAST")
GOOD = Measured(True, "all is well")
INFINITE = resource.RLIM_INFINITY


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def machine_at(root: Path, limits: dict[int, int] | None = None, **environment: str) -> Machine:
    known = limits or {}

    def limit(which: int) -> tuple[int, int]:
        return known.get(which, INFINITE), INFINITE

    return Machine(root, environment, limit)


def put(root: Path, name: str, text: str = "") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeBindings]:
    """A function ``gpus(count, abilities)`` that lets the machine have fake GPUs."""

    def have(count: int = 2, abilities: tuple[str, ...] = ALL) -> FakeBindings:
        fake = FakeBindings(count, abilities=abilities)
        driver = cuda_driver(monkeypatch, fake)
        monkeypatch.setattr(devices, "select", lambda name: driver)
        return fake

    return have


def looked(
    measured: Measured = GOOD, probe: Callable[[int], None] | None = None
) -> tuple[Devices, list[tuple[str, int]]]:
    """What is found of the devices, and which self-tests were asked for."""
    asked: list[tuple[str, int]] = []

    def test(driver: str, ranks: int) -> Measured:
        asked.append((driver, ranks))
        return measured

    return look_at_devices(test, probe), asked
