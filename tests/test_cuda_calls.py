"""The CUDA driver on a fake of its bindings: how calls are made, and every way they fail."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as real
import cupy
import pytest
from cuda.pathfinder import DynamicLibNotFoundError
from fake_bindings import (
    GRANULE,
    HAS_LIBCUDA,
    FakeBindings,
    FakeStream,
    cuda_driver,
    prepared,
)

import cupy_zc.driver
from cupy_zc.driver import cuda_calls
from cupy_zc.driver.api import Driver
from cupy_zc.driver.cuda import CudaDriver
from cupy_zc.errors import DriverError

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


# The fake is faithful


def faked() -> list[str]:
    return [name for name in vars(FakeBindings) if name.startswith("cu")]


@pytest.mark.parametrize("name", faked())
def test_a_faked_function_takes_what_the_real_one_takes(name: str) -> None:
    if name == "cuDeviceGetUuid_v2" and not hasattr(real, name):
        name = "cuDeviceGetUuid"  # its name since CUDA 13
    taken = list(inspect.signature(vars(FakeBindings)[name]).parameters)
    assert taken[1:] == list(inspect.signature(getattr(real, name)).parameters)


def test_every_function_the_driver_calls_is_faked() -> None:
    constants = (
        node.value
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    called = {text for text in constants if re.fullmatch(r"cu[A-Z]\w+", text)}
    assert {"cuInit", "cuMemCreate", "cuMulticastCreate"} < called
    assert called <= set(faked())


def test_nothing_calls_the_bindings_but_call() -> None:
    package = Path(cupy_zc.driver.__file__).parent.parent
    for module in package.rglob("*.py"):
        text = module.read_text()
        assert not re.search(r"\.cu[A-Z]\w+\(", text), f"{module} calls a driver function directly"
        if module not in MODULES:
            assert "cuda.bindings" not in re.sub(r'"""[\s\S]*?"""', "", text), module


def test_it_has_everything_a_driver_has(driver: CudaDriver) -> None:
    wanted = [name for name in vars(Driver) if not name.startswith("_")]
    wanted += list(Driver.__annotations__)
    assert [name for name in wanted if not hasattr(driver, name)] == []
    assert driver.name == "cuda"


# The constructor


@pytest.mark.parametrize(
    ("call", "outcome", "result", "cause"),
    [
        ("cuInit", DynamicLibNotFoundError("no libcuda"), "SHARED_OBJECT_INIT", "libcuda.so.1"),
        ("cuInit", RESULT.CUDA_ERROR_NO_DEVICE, "NO_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("cuDeviceGetCount", RuntimeError("not found"), "SYMBOL_NOT_FOUND", "update it"),
        ("cuInit", RESULT.CUDA_ERROR_SYSTEM_NOT_READY, "SYSTEM_NOT_READY", "Fabric Manager"),
    ],
)
def test_no_usable_gpu_is_a_driver_error(
    fake: FakeBindings,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    outcome: Any,
    result: str,
    cause: str,
) -> None:
    fake.fail[call] = [outcome]
    with pytest.raises(DriverError, match=cause) as caught:
        cuda_driver(monkeypatch, fake)
    assert caught.value.call == call
    assert result in caught.value.result
    assert RESULT(caught.value.code).name == caught.value.result


def test_no_device_is_a_driver_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DriverError, match="CUPY_ZC_DRIVER=host") as caught:
        cuda_driver(monkeypatch, FakeBindings(devices=0))
    assert caught.value.result == "CUDA_ERROR_NO_DEVICE"


@pytest.mark.parametrize(("status", "name"), [(100, "CUDA_ERROR_NO_DEVICE"), (35, "cudaError")])
def test_a_gpu_that_cupy_cannot_use_is_a_driver_error(
    fake: FakeBindings, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch, status: int, name: str
) -> None:
    error = cupy.cuda.runtime.CUDARuntimeError

    def refuse() -> int:
        raise error(status)

    runtime = SimpleNamespace(getDeviceCount=refuse, CUDARuntimeError=error)
    monkeypatch.setattr("cupy_zc.driver.cuda.runtime", runtime)
    with pytest.raises(DriverError) as caught:
        CudaDriver()
    assert (caught.value.call, caught.value.code) == ("cudaGetDeviceCount", status)
    assert caught.value.result.startswith(name)
    assert caught.value.cause.startswith("cudaError")


@pytest.mark.skipif(HAS_LIBCUDA, reason="there is a libcuda here")
def test_without_libcuda_the_real_bindings_give_the_same_error() -> None:
    with pytest.raises(DriverError, match=r"cuInit.*install the NVIDIA driver"):
        CudaDriver()


# Every call, failing


OPERATIONS: dict[str, Callable[[CudaDriver, SimpleNamespace], Any]] = {
    "device_info": lambda driver, have: driver.device_info(1),
    "memory_info": lambda driver, have: driver.memory_info(1),
    "granularity": lambda driver, have: driver.granularity(1, GRANULE),
    "synchronize": lambda driver, have: driver.synchronize(1),
    "reserve": lambda driver, have: driver.reserve(GRANULE, GRANULE),
    "free_range": lambda driver, have: driver.free_range(have.empty, GRANULE),
    "create": lambda driver, have: driver.create(1, GRANULE),
    "map": lambda driver, have: driver.map(have.empty, have.segment),
    "set_access": lambda driver, have: driver.set_access(have.base, 2 * GRANULE, 1),
    "unmap": lambda driver, have: driver.unmap(have.base, 2 * GRANULE),
    "release": lambda driver, have: driver.release(have.segment),
    "export_segment": lambda driver, have: os.close(driver.export_segment(have.segment)),
    "import_segment": lambda driver, have: driver.import_segment(have.fd, GRANULE, 1),
    "stream_key": lambda driver, have: driver.stream_key(FakeStream(0x70, 1)),
    "record_event": lambda driver, have: driver.record_event(FakeStream(0x70, 1)).done,
    "capture_info": lambda driver, have: driver.capture_info(FakeStream(0x70, 1)),
    "lease_graph": lambda driver, have: driver.lease_graph(0x123),
    "read": lambda driver, have: driver.read(have.base, 4),
    "write": lambda driver, have: driver.write(have.base, b"1234"),
    "wait_until_zero": lambda driver, have: driver.wait_until_zero(FakeStream(0x70, 1), have.base),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failing_call_is_named_and_leaves_nothing_half_done(
    monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    def attempt(fail: str | None) -> tuple[FakeBindings, Any, Any, DriverError | None]:
        fake = FakeBindings(abilities=EVERYTHING)
        driver = cuda_driver(monkeypatch, fake)
        have = prepared(driver)
        fake.memory[have.base] = b"abcd"
        fake.calls.clear()
        if fail:
            fake.fail[fail] = [RESULT.CUDA_ERROR_INVALID_VALUE]
        before, error = fake.state(), None
        try:
            OPERATIONS[operation](driver, have)
        except DriverError as caught:
            error = caught
        finally:
            os.close(have.fd)
        return fake, before, fake.state(), error

    fake, _, _, error = attempt(None)
    assert error is None
    names = dict.fromkeys(name for name, _ in fake.calls)
    assert names
    for name in names:
        _, before, after, error = attempt(name)
        assert error is not None, f"{name} failed and nobody noticed"
        assert (error.call, error.result, error.code) == (name, "CUDA_ERROR_INVALID_VALUE", 1)
        assert error.cause
        if name != "cuCtxPopCurrent":  # to fail in giving the context back is to leave it
            assert after == before, name


@pytest.mark.parametrize(("call", "result"), cuda_calls.CAUSES)
def test_the_table_of_causes_is_about_results_that_exist(
    fake: FakeBindings, driver: CudaDriver, call: str, result: str
) -> None:
    name = call or "cuMemUnmap"
    error = cuda_calls.failure(name, getattr(RESULT, result), "size=1")
    assert str(error).startswith(f"{name}(size=1) returned {result} ({error.code}): ")
    expected = cuda_calls.CAUSES.get((name, result), cuda_calls.CAUSES[call, result])
    assert error.cause == expected
    assert name in faked()


def test_a_result_that_nobody_expected_has_a_cause_too(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    fake.fail["cuMemAddressFree"] = [RESULT.CUDA_ERROR_ECC_UNCORRECTABLE]
    with pytest.raises(DriverError, match="see CUDA_ERROR_ECC_UNCORRECTABLE in the CUDA driver"):
        driver.free_range(GRANULE, GRANULE)


def test_out_of_memory_is_known_as_such(fake: FakeBindings, driver: CudaDriver) -> None:
    fake.fail["cuMemCreate"] = [RESULT.CUDA_ERROR_OUT_OF_MEMORY]
    with pytest.raises(DriverError, match=f"device=0, size={GRANULE}") as caught:
        driver.create(0, GRANULE)
    assert caught.value.out_of_memory
    assert fake.called("cuMemCreate") == 1, "only a refused handle type is worth another try"


def test_a_number_that_does_not_fit_is_a_driver_error(driver: CudaDriver) -> None:
    if HAS_LIBCUDA:
        pytest.skip("only the real bindings convert numbers, and here they would reach a driver")
    with pytest.raises(DriverError, match="negative or too large") as caught:
        driver.reserve(-GRANULE, GRANULE)
    assert caught.value.result == "CUDA_ERROR_INVALID_VALUE"


def test_a_device_that_is_not_there_is_a_driver_error(driver: CudaDriver) -> None:
    for ordinal in (2, -1):
        with pytest.raises(DriverError, match=f"device={ordinal}.*CUDA_VISIBLE_DEVICES"):
            driver.create(ordinal, GRANULE)
