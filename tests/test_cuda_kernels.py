"""How kernels are launched, on a fake of the CUDA bindings; and which of them may overlap."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import cuda.bindings
import cuda.bindings.driver as real
import pytest
from fake_bindings import FakeBindings, FakeStream
from ptx import ptx_of

from cupy_zc import kernels
from cupy_zc.driver import cuda_kernels
from cupy_zc.errors import DriverError

#: Functions of two kernels: one waits for those before it on its stream, the other does not.
WAITS, PLAIN = 0x1000, 0x2000
SOURCES = sorted(path.name for path in kernels.path("types.cuh").parent.glob("*.cu"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBindings:
    fake = FakeBindings()
    functions = {each: (real.CUfunction(each), each == WAITS) for each in (WAITS, PLAIN)}
    monkeypatch.setattr(cuda_kernels, "_functions", functions)
    monkeypatch.setattr(cuda_kernels, "_launches", {})
    monkeypatch.setattr(cuda_kernels, "_launch", fake.cuLaunchKernelEx)
    return fake


def launched(fake: FakeBindings) -> tuple[Any, int, int]:
    """The configuration, the function and the parameters of the last launch."""
    name, (config, function, parameters, extra) = fake.calls[-1]
    assert name == "cuLaunchKernelEx"
    assert extra == 0
    return config, int(function), parameters


def test_a_kernel_that_waits_by_itself_may_start_before_the_one_before_it_has_ended(
    fake: FakeBindings,
) -> None:
    cuda_kernels.launch(WAITS, 7, 96, FakeStream(0x50), 0x99)
    config, function, parameters = launched(fake)
    assert (function, parameters) == (WAITS, 0x99)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (7, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (96, 1, 1)
    assert (config.sharedMemBytes, int(config.hStream), config.numAttrs) == (0, 0x50, 1)
    (attribute,) = config.attrs
    kind = real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert attribute.id == kind
    assert attribute.value.programmaticStreamSerializationAllowed == 1
    # The driver reads a C structure, whose last members are the address and number of attributes.
    held = ctypes.string_at(config.getPtr(), 56)
    assert int.from_bytes(held[40:48], "little") != 0
    assert int.from_bytes(held[48:52], "little") == 1


def test_a_kernel_that_does_not_wait_starts_when_the_one_before_it_has_ended(
    fake: FakeBindings,
) -> None:
    cuda_kernels.launch(PLAIN, 1, 32, FakeStream(0), 0x99)
    config, _, _ = launched(fake)
    assert (config.numAttrs, int(config.hStream)) == (0, 1), "1 is the legacy stream, always"


def test_what_a_launch_needs_is_made_once_for_each_shape_and_stream(fake: FakeBindings) -> None:
    shapes = [
        (WAITS, 1, 32, 0x50),
        (WAITS, 2, 32, 0x50),
        (WAITS, 1, 64, 0x50),
        (PLAIN, 1, 32, 0x60),
    ]
    seen = []
    for _ in range(2):
        for function, blocks, threads, stream in shapes:
            cuda_kernels.launch(function, blocks, threads, FakeStream(stream), 0x99)
            config, launched_function, _ = launched(fake)
            told = (launched_function, config.gridDimX, config.blockDimX, int(config.hStream))
            assert told == (function, blocks, threads, stream)
            seen.append(config)
    assert [id(each) for each in seen[:4]] == [id(each) for each in seen[4:]]


def test_what_launches_need_is_not_kept_for_ever(
    fake: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_kernels, "_KEPT", 3)
    for stream in range(1, 9):
        cuda_kernels.launch(WAITS, 1, 32, FakeStream(stream), 0x99)
        assert int(launched(fake)[0].hStream) == stream
        assert len(cuda_kernels._launches) <= 3


def test_a_launch_that_cuda_refuses_says_which_and_why(fake: FakeBindings) -> None:
    fake.fail["cuLaunchKernelEx"] = [real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS]
    told = r"cuLaunchKernelEx.*blocks=3, threads=512, stream=0x50.*the context is lost"
    with pytest.raises(DriverError, match=told) as caught:
        cuda_kernels.launch(WAITS, 3, 512, FakeStream(0x50), 0x99)
    assert caught.value.result == "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_who_cannot_be_sure_does_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that have no such wait, and bindings that ask captures in the old way."""
    installed = int(cuda.bindings.__version__.partition(".")[0])
    assert cuda_kernels._CAPTURES_HAVE_OVERLAPS == (installed >= 13)
    waits, plain = kernels.source("ll128.cu"), kernels.source("copy_rows.cu")
    monkeypatch.setattr(cuda_kernels, "_CAPTURES_HAVE_OVERLAPS", True)
    overlap = cuda_kernels._may_overlap
    assert [overlap(waits, each) for each in (80, 89, 90, 100)] == [False, False, True, True]
    assert not overlap(plain, 90)
    monkeypatch.setattr(cuda_kernels, "_CAPTURES_HAVE_OVERLAPS", False)
    assert not overlap(waits, 90)


def entries(name: str, architecture: str) -> dict[str, str]:
    """The PTX of each kernel of a source."""
    text = ptx_of(kernels.source(name), architecture)
    return dict(re.findall(r"\.entry (\w+)\((.*?^\})", text, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("name", SOURCES)
def test_a_kernel_that_may_overlap_touches_no_memory_before_it_has_waited(name: str) -> None:
    """Whether it may is read off the source: all of its kernels are made by the macro, or none."""
    by_macro = cuda_kernels._WAITS in kernels.source(name)
    found = entries(name, "compute_90")
    assert found
    for kernel, code in found.items():
        before, wait, after = code.partition("griddepcontrol.wait;")
        assert bool(wait) == by_macro, kernel
        if by_macro:
            assert not re.search(r"\b(ld|st|atom|red|multimem|cp)\.(?!param)", before), kernel
            assert "griddepcontrol.wait" not in after, kernel


def test_only_kernels_whose_blocks_hear_from_all_ranks_let_the_next_one_start() -> None:
    """Others might fill the GPU with blocks of the next call before those of this one are there."""
    early = {
        kernel
        for name in SOURCES
        for kernel, code in entries(name, "compute_90").items()
        if "griddepcontrol.launch_dependents" in code
    }
    calls = ("all_gather", "all_to_all", "reduce_scatter")
    pairs = {f"ll128_pair_{call}" for call in (*calls, "all_reduce")}
    assert early == {"ll128", *(f"ll128_{call}" for call in calls), *pairs}


def test_to_compile_changes_no_bytes_of_others() -> None:
    """NVRTC ended its empty log in the one object that b" " is, for all of the process."""
    ptx_of("", "compute_90")
    assert [ord(bytes([each])) for each in range(256)] == list(range(256))


def test_kernels_of_older_architectures_do_without_the_wait() -> None:
    assert all("griddepcontrol" not in code for code in entries("ll128.cu", "compute_80").values())
