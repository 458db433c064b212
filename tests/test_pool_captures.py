"""Memory of captures is private to their graph."""

from __future__ import annotations

import gc
import threading

import cupy
import pytest
from probes import wait_for_release

import cupy_zc
from cupy_zc.driver.host import HostDriver
from cupy_zc.memory.blocks import HOT_SIZES

MiB = 1 << 20


def capture(pool, driver, size=1000, drop=True):
    """A graph whose capture used one temporary; (graph, address of the temporary)."""
    stream = driver.make_stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        pointer = pool.malloc(size)
        address = pointer.ptr
        if drop:
            del pointer
        graph = stream.end_capture()
    return (graph, address) if drop else (graph, address, pointer)


def work(driver):
    """Something on the current stream."""
    if driver.name == "host":
        driver.current_stream().enqueue(lambda: None)
    else:
        WORK((1,), (1,), ())


WORK = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")


def test_a_temporary_of_a_capture_is_never_handed_to_anyone_else(pool, driver):
    """Ends: replay overwriting an eager array that got a captured temporary's memory."""
    graph, address = capture(pool, driver)
    held = [pool.malloc(1000) for _ in range(50)]
    with driver.make_stream():
        held += [pool.malloc(1000) for _ in range(50)]
    assert address not in {pointer.ptr for pointer in held}
    _, other = capture(pool, driver)
    assert other != address
    assert graph is not None


def test_a_temporary_is_reused_inside_its_capture(pool, driver):
    stream = driver.make_stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        first = pool.malloc(1000)
        address = first.ptr
        del first
        assert pool.malloc(1000).ptr == address
        stream.end_capture()


def test_reuse_inside_a_capture_does_not_eat_fresh_memory(pool, driver):
    stream = driver.make_stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        seen = set()
        for _ in range(20):
            pointer = pool.malloc(1000)
            seen.add(pointer.ptr)
            del pointer
        stream.end_capture()
    assert len(seen) == 1


def test_a_capture_does_not_use_what_eager_work_may_still_use(pool, driver):
    stream = driver.make_stream(non_blocking=True)
    with stream:
        eager = pool.malloc(1000)
        address = eager.ptr
        del eager
        stream.begin_capture()
        captured = pool.malloc(1000)
        assert captured.ptr != address
        stream.end_capture()
        assert pool.malloc(1000).ptr == address


def test_a_capture_of_very_many_sizes_keeps_its_memory_to_itself(pool, driver):
    """Ends: the fast path of eager arrays served from the bins of a capture."""
    pool.malloc(64)
    sizes = [512 * n for n in range(1, HOT_SIZES + 20)]
    stream = driver.make_stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for _ in range(3):
            for size in sizes:
                pool.malloc(size)
        graph = stream.end_capture()
    eager = [pool.malloc(size) for _ in range(3) for size in sizes]
    assert all(pointer.mem.segment.home.capture is None for pointer in eager)
    assert graph is not None


def test_memory_that_arrives_after_its_capture_has_ended_is_not_lost():
    """Ends: a segment joining a home that nobody asks any more."""
    driver = HostDriver()
    stream = driver.make_stream()

    class Ending:
        def __getattr__(self, name):
            return getattr(driver, name)

        def create(self, device, size):
            stream.end_capture()
            gc.collect()
            pool.device_pool().captures.poll()
            return driver.create(device, size)

    pool = cupy_zc.MemoryPool(driver=Ending())
    with stream:
        stream.begin_capture()
        pool.malloc(1000)
    pool.free_all_blocks()
    assert (pool.used_bytes(), pool.total_bytes()) == (0, 0)


def test_graphs_that_are_gone_leave_nothing_behind(host, allocator):
    pool = cupy_zc.MemoryPool(driver=host)
    allocator(pool)
    side, stream = host.make_stream(), host.make_stream()
    for _ in range(20):
        with stream:
            stream.begin_capture()
            array = cupy.empty(1000)
            graph = stream.end_capture()
        pool.record_stream(array, side)
        del graph
        pool.free_all_blocks()
        del array
        pool.free_all_blocks()
    assert pool.device_pool().captures.homes() == []
    assert pool.total_bytes() == 0


def test_branches_of_a_capture_do_not_share_temporaries(pool, driver):
    """Ends: two branches of a graph, which may run at once, reusing one block."""
    main, side = (driver.make_stream(non_blocking=True) for _ in range(2))
    with main:
        main.begin_capture()
        first = pool.malloc(1000)
        address = first.ptr
        del first
        side.wait_event(main.record())
        with side:
            assert pool.malloc(1000).ptr != address
        main.wait_event(side.record())
        assert pool.malloc(1000).ptr == address
        graph = main.end_capture()
    assert pool.statistics().leased_bytes == pool.total_bytes()
    del graph


def test_memory_returns_when_the_graph_is_gone_and_not_before(pool, driver):
    graph, address = capture(pool, driver)
    figures = pool.statistics()
    assert figures.leased_bytes == figures.total_bytes == pool.device_pool().arena.granule
    pool.free_all_blocks()
    assert pool.statistics().leased_bytes == figures.leased_bytes
    device_pool = pool.device_pool()
    assert device_pool.find(address) is not None
    del graph
    gc.collect()
    wait_for_release(pool, lambda: pool.total_bytes() == 0)
    assert device_pool.find(address) is None


def test_memory_of_a_gone_graph_serves_the_stream_that_captured(driver):
    pool = cupy_zc.MemoryPool(driver=driver)
    stream = driver.make_stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        pointer = pool.malloc(1000)
        address = pointer.ptr
        del pointer
        graph = stream.end_capture()
        del graph
        gc.collect()
        pool.malloc(512)  # an eager segment, so that nothing is released below
        device_pool = pool.device_pool()
        for _ in range(200):
            if device_pool.captures.poll():
                break
            threading.Event().wait(0.005)
        assert pool.statistics().leased_bytes == 0
        granule = device_pool.arena.granule
        held = [pool.malloc(granule) for _ in range(pool.free_bytes() // granule)]
        assert address in {pointer.ptr for pointer in held}


def wait_until_settled(pool):
    """Until the pool knows that no graph lives. It keeps their memory."""
    gc.collect()
    for _ in range(1000):
        pool.device_pool().captures.poll()
        if pool.statistics().leased_bytes == 0:
            return
        threading.Event().wait(0.005)
    raise AssertionError("a graph is not gone")


def temporary(pool, driver, stream, size=1000):
    """The address of a temporary of a graph that is gone, and that the pool knows to be gone."""
    with stream:
        stream.begin_capture()
        address = pool.malloc(size).ptr
        graph = stream.end_capture()
        del graph
        wait_until_settled(pool)
        stream.synchronize()
    return address


def test_a_program_that_captures_again_and_again_does_not_grow(pool, driver):
    """Ends: a segment for the temporaries of each graph that ever was."""
    stream = driver.make_stream(non_blocking=True)
    first = temporary(pool, driver, stream)
    held = pool.total_bytes()
    for _ in range(30):
        assert temporary(pool, driver, stream) == first
    assert pool.total_bytes() == held


def test_a_capture_takes_the_smallest_segment_of_a_gone_graph_that_fits(pool, driver):
    granule = pool.device_pool().arena.granule
    streams = [driver.make_stream(non_blocking=True) for _ in range(2)]
    graphs = []
    for stream, count in zip(streams, (2, 1), strict=True):
        with stream:
            stream.begin_capture()
            address = pool.malloc(count * granule).ptr
            graphs.append((stream.end_capture(), address))
    addresses = [address for _, address in graphs]
    graphs.clear()
    wait_until_settled(pool)
    for stream in streams:
        stream.synchronize()
    again = [capture(pool, driver, count * granule) for count in (1, 2)]
    assert [address for _, address in again] == addresses[::-1]


def test_a_capture_does_not_take_what_eager_work_used_since_its_graph_was_gone(pool, driver):
    stream = driver.make_stream(non_blocking=True)
    address = temporary(pool, driver, stream)
    with stream:
        assert pool.malloc(1000).ptr == address  # by the stream, whose work may use it still
    _, other = capture(pool, driver)
    assert other != address


def test_a_capture_waits_for_work_on_an_array_that_outlived_an_earlier_capture(host_pool):
    """Else a replay could overwrite what a kernel still reads, on a stream it has no order with."""
    driver = host_pool.driver
    stream = driver.make_stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        array = host_pool.malloc(1000)
        address = array.ptr
        graph = stream.end_capture()
        hold = stream.hold()  # eager work on the array, which does not end
        del array, graph
        wait_until_settled(host_pool)
    _, other = capture(host_pool, driver)
    assert other != address
    hold.release()
    stream.synchronize()
    _, again = capture(host_pool, driver)
    assert again == address


def test_an_array_that_outlives_its_graph_comes_back_to_the_stream(pool, driver):
    graph, address, pointer = capture(pool, driver, drop=False)
    del graph
    gc.collect()
    wait_for_release(pool, lambda: pool.statistics().leased_bytes == 0)
    assert pool.used_bytes() == 1024
    assert pool.total_bytes() > 0
    assert len(pool.device_pool().captures.homes()) == 1
    del pointer
    pool.free_all_blocks()
    assert pool.total_bytes() == 0
    assert pool.device_pool().captures.homes() == []
    assert pool.device_pool().find(address) is None


def test_two_captures_at_once_have_memory_of_their_own(pool, driver):
    one, two = (driver.make_stream(non_blocking=True) for _ in range(2))
    one.begin_capture()
    two.begin_capture()
    with one:
        first = pool.malloc(1000)
        address = first.ptr
        del first
    with two:
        assert pool.malloc(1000).ptr != address
    with one:
        assert pool.malloc(1000).ptr == address
    one.end_capture()
    two.end_capture()


def test_a_failed_capture_gives_its_memory_back(driver):
    pool = cupy_zc.MemoryPool(driver=driver)
    work(driver)  # loads the kernel, which a capture must not
    stream, side = (driver.make_stream(non_blocking=True) for _ in range(2))
    with stream:
        stream.begin_capture()
        pool.malloc(1000)
        side.wait_event(stream.record())
        with side:
            work(driver)
        with pytest.raises(Exception, match=r"(?i)unjoined"):
            stream.end_capture()  # the fork was never joined
    del stream, side
    gc.collect()
    wait_for_release(pool, lambda: pool.total_bytes() == 0)


def test_a_capture_that_is_never_ended_gives_its_memory_back_with_its_stream(driver):
    pool = cupy_zc.MemoryPool(driver=driver)
    stream = driver.make_stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        pool.malloc(1000)
    del stream
    gc.collect()
    wait_for_release(pool, lambda: pool.statistics().leased_bytes == 0)
    assert pool.malloc(1000).mem.size == 1024
    pool.free_all_blocks()
    assert pool.total_bytes() == 0


def test_graphs_grow_by_doubling_and_50_are_bounded(pool, driver):
    graphs = [capture(pool, driver)[0] for _ in range(50)]
    granule = pool.device_pool().arena.granule
    assert pool.total_bytes() == pool.statistics().leased_bytes == 50 * granule
    stream = driver.make_stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        held = [pool.malloc(granule) for _ in range(20)]
        stream.end_capture()
    assert pool.total_bytes() <= 50 * granule + 40 * granule
    assert len(graphs) == 50
    assert len(held) == 20


def test_a_pool_at_its_limit_raises_in_a_capture_and_the_capture_goes_on(pool, driver):
    kept = pool.malloc(64 * MiB)
    pool.set_limit(size=64 * MiB)
    stream = driver.make_stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(cupy_zc.OutOfMemoryError):
            pool.malloc(1000)
        pool.free_all_blocks()
        graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert pool.used_bytes() == kept.mem.size


def test_snapshots_tell_which_memory_is_captured(pool, driver):
    graph, _ = capture(pool, driver)
    (device,) = pool.snapshot()["devices"]
    (segment,) = device["segments"]
    assert segment["capture"] is not None
    assert segment["stream"] is None
    assert f"capture {segment['capture']}" in cupy_zc.memory.render(pool.snapshot())
    del graph
    gc.collect()
    for _ in range(200):
        (device,) = pool.snapshot()["devices"]
        if device["segments"][0]["capture"] is None:
            break
        threading.Event().wait(0.005)
    assert device["segments"][0]["stream"] is not None
    assert pool.statistics().leased_bytes == 0
