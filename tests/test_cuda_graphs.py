"""Streams, events, captures and leases of the CUDA driver, on a fake of its bindings.

The leases use the C library's real semaphores; the fake posts them as CUDA would.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as real
import cupy
import pytest
from fake_bindings import (
    GRANULE,
    MODE,
    RELAXED_THEN_GLOBAL,
    FakeBindings,
    FakeStream,
    cuda_driver,
    modes,
)

from cupy_zc.driver import cuda_graphs
from cupy_zc.driver.cuda import CudaDriver
from cupy_zc.errors import DriverError, InvalidTypeError, InvalidValueError

RESULT = real.CUresult


@pytest.fixture
def fake() -> FakeBindings:
    return FakeBindings()


@pytest.fixture
def driver(fake: FakeBindings, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriver]:
    yield cuda_driver(monkeypatch, fake)
    assert fake.contexts == [], "a call left a context current"


@pytest.fixture(autouse=True)
def semaphores(monkeypatch: pytest.MonkeyPatch) -> cuda_graphs._Semaphores:
    """Semaphores of this test alone."""
    fresh = cuda_graphs._Semaphores()
    monkeypatch.setattr(cuda_graphs, "_semaphores", fresh)
    return fresh


# Streams


def test_a_stream_is_asked_for_its_key_once(fake: FakeBindings, driver: CudaDriver) -> None:
    stream = FakeStream(0x70)
    assert driver.stream_key(stream) == driver.stream_key(stream) > 0
    assert fake.called("cuStreamGetId") == 1


def test_a_new_stream_with_an_old_handle_has_another_key(driver: CudaDriver) -> None:
    assert driver.stream_key(FakeStream(0x70)) != driver.stream_key(FakeStream(0x70))


@pytest.mark.parametrize("pointer", [0, 1])
def test_the_legacy_default_stream_has_key_zero(
    fake: FakeBindings, driver: CudaDriver, pointer: int
) -> None:
    asked = len(fake.calls)
    assert driver.stream_key(FakeStream(pointer)) == 0
    assert driver.capture_info(FakeStream(pointer)) is None
    assert len(fake.calls) == asked, "to ask about it can disturb a capture"


def test_the_per_thread_default_stream_has_a_key_for_each_thread(driver: CudaDriver) -> None:
    stream, barrier = FakeStream(2), threading.Barrier(4)

    def keys() -> tuple[int, int]:
        first = driver.stream_key(stream)
        barrier.wait(timeout=30)
        return first, driver.stream_key(stream)

    with ThreadPoolExecutor(4) as threads:
        found = [future.result(30) for future in [threads.submit(keys) for _ in range(4)]]
    assert all(first == second < 0 for first, second in found)
    assert len(set(found)) == 4
    assert not hasattr(stream, "_cupy_zc_key")


def test_a_stream_that_takes_no_attributes_is_asked_each_time(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    class Foreign:
        __slots__ = ()
        ptr = 0x70

    stream = Foreign()
    assert driver.stream_key(stream) > 0
    assert driver.stream_key(stream) > 0
    assert fake.called("cuStreamGetId") == 2


def test_streams_are_cupy_s_and_their_failure_is_ours(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(
        cupy.cuda, "Stream", lambda *, non_blocking: made.append(non_blocking) or "a stream"
    )
    assert driver.make_stream() == driver.make_stream(non_blocking=True) == "a stream"
    assert made == [False, True]

    def refuse(*, non_blocking: bool) -> None:
        raise cupy.cuda.runtime.CUDARuntimeError(2)

    monkeypatch.setattr(cupy.cuda, "Stream", refuse)
    with pytest.raises(DriverError, match="non_blocking=True") as caught:
        driver.make_stream(non_blocking=True)
    assert caught.value.call == "cudaStreamCreateWithPriority"
    assert caught.value.out_of_memory


# Events and waiting


def test_an_event_is_asked_for_without_harm_to_captures(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    stream = FakeStream(0x70, 1)
    event = driver.record_event(stream)
    pushed = [int(arguments[0]) for name, arguments in fake.calls if name == "cuCtxPushCurrent"]
    assert pushed == [0xC001], "an event belongs to the device of its stream"
    assert event._event.recorded is stream
    assert not event.done
    assert modes(fake) == RELAXED_THEN_GLOBAL
    fake.events_done = True
    assert event.done
    fake.events_done = False
    assert event.done, "what is done stays done"
    assert modes(fake) == RELAXED_THEN_GLOBAL * 2, "and is not asked again"


def test_an_event_after_a_failed_kernel_says_so(fake: FakeBindings, driver: CudaDriver) -> None:
    event = driver.record_event(FakeStream(0x70))
    fake.fail["cuEventQuery"] = [RESULT.CUDA_ERROR_ILLEGAL_ADDRESS]
    with pytest.raises(DriverError, match="restart the process"):
        assert event.done
    assert modes(fake) == RELAXED_THEN_GLOBAL


@pytest.mark.parametrize(
    ("answers", "query", "recorded", "asked", "found"),
    [
        ([False, False], None, True, True, True),
        ([True], None, False, False, False),
        ([False, True], None, True, False, False),  # a captured event is not asked for
        ([False, False], "CUDA_ERROR_CAPTURED_EVENT", True, True, False),
        ([False, False], "CUDA_ERROR_INVALID_VALUE", True, True, False),
    ],
)
def test_an_event_on_a_stream_that_another_thread_captures_is_none(
    fake: FakeBindings,
    driver: CudaDriver,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[bool],
    query: str | None,
    recorded: bool,
    asked: bool,
    found: bool,
) -> None:
    """The kind of bug: a stream was asked whether it captures, and did when the answer was used.

    To ask for an event of a capture that has not ended makes the capture invalid.
    """
    made = []
    init = cupy.cuda.Event.__init__

    def note(event: Any, **options: Any) -> None:
        made.append(event)
        init(event, **options)

    monkeypatch.setattr(cupy.cuda.Event, "__init__", note)
    monkeypatch.setattr(driver, "is_capturing", lambda ptr: answers.pop(0))
    if query is not None:
        fake.fail["cuEventQuery"] = [getattr(RESULT, query)]
    event = driver.try_record_event(FakeStream(0x70))
    assert (event is not None) == found
    assert bool(made) == recorded
    assert ("cuEventQuery" in [name for name, _ in fake.calls]) == asked
    assert not answers


def test_a_point_behind_a_failed_kernel_is_no_capture(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    fake.fail["cuEventQuery"] = [RESULT.CUDA_ERROR_ILLEGAL_ADDRESS]
    with pytest.raises(DriverError, match="restart the process"):
        driver.try_record_event(FakeStream(0x70))


@pytest.mark.parametrize("call", ["cudaEventCreateWithFlags", "cudaEventRecord"])
def test_a_failure_to_record_is_a_driver_error(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise cupy.cuda.runtime.CUDARuntimeError(900)

    method = "__init__" if call == "cudaEventCreateWithFlags" else "record"
    monkeypatch.setattr(cupy.cuda.Event, method, refuse)
    with pytest.raises(DriverError, match="stream=0x70, device=0") as caught:
        driver.record_event(FakeStream(0x70))
    assert caught.value.call == call
    assert caught.value.result == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"


def test_synchronize_frees_memory_in_relaxed_mode_in_the_context_of_the_device(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    driver.create(1, GRANULE)  # allocates what will be freed
    fake.calls.clear()
    driver.synchronize(1)
    names = [name for name, _ in fake.calls]
    assert names == ["cuCtxPushCurrent", MODE, "cuMemFree", "cuMemAlloc", MODE, "cuCtxPopCurrent"]
    assert modes(fake) == RELAXED_THEN_GLOBAL
    assert len(fake.allocations) == 1


def test_synchronize_works_before_anything_was_created(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    driver.synchronize(1)
    assert fake.called("cuMemFree") == 1
    assert len(fake.allocations) == 1


def test_without_memory_left_synchronize_takes_the_call_that_captures_forbid(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    full = RESULT.CUDA_ERROR_OUT_OF_MEMORY
    fake.fail["cuMemAlloc"] = [full, full]
    driver.create(1, GRANULE)
    driver.synchronize(1)
    assert fake.called("cuCtxSynchronize") == 1
    fake.fail["cuMemAlloc"] = [full]
    fake.fail["cuCtxSynchronize"] = [RESULT.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED]
    with pytest.raises(DriverError, match=r"device=1.*before or after the capture"):
        driver.synchronize(1)
    assert modes(fake)[-2:] == RELAXED_THEN_GLOBAL[-2:]


def test_other_trouble_with_that_memory_is_an_error_and_creates_nothing(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    fake.fail["cuMemAlloc"] = [RESULT.CUDA_ERROR_ILLEGAL_ADDRESS]
    with pytest.raises(DriverError, match="cuMemAlloc"):
        driver.create(1, GRANULE)
    assert not fake.handles


# Captures


def test_a_capture_is_told_by_its_id_and_graph(fake: FakeBindings, driver: CudaDriver) -> None:
    stream = FakeStream(0x70)
    assert driver.capture_info(stream) is None
    fake.start_capture(17, 0x123)
    info = driver.capture_info(stream)
    assert info is not None
    assert (info.id, int(info.graph)) == (17, 0x123)


def test_the_shorter_result_of_cuda_12_is_understood(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    fake.start_capture(17, 0x123)
    fake.capture = (*fake.capture[:5], 0)  # without edge data
    info = driver.capture_info(FakeStream(0x70))
    assert info is not None
    assert (info.id, int(info.graph)) == (17, 0x123)


def test_an_invalidated_capture_is_an_error(fake: FakeBindings, driver: CudaDriver) -> None:
    fake.invalidate_capture()
    with pytest.raises(DriverError, match=r"stream=0x70.*capture again") as caught:
        driver.capture_info(FakeStream(0x70))
    assert caught.value.result == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"


# Leases


def test_a_lease_lasts_as_long_as_the_graph(fake: FakeBindings, driver: CudaDriver) -> None:
    fake.start_capture(17, 0x123)
    info = driver.capture_info(FakeStream(0x70))
    assert info is not None
    leases = [driver.lease_graph(info.graph), driver.lease_graph(0x123)]
    other = driver.lease_graph(real.CUgraph(0x456))
    assert not any(lease.released for lease in (*leases, other))
    fake.drop_graph(0x123)
    assert all(lease.released for lease in leases)
    assert not other.released
    fake.drop_graph(0x456)
    assert other.released


def test_a_lease_stays_released_when_its_semaphore_is_used_again(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    first = driver.lease_graph(0x123)
    fake.drop_graph(0x123)
    assert first.released
    second = driver.lease_graph(0x456)
    assert second.semaphore == first.semaphore
    assert first.released
    assert not second.released
    fake.drop_graph(0x456)
    assert second.released
    assert first.released


def test_semaphores_of_dropped_leases_are_used_again(
    fake: FakeBindings, driver: CudaDriver
) -> None:
    used = set()
    for graph in range(1, 200):
        used.add(driver.lease_graph(graph).semaphore)
        fake.drop_graph(graph)
    assert len(used) == 1


def test_a_semaphore_survives_until_it_is_posted(fake: FakeBindings, driver: CudaDriver) -> None:
    address = driver.lease_graph(0x123).semaphore
    others = [driver.lease_graph(0x456) for _ in range(50)]
    assert address not in {lease.semaphore for lease in others}
    fake.drop_graph(0x123)
    fake.drop_graph(0x456)
    assert all(lease.released for lease in others)


def test_many_threads_may_ask_one_lease(fake: FakeBindings, driver: CudaDriver) -> None:
    stop = threading.Event()

    def watch(lease: cuda_graphs.CudaGraphLease) -> int:
        seen = []
        while not stop.is_set():
            seen.append(lease.released)
        seen.append(lease.released)
        return sum(later < earlier for earlier, later in itertools.pairwise(seen))

    with ThreadPoolExecutor(4) as threads:
        lease = driver.lease_graph(0x123)
        watching = [threads.submit(watch, lease) for _ in range(4)]
        try:
            for graph in range(1, 50):  # the others recycle what it gives back
                if graph == 25:
                    fake.drop_graph(0x123)
                other = driver.lease_graph(0x1000 + graph)
                assert not other.released
                fake.drop_graph(0x1000 + graph)
                assert other.released
        finally:
            stop.set()
        assert [future.result(30) for future in watching] == [0] * 4
    assert lease.released


def test_a_lease_that_cannot_be_attached_leaves_nothing(
    fake: FakeBindings, driver: CudaDriver, semaphores: cuda_graphs._Semaphores
) -> None:
    for name in ("cuUserObjectCreate", "cuGraphRetainUserObject"):
        fake.fail[name] = [RESULT.CUDA_ERROR_INVALID_VALUE]
        with pytest.raises(DriverError, match="graph=0x123") as caught:
            driver.lease_graph(0x123)
        assert caught.value.call == name
    assert fake.user_objects == {}, "the object that no graph took is released"
    lease = driver.lease_graph(0x456)
    assert semaphores._lent == {lease}, "the release posted the lost semaphore, and it was found"
    assert not lease.released
    fake.drop_graph(0x456)
    assert lease.released


def test_a_release_that_fails_too_tells_both(fake: FakeBindings, driver: CudaDriver) -> None:
    for name in ("cuGraphRetainUserObject", "cuUserObjectRelease"):
        fake.fail[name] = [RESULT.CUDA_ERROR_INVALID_VALUE]
    with pytest.raises(DriverError) as caught:
        driver.lease_graph(0x123)
    assert caught.value.call == "cuUserObjectRelease"
    first = caught.value.__context__
    assert isinstance(first, DriverError)
    assert first.call == "cuGraphRetainUserObject"


def test_what_is_no_graph_is_refused(fake: FakeBindings, driver: CudaDriver) -> None:
    asked = len(fake.calls)
    unfinished = cupy.cuda.Graph.__new__(cupy.cuda.Graph)
    for nothing in (0, real.CUgraph(0), unfinished):
        with pytest.raises(InvalidValueError, match="before end_capture"):
            driver.lease_graph(nothing)
    for wrong in ("graph", None, SimpleNamespace(graph=0x123)):
        with pytest.raises(InvalidTypeError, match=r"cupy\.cuda\.Graph"):
            driver.lease_graph(wrong)
    assert len(fake.calls) == asked


def test_a_semaphore_that_cannot_be_had_is_an_error(
    driver: CudaDriver, semaphores: cuda_graphs._Semaphores, monkeypatch: pytest.MonkeyPatch
) -> None:
    libc = SimpleNamespace(calloc=lambda count, size: None)
    monkeypatch.setattr(cuda_graphs, "_libc", libc)
    with pytest.raises(MemoryError):
        driver.lease_graph(0x123)
    libc.calloc, libc.sem_init = (lambda count, size: 0x100), (lambda *arguments: -1)
    with pytest.raises(OSError, match="sem_init"):
        driver.lease_graph(0x123)
    assert not semaphores._lent
