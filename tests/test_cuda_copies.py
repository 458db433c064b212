"""Bytes to and from the device through the CUDA driver, on a fake of its bindings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_bindings import RELAXED_THEN_GLOBAL, FakeBindings, cuda_driver, modes

from cupy_zc.driver.cuda import CudaDriver
from cupy_zc.errors import DriverError


@pytest.fixture
def fake() -> FakeBindings:
    return FakeBindings()


@pytest.fixture
def driver(fake: FakeBindings, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriver]:
    yield cuda_driver(monkeypatch, fake)
    assert fake.contexts == [], "a call left a context current"


def test_bytes_are_copied_on_the_current_stream_which_is_waited_for_before_and_after(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    """A copy of pageable memory that waits for its stream blocks those of other streams."""
    driver.write(0x9000, b"zero copy")
    assert driver.read(0x9000, 9) == b"zero copy"
    streams = [(name, arguments[-1]) for name, arguments in fake.calls if arguments[-1:] == (0x50,)]
    wait = ("cuStreamSynchronize", 0x50)
    assert [call for call in streams if call == wait or "Memcpy" in call[0]] == [
        wait, ("cuMemcpyHtoDAsync", 0x50), wait, wait, ("cuMemcpyDtoHAsync", 0x50), wait,
    ]  # fmt: skip
    assert modes(fake) == RELAXED_THEN_GLOBAL * 2


def test_no_bytes_are_no_call(fake: FakeBindings, driver: CudaDriver) -> None:
    asked = len(fake.calls)
    driver.write(0x9000, b"")
    assert driver.read(0x9000, 0) == b""
    assert len(fake.calls) == asked


def test_a_copy_on_a_capturing_stream_is_refused(fake: FakeBindings, driver: CudaDriver) -> None:
    fake.start_capture(17, 0x123)
    for copy in (lambda: driver.read(0x9000, 4), lambda: driver.write(0x9000, b"1234")):
        with pytest.raises(DriverError, match=r"address=0x9000, size=4.*capture") as caught:
            copy()
        assert caught.value.result == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert not any("Memcpy" in name for name, _ in fake.calls)
