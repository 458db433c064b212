"""What only a GPU can say about the CUDA driver. No multicast object is made here."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy
import pytest

from cupy_zc import kernels
from cupy_zc.driver import select
from cupy_zc.driver.api import Driver, KernelDriver
from cupy_zc.errors import DriverError

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SPIN = cupy.RawKernel(
    """extern "C" __global__ void spin(long long nanoseconds) {
        long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
    }""",  # noqa: E501
    "spin",
)


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = select("cuda")
    yield driver
    assert driver.multicast_objects_created == 0


def on_a_thread(work: Callable[[], Any]) -> Any:
    """Run on a thread that never touched CUDA."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result(60)


def soon(condition: Callable[[], bool], seconds: float = 1.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def captured(stream: Any, work: Callable[[], Any], driver: Driver) -> tuple[Any, Any]:
    """A graph of ``work``, and the lease taken while it was captured."""
    with stream:
        stream.begin_capture()
        work()
        info = driver.capture_info(stream)
        assert info is not None
        lease = driver.lease_graph(info.graph)
        return stream.end_capture(), lease


def test_the_device_is_described(driver: Driver) -> None:
    info = driver.device_info(0)
    assert info.posix_fd
    assert info.name.isprintable()
    assert len(info.uuid) == 16
    assert any(info.uuid)
    granules = driver.granularity(0, 64 * MIB)
    segment = driver.create(0, granules.size)
    try:
        assert segment.handle_types in (("posix_fd",), ("posix_fd", "fabric"))
        assert info.fabric or "fabric" not in segment.handle_types
    finally:
        driver.release(segment)
    assert (granules.multicast_minimum > 0) == info.multicast


def test_memory_mapped_twice_is_the_same_memory_and_is_given_back(driver: Driver) -> None:
    size = driver.granularity(0, 64 * MIB).size * 4
    module = cupy.RawModule(code=kernels.source("pattern.cu"), options=("-std=c++17",))
    write, check = module.get_function("pattern_write"), module.get_function("pattern_check")
    wrong = cupy.zeros(1, dtype=cupy.uint64)
    count, first, seed = cupy.uint64(size // 4), cupy.uint64(0), cupy.uint32(3)
    driver.synchronize(0)
    free = driver.memory_info(0).free

    segment = driver.create(0, size)
    fd = driver.export_segment(segment)
    assert not os.get_inheritable(fd)
    again = driver.import_segment(fd, size, 0)
    os.close(fd)
    base = driver.reserve(4 * size, size)
    for place, handle in enumerate((segment, again)):
        driver.map(base + place * size, handle)
        driver.set_access(base + place * size, size, 0)
        driver.release(handle)
    assert driver.memory_info(0).free <= free - size
    write((64,), (256,), (cupy.uint64(base), count, first, seed))
    check((64,), (256,), (cupy.uint64(base + size), count, first, seed, wrong))
    assert int(wrong[0]) == 0
    driver.write(base + 4, b"changed!")
    assert driver.read(base + size, 16)[4:12] == b"changed!"
    check((64,), (256,), (cupy.uint64(base + size), count, first, seed, wrong))
    assert int(wrong[0]) == 2
    for place in range(2):
        driver.unmap(base + place * size, size)
    driver.free_range(base, 4 * size)
    assert soon(lambda: abs(driver.memory_info(0).free - free) < MIB)


def test_a_thread_without_a_context_can_do_it_all(driver: Driver) -> None:
    size = driver.granularity(0, 64 * MIB).size

    def life() -> bytes:
        base = driver.reserve(size, size)
        segment = driver.create(0, size)
        driver.map(base, segment)
        driver.set_access(base, size, 0)
        driver.write(base, b"abc")
        data = driver.read(base, 3)
        driver.release(segment)
        driver.synchronize(0)
        driver.unmap(base, size)
        driver.free_range(base, size)
        return data

    assert on_a_thread(life) == b"abc"


def test_a_thread_without_a_context_can_tidy_up(driver: Driver) -> None:
    size = driver.granularity(0, 64 * MIB).size
    base, segment = driver.reserve(size, size), driver.create(0, size)
    driver.map(base, segment)

    def tidy() -> None:
        driver.unmap(base, size)
        driver.release(segment)
        driver.free_range(base, size)

    on_a_thread(tidy)
    with pytest.raises(DriverError):
        driver.free_range(base, size)


def test_a_new_stream_has_a_new_key_also_with_an_old_handle(driver: Driver) -> None:
    keys, handles = set(), set()
    for _ in range(20):
        stream = driver.make_stream(non_blocking=True)
        keys.add(driver.stream_key(stream))
        handles.add(stream.ptr)
        assert driver.stream_key(cupy.cuda.Stream.from_external(stream)) in keys
        assert len(keys) >= len(handles)
        del stream
    assert len(keys) == 20
    assert 0 not in keys
    assert driver.stream_key(cupy.cuda.Stream.null) == 0
    assert driver.stream_key(cupy.cuda.Stream.ptds) < 0


def test_a_key_may_be_asked_for_on_any_thread_but_not_first_while_capturing(
    driver: Driver,
) -> None:
    stream = driver.make_stream(non_blocking=True)
    stream.begin_capture()
    with pytest.raises(DriverError, match="STREAM_CAPTURE_UNSUPPORTED"):
        driver.stream_key(stream)
    stream.end_capture()  # raises if asking had invalidated the capture
    key = on_a_thread(lambda: driver.stream_key(stream))
    stream.begin_capture()
    assert driver.stream_key(stream) == key
    stream.end_capture()
    assert driver.stream_key(cupy.cuda.Stream.from_external(stream)) == key


def test_forked_streams_are_in_one_capture(driver: Driver) -> None:
    stream, fork = driver.make_stream(non_blocking=True), driver.make_stream(non_blocking=True)
    assert driver.capture_info(stream) is None
    with stream:
        stream.begin_capture()
        fork.wait_event(stream.record())
        infos = [driver.capture_info(each) for each in (stream, fork)]
        stream.wait_event(fork.record())
        stream.end_capture()
    assert infos[0] is not None
    assert infos[1] is not None
    assert infos[0].id == infos[1].id
    assert int(infos[0].graph) == int(infos[1].graph)
    assert driver.capture_info(stream) is None


def test_a_lease_ends_soon_after_the_graph_is_dropped_and_not_before(driver: Driver) -> None:
    stream, array = driver.make_stream(non_blocking=True), cupy.zeros(100, dtype=cupy.float32)
    array += 1  # compiled and loaded before the capture
    driver.synchronize(0)
    graph, lease = captured(stream, lambda: array.__iadd__(1), driver)
    assert not lease.released
    graph.launch(stream)
    stream.synchronize()
    time.sleep(0.05)
    assert not lease.released
    del graph
    assert soon(lambda: lease.released)
    assert float(array[0]) == 2


def test_a_lease_outlasts_a_launch_that_is_still_running(driver: Driver) -> None:
    stream = driver.make_stream(non_blocking=True)
    SPIN((1,), (1,), (0,))
    graph, lease = captured(stream, lambda: SPIN((1,), (1,), (300_000_000,)), driver)
    graph.launch(stream)
    del graph
    early = lease.released and not stream.done
    assert soon(lambda: lease.released, 5)
    assert not early, "the lease ended while the graph's kernel was running"
    assert soon(lambda: stream.done), "the lease ended while the graph's kernel was running"


def test_a_lease_on_a_finished_graph_ends_with_the_object(driver: Driver) -> None:
    stream = driver.make_stream(non_blocking=True)
    SPIN((1,), (1,), (0,))
    graph, early = captured(stream, lambda: SPIN((1,), (1,), (0,)), driver)
    late = driver.lease_graph(graph)
    assert not late.released
    del graph
    assert soon(lambda: early.released and late.released)


def test_a_capture_that_fails_ends_its_lease(driver: Driver) -> None:
    stream, fork = driver.make_stream(non_blocking=True), driver.make_stream(non_blocking=True)
    SPIN((1,), (1,), (0,))
    with stream:
        stream.begin_capture()
        info = driver.capture_info(stream)
        assert info is not None
        lease = driver.lease_graph(info.graph)
        fork.wait_event(stream.record())
        with fork:
            SPIN((1,), (1,), (0,))
        assert not lease.released
        with pytest.raises(RuntimeError, match="StreamCaptureUnjoined"):
            stream.end_capture()
    assert soon(lambda: lease.released)


def test_an_event_may_be_asked_for_beside_a_strict_capture(driver: Driver) -> None:
    stream, other = driver.make_stream(non_blocking=True), driver.make_stream(non_blocking=True)
    SPIN((1,), (1,), (0,))
    with other:
        SPIN((1,), (1,), (50_000_000,))
    event = driver.record_event(other)
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
    first = event.done or on_a_thread(lambda: event.done)
    finished = soon(lambda: event.done)
    stream.end_capture()  # raises if asking had invalidated the capture
    assert not first
    assert finished


@pytest.mark.parametrize("mode", ["Relaxed", "ThreadLocal", "Global"])
def test_synchronizing_waits_and_harms_no_capture_of_another_thread(
    driver: Driver, mode: str
) -> None:
    """Ends: freeing memory in one thread invalidating the capture of another."""
    ready, go = threading.Event(), threading.Event()
    array = cupy.zeros(100, dtype=cupy.float32)
    array += 1
    SPIN((1,), (1,), (0,))
    driver.synchronize(0)

    def capture() -> Any:
        with driver.make_stream(non_blocking=True) as stream:
            stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
            array.__iadd__(1)
            ready.set()
            go.wait(30)
            return stream.end_capture()  # raises if the capture was invalidated

    busy = driver.make_stream(non_blocking=True)
    with ThreadPoolExecutor(1) as thread:
        capturing = thread.submit(capture)
        try:
            assert ready.wait(30)
            with busy:
                SPIN((1,), (1,), (200_000_000,))
            event = driver.record_event(busy)
            driver.synchronize(0)
            assert event.done  # busy.done would itself be forbidden beside a global capture
        finally:
            go.set()
        graph = capturing.result(60)
    graph.launch(busy)
    busy.synchronize()
    assert float(array[0]) == 2


def test_a_copy_is_refused_while_the_current_stream_captures(driver: Driver) -> None:
    array = cupy.zeros(4, dtype=cupy.uint8)
    with driver.make_stream(non_blocking=True) as stream:
        stream.begin_capture()
        with pytest.raises(DriverError, match="capture"):
            driver.read(array.data.ptr, 4)
        stream.end_capture()
    assert driver.read(array.data.ptr, 4) == b"\0" * 4


@pytest.mark.parametrize("kind", ["kept_memory", "mapped_memory"])
def test_to_drop_memory_of_kernels_waits_for_none_and_a_wait_frees_it(
    driver: KernelDriver, kind: str
) -> None:
    """The kind of bug: the collector waited for kernels that waited for its thread."""
    take, stream = getattr(driver, kind), driver.make_stream(non_blocking=True)
    SPIN((1,), (1,), (0,))
    driver.synchronize(0)
    memory = take(123_456)
    place = memory.ptr
    with stream:
        SPIN((1,), (1,), (300_000_000,))
    del memory
    assert not stream.done, "the drop waited for the kernel"
    assert take(123_456).ptr != place
    driver.synchronize(0)
    assert place in {each.ptr for each in [take(123_456) for _ in range(3)]}
