"""The CUDA driver on a fake of its bindings: devices, memory, granules."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as real
import pytest
from fake_bindings import (
    GRANULE,
    FakeBindings,
    cuda_driver,
    prepared,
)

import cupy_zc.driver
from cupy_zc.driver.api import Granularity, MemoryInfo
from cupy_zc.driver.cuda import CudaDriver
from cupy_zc.errors import DriverError, InvalidTypeError

RESULT = real.CUresult
EVERYTHING = ("POSIX_FILE", "FABRIC", "RDMA", "MULTICAST")
MODULES = sorted(Path(cupy_zc.driver.__file__).parent.glob("cuda*.py"))


@pytest.fixture
def fake() -> FakeBindings:
    return FakeBindings(abilities=EVERYTHING)


@pytest.fixture
def driver(fake: FakeBindings, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriver]:
    yield cuda_driver(monkeypatch, fake)
    assert fake.contexts == [], "a call left a context current"


# Devices and contexts


def test_a_device_is_described(fake: FakeBindings, driver: CudaDriver) -> None:
    info = driver.device_info(1)
    assert (info.ordinal, info.uuid, info.name) == (1, b"\1" * 16, "Fake H200")
    assert (info.posix_fd, info.fabric, info.gpu_direct_rdma, info.multicast) == (True,) * 4
    fake.abilities = ()
    assert driver.device_info(1) is info
    info = driver.device_info(0)
    assert (info.posix_fd, info.fabric, info.gpu_direct_rdma, info.multicast) == (False,) * 4


def test_a_call_for_a_device_runs_in_its_primary_context(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    fake.contexts = [0xAAAA]  # the caller's own
    assert driver.memory_info(1) == MemoryInfo(0xC001, 1 << 40)
    assert driver.memory_info(0) == MemoryInfo(0xC000, 1 << 40)
    assert driver.memory_info(1).free == 0xC001
    assert fake.called("cuDevicePrimaryCtxRetain") == 2
    assert fake.contexts == [0xAAAA]
    fake.contexts.clear()


def test_tidying_up_needs_no_context(fake: FakeBindings, driver: CudaDriver) -> None:
    have = prepared(driver)
    os.close(have.fd)
    fake.calls.clear()
    driver.unmap(have.base, 2 * GRANULE)
    driver.release(have.segment)
    driver.free_range(have.base, 64 * GRANULE)
    assert [name for name, _ in fake.calls] == ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]


# Segments


def test_a_segment_lives_from_creation_to_release(fake: FakeBindings, driver: CudaDriver) -> None:
    before = fake.state()
    base = driver.reserve(64 * GRANULE, 4 * GRANULE)
    segment = driver.create(1, 2 * GRANULE)
    assert (segment.size, segment.device) == (2 * GRANULE, 1)
    driver.map(base + GRANULE, segment)
    driver.set_access(base + GRANULE, segment.size, 0)
    (name, (address, size, access, count)) = fake.calls[-2]
    assert (name, address, size, count) == ("cuMemSetAccess", base + GRANULE, 2 * GRANULE, 1)
    assert (access[0].location.id, access[0].flags) == (0, 3)  # 3: read and write
    assert ("cuMemAddressReserve", (64 * GRANULE, 4 * GRANULE, 0, 0)) in fake.calls
    driver.unmap(base + GRANULE, segment.size)
    driver.release(segment)
    driver.free_range(base, 64 * GRANULE)
    assert fake.state() == before


@pytest.mark.parametrize(
    ("abilities", "kinds", "handle_types", "rdma"),
    [
        (EVERYTHING, 1 | 8, ("posix_fd", "fabric"), 1),
        (("POSIX_FILE", "RDMA"), 1, ("posix_fd",), 1),
        (("POSIX_FILE", "FABRIC"), 1 | 8, ("posix_fd", "fabric"), 0),
        (("POSIX_FILE",), 1, ("posix_fd",), 0),
    ],
)
def test_a_segment_is_asked_for_with_all_the_device_can(
    fake: FakeBindings,
    driver: CudaDriver,
    abilities: tuple[str, ...],
    kinds: int,
    handle_types: tuple[str, ...],
    rdma: int,
) -> None:
    fake.abilities = abilities
    assert driver.create(1, GRANULE).handle_types == handle_types
    asked = fake.properties[-1]
    assert asked == SimpleNamespace(pinned=True, handle_types=kinds, device=1, rdma=rdma)


@pytest.mark.parametrize("result", ["CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED"])
def test_where_fabric_is_refused_segments_go_without(
    fake: FakeBindings, driver: CudaDriver, result: str
) -> None:
    fake.fail["cuMemCreate"] = [getattr(RESULT, result)]
    assert driver.create(0, GRANULE).handle_types == ("posix_fd",)
    assert driver.create(0, GRANULE).handle_types == ("posix_fd",)
    assert fake.called("cuMemCreate") == 3, "the refusal is remembered"
    assert driver.create(1, GRANULE).handle_types == ("posix_fd", "fabric")


def test_a_refusal_of_something_else_is_not_blamed_on_fabric(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    fake.fail["cuMemCreate"] = [RESULT.CUDA_ERROR_NOT_SUPPORTED] * 2
    with pytest.raises(DriverError, match=r"handle_types=posix_fd\)"):
        driver.create(0, GRANULE)
    assert driver.create(0, GRANULE).handle_types == ("posix_fd", "fabric")


@pytest.mark.parametrize("size", [0, -GRANULE, 1, GRANULE - 1, GRANULE + 512])
def test_a_size_that_is_no_multiple_of_the_granule_is_refused(
    fake: FakeBindings, driver: CudaDriver, size: int
) -> None:
    for name, attempt in {
        "cuMemCreate": lambda: driver.create(0, size),
        "cuMemImportFromShareableHandle": lambda: driver.import_segment(0, size, 0),
    }.items():
        with pytest.raises(DriverError, match=f"multiple of the granularity, {GRANULE}") as caught:
            attempt()
        assert (caught.value.call, caught.value.code) == (name, 1)
        assert fake.called(name) == 0


def test_descriptors_belong_to_who_the_contract_says(driver: CudaDriver) -> None:
    segment = driver.create(0, GRANULE)
    fd = driver.export_segment(segment)
    assert not os.get_inheritable(fd)
    imported = driver.import_segment(fd, GRANULE, 1)
    assert (imported.size, imported.device, imported.handle_types) == (GRANULE, 1, ("posix_fd",))
    os.close(fd)  # still open: import borrowed it
    with pytest.raises(DriverError, match=r"fd=-1.*descriptor is closed"):
        driver.import_segment(-1, GRANULE, 0)


def test_a_released_handle_is_refused(fake: FakeBindings, driver: CudaDriver) -> None:
    segment = driver.create(0, GRANULE)
    driver.release(segment)
    fake.calls.clear()
    for use in (
        lambda: driver.release(segment),
        lambda: driver.map(GRANULE, segment),
        lambda: driver.export_segment(segment),
    ):
        with pytest.raises(DriverError, match="the handle was released") as caught:
            use()
        assert caught.value.result == "CUDA_ERROR_INVALID_HANDLE"
    assert fake.calls == []


def test_a_release_that_failed_can_be_tried_again(fake: FakeBindings, driver: CudaDriver) -> None:
    segment = driver.create(0, GRANULE)
    fake.fail["cuMemRelease"] = [RESULT.CUDA_ERROR_UNKNOWN]
    with pytest.raises(DriverError, match="CUDA_ERROR_UNKNOWN"):
        driver.release(segment)
    driver.release(segment)
    assert fake.handles == set()


def test_a_handle_of_another_kind_is_a_type_error(driver: CudaDriver) -> None:
    stranger: Any = SimpleNamespace(size=GRANULE, device=0)
    for use in (driver.release, driver.export_segment, lambda handle: driver.map(0, handle)):
        with pytest.raises(InvalidTypeError, match="of the CUDA driver"):
            use(stranger)


# Granules


def test_granules_are_those_of_the_device_and_of_its_team(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    fake.granularities["CU_MULTICAST_GRANULARITY_RECOMMENDED"] = 512 << 20
    found = driver.granularity(0, 3 * GRANULE)
    assert found == Granularity(GRANULE, GRANULE, GRANULE, 512 << 20)
    assert found.size == GRANULE, "512 MiB for each segment would be too much"
    assert found.alignment == GRANULE
    assert fake.properties == [SimpleNamespace(devices=2, size=3 * GRANULE)] * 2
    asked = len(fake.calls)
    assert driver.granularity(0, 3 * GRANULE) is found
    assert len(fake.calls) == asked


def test_a_team_has_at_least_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for devices, team in ((1, 2), (8, 8)):
        fake = FakeBindings(devices, abilities=EVERYTHING)
        cuda_driver(monkeypatch, fake).granularity(0, GRANULE)
        assert fake.properties[-1].devices == team


def test_without_multicast_its_granules_are_zero(fake: FakeBindings, driver: CudaDriver) -> None:
    fake.abilities = ("POSIX_FILE",)
    assert driver.granularity(0, GRANULE) == Granularity(GRANULE, GRANULE, 0, 0)
    assert fake.called("cuMulticastGetGranularity") == 0


def test_a_team_that_cannot_be_asked_is_said_and_done_without(
    fake: FakeBindings, driver: CudaDriver, caplog: pytest.LogCaptureFixture
) -> None:
    fake.fail["cuMulticastGetGranularity"] = [RESULT.CUDA_ERROR_NOT_SUPPORTED]
    assert driver.granularity(0, GRANULE) == Granularity(GRANULE, GRANULE, 0, 0)
    assert "CUDA_ERROR_NOT_SUPPORTED" in caplog.text


def test_the_granules_kept_are_bounded(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_zc.driver.cuda_segments._KEPT", 8)
    for size in range(1, 30):
        assert driver.granularity(0, size).size == GRANULE
    assert len(driver._segments._granularities) <= 8
