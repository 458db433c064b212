"""Threads, finalizers and hooks at once: nothing overlaps, nothing is lost, nothing hangs."""

from __future__ import annotations

import gc
import random
import signal
import threading

import cupy
import pytest

import cupy_zc
from cupy_zc.driver.host import HostDriver
from cupy_zc.memory.blocks import Home

THREADS = 8


class Owners:
    """Who has which bytes; says so when two have the same. Without a lock: finalizers use it."""

    def __init__(self):
        self.spans: dict[int, int] = {}

    def claim(self, pointer):
        for start, size in self.spans.copy().items():  # the copy is one step
            assert start + size <= pointer.ptr or pointer.ptr + pointer.mem.size <= start
        self.spans[pointer.ptr] = pointer.mem.size

    def release(self, pointer):
        del self.spans[pointer.ptr]


class Array:
    """Holds memory in a reference cycle, so only the collector can free it."""

    def __init__(self, pool, size, owners):
        self.pointer = pool.malloc(size)
        self.owners = owners
        owners.claim(self.pointer)
        self.me = self

    def __del__(self):
        self.owners.release(self.pointer)


class Allocating(Array):
    """A finalizer that allocates: it may run inside malloc."""

    def __init__(self, pool, size, owners):
        super().__init__(pool, size, owners)
        self.pool = pool

    def __del__(self):
        super().__del__()
        self.pool.malloc(random.randrange(1, 100_000))


def run_threads(work, count=THREADS):
    errors: list[BaseException] = []

    def guarded(number):
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "dead-lock"
    if errors:
        raise errors[0]


@pytest.fixture
def eager_collector():
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("kind", [Array, Allocating])
@pytest.mark.parametrize("shared_stream", [True, False])
def test_random_allocation_in_threads_with_cycles(eager_collector, kind, shared_stream):
    driver = HostDriver()
    pool = cupy_zc.MemoryPool(driver=driver, segment_size=1 << 22)
    owners = Owners()

    def work(number):
        rng = random.Random(number)
        stream = driver.current_stream() if shared_stream else driver.make_stream()
        with stream:
            held = []
            for _ in range(400):
                if held and rng.random() < 0.5:
                    del held[rng.randrange(len(held))]
                else:
                    size = rng.choice([1, 512, 4096, rng.randrange(1, 300_000)])
                    held.append(kind(pool, size, owners))

    run_threads(work)
    gc.collect()
    gc.collect()
    assert pool.used_bytes() == 0
    assert not owners.spans
    pool.free_all_blocks()
    assert pool.total_bytes() == 0


class AllocatingHook(cupy.cuda.MemoryHook):
    """A hook that uses the pool itself, in every callback."""

    name = "AllocatingHook"

    def __init__(self, pool):
        self.pool = pool
        self.depth = 0
        self.calls = 0

    def _use(self, **kwargs):
        if self.depth:
            return
        self.depth += 1
        self.calls += 1
        self.pool.malloc(random.randrange(1, 50_000))
        self.depth -= 1

    alloc_preprocess = alloc_postprocess = malloc_preprocess = _use
    malloc_postprocess = free_preprocess = free_postprocess = _use


def test_hooks_that_allocate_in_threads_with_cycles(eager_collector):
    pool = cupy_zc.MemoryPool(driver=HostDriver(), segment_size=1 << 22)
    owners = Owners()

    def work(number):
        rng = random.Random(number)
        with AllocatingHook(pool) as hook:
            for _ in range(60):
                Array(pool, rng.randrange(1, 300_000), owners)
        assert hook.calls > 100

    run_threads(work)
    gc.collect()
    assert pool.used_bytes() == 0


def test_a_free_while_another_thread_is_inside_malloc():
    """The driver call of a growing thread takes no lock that a free, or a malloc, would need."""
    driver = HostDriver()
    inside, go_on = threading.Event(), threading.Event()

    class Slow:
        def __getattr__(self, name):
            return getattr(driver, name)

        def create(self, device, size):
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                assert go_on.wait(30)
            return driver.create(device, size)

    pool = cupy_zc.MemoryPool(driver=Slow())
    kept = pool.malloc(1000)
    got = []
    thread = threading.Thread(target=lambda: got.append(pool.malloc(100 << 20)), daemon=True)
    thread.start()
    assert inside.wait(30)
    address = kept.ptr
    del kept
    assert pool.malloc(1000).ptr == address
    assert pool.used_bytes() == 0
    pool.free_all_blocks()
    go_on.set()
    thread.join(timeout=30)
    assert got[0].mem.size == pool.total_bytes() == 100 << 20


def test_one_memory_object_freed_by_many_threads_is_freed_once():
    pool = cupy_zc.MemoryPool(driver=HostDriver())
    for _ in range(50):
        pointer = pool.malloc(512)
        barrier = threading.Barrier(THREADS)

        def free(_number, pointer=pointer, barrier=barrier):
            barrier.wait(timeout=30)
            pointer.mem.free()

        run_threads(free)
        assert pool.used_bytes() == 0
        assert {pool.malloc(512).ptr} == {pool.malloc(512).ptr}


def test_free_bytes_are_never_negative():
    """Ends: total and used bytes of two moments subtracted."""
    pool = cupy_zc.MemoryPool(driver=HostDriver(), segment_size=1 << 21)
    pool.malloc(512)

    def work(number):
        for _ in range(100):
            if number % 2:
                assert pool.free_bytes() >= 0
            else:
                pool.malloc((number + 1) << 21)
                pool.free_all_blocks()

    run_threads(work, count=4)


def test_using_allocator_in_a_worker_thread():
    pool = cupy_zc.MemoryPool(driver=HostDriver())

    def work(_number):
        with cupy.cuda.using_allocator(pool.malloc):
            array = cupy.empty(1000)
            assert array.data.mem.segment.home.pool is pool.device_pool()

    before = cupy.cuda.get_allocator()
    run_threads(work)
    assert cupy.cuda.get_allocator() == before


def inside_the_pool(pool, monkeypatch, call):
    """Run ``call`` as a finalizer or a signal handler would: while the pool is at work."""
    results = []

    def take(home, size, take=Home.take):
        monkeypatch.undo()
        results.append(call())
        return take(home, size)

    monkeypatch.setattr(Home, "take", take)
    pool.malloc(50_000)
    (result,) = results
    return result


def test_a_finalizer_that_allocates_inside_the_pool_is_served(driver, monkeypatch, allocator):
    """Ends: a finalizer that the collector runs inside the pool dead-locking on the pool."""
    pool = cupy_zc.MemoryPool(driver=driver)
    allocator(pool)
    before = pool.used_bytes()
    array = inside_the_pool(pool, monkeypatch, lambda: cupy.empty(1000, dtype="i4"))
    assert getattr(array.data.mem, "driver_name", "cuda") == driver.name
    cupy_zc.copyto(array, 7)
    assert (cupy_zc.asnumpy(array) == 7).all()
    assert pool.used_bytes() == before
    del array


def test_a_finalizer_runs_when_the_collector_wants(monkeypatch):
    pool = cupy_zc.MemoryPool(driver=HostDriver())
    ran = []

    class Finalizer:
        def __del__(self):
            ran.append(pool.malloc(100_000).mem.size // 1000 * 1000)

    def collect():
        cycle = Finalizer()
        cycle.me = cycle
        del cycle
        gc.collect()

    inside_the_pool(pool, monkeypatch, collect)
    assert ran == [100_000]


def test_a_signal_handler_may_allocate_anywhere(monkeypatch):
    pool = cupy_zc.MemoryPool(driver=HostDriver())
    sizes = []
    before = signal.signal(signal.SIGUSR1, lambda *_: sizes.append(pool.malloc(1 << 20).mem.size))
    try:
        inside_the_pool(pool, monkeypatch, lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sizes == [1 << 20]
    assert pool.used_bytes() == 0


def test_inside_the_pool_other_calls_are_errors_and_no_dead_lock(monkeypatch):
    pool = cupy_zc.MemoryPool(driver=HostDriver())

    def call():
        with pytest.raises(cupy_zc.Error, match="in the same thread"):
            pool.used_bytes()

    inside_the_pool(pool, monkeypatch, call)
    assert pool.used_bytes() == 0


def test_inside_the_pool_a_capture_cannot_be_given_memory(monkeypatch):
    driver = HostDriver()
    pool = cupy_zc.MemoryPool(driver=driver)
    with driver.make_stream() as stream:
        stream.begin_capture()

        def call():
            with pytest.raises(cupy_zc.Error, match="inside a stream capture"):
                pool.malloc(1 << 20)

        inside_the_pool(pool, monkeypatch, call)
        stream.end_capture()


def test_the_pool_leaves_the_collector_alone(monkeypatch):
    """Ends: another thread seeing the collector off, and leaving it off for good."""
    pool = cupy_zc.MemoryPool(driver=HostDriver())
    assert inside_the_pool(pool, monkeypatch, gc.isenabled)


def test_a_region_that_is_never_left_is_an_error(monkeypatch):
    monkeypatch.setattr("cupy_zc.memory.region.DEADLINE", 0.05)
    pool = cupy_zc.MemoryPool(driver=HostDriver())
    region = pool.device_pool().region
    errors = []

    def work(_number):
        try:
            pool.malloc(1)
        except cupy_zc.Error as error:
            errors.append(str(error))

    with region:
        run_threads(work, count=1)
    assert "busy in another thread" in errors[0]
