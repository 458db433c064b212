"""The multicast guard of the CUDA driver, and what it guards; on a fake of the bindings.

Nothing here reaches a real driver, and no test switches the guard off: where the environment
switches multicast off, the tests of what comes after the guard are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cuda.bindings.driver as real
import pytest
from fake_bindings import GRANULE, FakeBindings, cuda_driver

import cupy_zc
from cupy_zc.config import multicast_refusal
from cupy_zc.driver.cuda import CudaDriver
from cupy_zc.errors import DriverError, InvalidTypeError, MulticastUnavailableError

RESULT = real.CUresult
SWITCHES = {
    "CUPY_ZC_MULTICAST": "off",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
GUARDED = {
    "cuMulticastCreate",
    "cuMulticastAddDevice",
    "cuMulticastBindMem",
    "cuMemImportFromShareableHandle",
}

allowed_here = pytest.mark.skipif(
    multicast_refusal() is not None,
    reason=f"multicast is switched off here by {multicast_refusal()}, so not even a fake is asked",
)


@pytest.fixture
def fake() -> FakeBindings:
    return FakeBindings(abilities=("POSIX_FILE", "MULTICAST"))


@pytest.fixture
def driver(fake: FakeBindings, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriver]:
    yield cuda_driver(monkeypatch, fake)
    assert fake.contexts == [], "a call left a context current"


# The guard

PROGRAM = """
import os, sys
for name in sys.argv[1:]:
    del os.environ[name]
import pytest
from fake_bindings import GRANULE, FakeBindings, cuda_driver
from cupy_zc.driver import cuda_calls, cuda_multicast
from cupy_zc.errors import MulticastUnavailableError

fake = FakeBindings(abilities=("POSIX_FILE", "MULTICAST"))
with pytest.MonkeyPatch.context() as patch:
    driver = cuda_driver(patch, fake)
    handle = cuda_multicast.CudaMulticastObject(7, GRANULE, 1, shared=True)
    handle.devices.add(0)
    segment = driver.create(0, GRANULE)
    assert driver.granularity(0, GRANULE).multicast_minimum == GRANULE  # to ask is allowed
    asked = len(fake.calls)
    for attempt in (
        lambda: driver.multicast_create(2, GRANULE),
        lambda: driver.multicast_import(0, 2, GRANULE),
        lambda: driver.multicast_add_device(handle, 0),
        lambda: driver.multicast_bind(handle, 0, segment, GRANULE),
        lambda: cuda_calls.call("cuMulticastCreate", None),
        lambda: cuda_calls.call("cuMulticastAddDevice", 7, 0),
        lambda: cuda_calls.call("cuMulticastBindMem", 7, 0, 7, 0, GRANULE, 0),
    ):
        try:
            attempt()
        except MulticastUnavailableError as error:
            print(error.call, "|", error.result, "|", error.cause)
    print(len(fake.calls) - asked, fake.called("cuMulticastCreate"),
          driver.multicast_objects_created)
"""


@pytest.mark.parametrize("present", [True, False], ids=["set", "removed-before-import"])
@pytest.mark.parametrize(("name", "value"), SWITCHES.items())
def test_a_switch_set_at_the_start_is_absolute(name: str, value: str, present: bool) -> None:
    environment = {key: text for key, text in os.environ.items() if key not in SWITCHES}
    environment[name] = value
    here = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent)])
    arguments = [sys.executable, "-c", PROGRAM, *([] if present else [name])]
    done = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    *refusals, counts = done.stdout.splitlines()
    assert len(refusals) == 7, "every attempt is refused"
    for line in refusals:
        call, result, cause = line.split(" | ")
        assert call in GUARDED
        assert result == "CUDA_ERROR_NOT_PERMITTED"
        assert f"{name}={value} switches multicast off" in cause
    assert counts == "0 0 0", "nothing was asked of the driver"


@pytest.mark.parametrize(("name", "value"), SWITCHES.items())
def test_a_switch_set_later_is_obeyed_from_then_on(
    fake: FakeBindings,
    driver: CudaDriver,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(MulticastUnavailableError, match=r"switches multicast off"):
        driver.multicast_create(2, GRANULE)
    assert fake.called("cuMulticastCreate") == 0
    assert driver.multicast_objects_created == 0


def test_creation_is_called_in_one_place() -> None:
    calls, other = [], []
    for module in Path(cupy_zc.__file__).parent.rglob("*.py"):
        text = module.read_text()
        calls += [module.name] * text.count('call("cuMulticastCreate"')
        # Elsewhere it may be the name of an error, of a cause, or a word in a comment.
        other += re.findall(r"\.cuMulticastCreate\b|getattr\([^)]*cuMulticastCreate", text)
    assert calls == ["cuda_multicast.py"]
    assert other == [], "nothing goes past call(), which asks the guard"


def test_the_count_cannot_be_set(driver: CudaDriver) -> None:
    with pytest.raises(AttributeError):
        driver.multicast_objects_created = 0  # type: ignore[misc]


# What it guards


@allowed_here
def test_an_object_lives_from_creation_to_release(fake: FakeBindings, driver: CudaDriver) -> None:
    before = fake.state()
    handle = driver.multicast_create(2, 4 * GRANULE)
    assert (handle.size, handle.device_count) == (4 * GRANULE, 2)
    segments = [driver.create(device, 2 * GRANULE) for device in (0, 1)]
    for device in (0, 1):
        driver.multicast_add_device(handle, device)
    for device, segment in enumerate(segments):
        driver.multicast_bind(handle, GRANULE, segment, GRANULE)
        (name, arguments) = next(call for call in reversed(fake.calls) if "Bind" in call[0])
        assert (name, arguments[1], arguments[3:]) == (
            "cuMulticastBindMem",
            GRANULE,
            (0, GRANULE, 0),
        )
        driver.multicast_unbind(handle, device, GRANULE, GRANULE)
    base = driver.reserve(4 * GRANULE, GRANULE)
    driver.map(base, handle)
    driver.set_access(base, 4 * GRANULE, 0)
    driver.unmap(base, 4 * GRANULE)
    driver.free_range(base, 4 * GRANULE)
    for each in (handle, *segments):
        driver.release(each)
    assert fake.state() == before
    assert driver.multicast_objects_created == 1


@allowed_here
def test_an_imported_object_was_not_created_here(driver: CudaDriver) -> None:
    handle = driver.multicast_create(2, GRANULE)
    fd = driver.multicast_export(handle)
    assert not os.get_inheritable(fd)
    peer = driver.multicast_import(fd, 2, GRANULE)
    os.close(fd)  # still open: import borrowed it
    assert (peer.size, peer.device_count) == (GRANULE, 2)
    assert driver.multicast_objects_created == 1
    with pytest.raises(DriverError, match=r"fd=-1"):
        driver.multicast_import(-1, 2, GRANULE)


@allowed_here
def test_what_would_wait_for_a_team_that_cannot_come_is_refused(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    handle, segment = driver.multicast_create(2, GRANULE), driver.create(0, GRANULE)
    driver.multicast_add_device(handle, 0)
    fake.calls.clear()
    for use in (
        lambda: driver.multicast_bind(handle, 0, segment, GRANULE),
        lambda: driver.map(GRANULE, handle),
    ):
        with pytest.raises(DriverError, match=r"devices=\[0\] of 2.*every device") as caught:
            use()
        assert caught.value.result == "CUDA_ERROR_ILLEGAL_STATE"
    assert fake.calls == []
    os.close(driver.multicast_export(handle))  # from here on a peer can add the other
    driver.multicast_bind(handle, 0, segment, GRANULE)
    assert fake.called("cuMulticastBindMem") == 1


@allowed_here
def test_a_failing_multicast_call_says_that_multicast_is_not_to_be_had(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    handle, segment = driver.multicast_create(1, GRANULE), driver.create(0, GRANULE)
    driver.multicast_add_device(handle, 0)
    fd = driver.multicast_export(handle)
    attempts = {
        "cuMulticastCreate": lambda: driver.multicast_create(2, GRANULE),
        "cuMemImportFromShareableHandle": lambda: driver.multicast_import(fd, 2, GRANULE),
        "cuMulticastAddDevice": lambda: driver.multicast_add_device(handle, 1),
        "cuMulticastBindMem": lambda: driver.multicast_bind(handle, 0, segment, GRANULE),
    }
    for name, attempt in attempts.items():
        fake.fail[name] = [RESULT.CUDA_ERROR_SYSTEM_NOT_READY]
        before = fake.state()
        with pytest.raises(MulticastUnavailableError, match="Fabric Manager") as caught:
            attempt()
        assert (caught.value.call, caught.value.code) == (name, 802)
        assert fake.state() == before
    os.close(fd)
    assert handle.devices == {0}
    assert driver.multicast_objects_created == 1


@allowed_here
def test_failures_of_giving_up_are_driver_errors(fake: FakeBindings, driver: CudaDriver) -> None:
    handle = driver.multicast_create(1, GRANULE)
    for name, attempt in {
        "cuMulticastUnbind": lambda: driver.multicast_unbind(handle, 0, 0, GRANULE),
        "cuMemExportToShareableHandle": lambda: driver.multicast_export(handle),
        "cuMemRelease": lambda: driver.release(handle),
    }.items():
        fake.fail[name] = [RESULT.CUDA_ERROR_INVALID_VALUE]
        with pytest.raises(DriverError) as caught:
            attempt()
        assert caught.value.call == name
    driver.release(handle)
    with pytest.raises(DriverError, match="the handle was released"):
        driver.multicast_unbind(handle, 0, 0, GRANULE)


@allowed_here
@pytest.mark.parametrize(("devices", "size"), [(0, GRANULE), (-1, GRANULE), (2, 0), (2, -1)])
def test_a_team_or_size_that_is_not_positive_is_refused(
    fake: FakeBindings, driver: CudaDriver, devices: int, size: int
) -> None:
    with pytest.raises(DriverError, match="both must be positive"):
        driver.multicast_create(devices, size)
    assert fake.called("cuMulticastCreate") == 0


def test_a_segment_is_not_a_multicast_object(driver: CudaDriver) -> None:
    segment = driver.create(0, GRANULE)
    for use in (
        lambda: driver.multicast_export(segment),  # type: ignore[arg-type]
        lambda: driver.multicast_add_device(segment, 0),  # type: ignore[arg-type]
        lambda: driver.multicast_bind(segment, 0, segment, GRANULE),  # type: ignore[arg-type]
        lambda: driver.multicast_unbind(segment, 0, 0, GRANULE),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidTypeError, match="CudaMulticastObject"):
            use()
