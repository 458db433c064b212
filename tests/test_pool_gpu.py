"""On a GPU: the same program on this pool and on CuPy's gives the same answers."""

from __future__ import annotations

import gc

import cupy
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_pool_hooks import Recorder

import cupy_zc

pytestmark = pytest.mark.gpu

MiB = 1 << 20

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), st.integers(0, 3 * MiB), st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 1 << 30), st.just(0)),
        st.tuples(st.just("free_all_blocks"), st.just(0), st.integers(0, 3)),
        st.tuples(st.just("set_limit"), st.sampled_from([-1, 0, 1 << 40]), st.just(0)),
    ),
    max_size=60,
)


class Program:
    """One run of a program on one pool, with everything a user could see of it."""

    def __init__(self, pool):
        self.pool = pool
        self.streams = [
            cupy.cuda.Stream.null,
            cupy.cuda.Stream(),
            cupy.cuda.Stream(non_blocking=True),
        ]
        self.held: list = []
        self.seen: list = []

    def step(self, what, number, stream):
        if what == "malloc":
            with self.streams[stream]:
                pointer = self.pool.malloc(number)
            self.held.append(pointer)
            self.seen.append((pointer.mem.size, pointer.device_id))
        elif what == "free" and self.held:
            del self.held[number % len(self.held)]
        elif what == "free_all_blocks":
            self.pool.free_all_blocks(self.streams[stream] if stream < 3 else None)
        elif what == "set_limit":
            try:
                self.pool.set_limit(size=number)
            except ValueError:
                self.seen.append("ValueError")
            else:
                self.seen.append(self.pool.get_limit())
        self.seen.append(self.pool.used_bytes())

    def run(self, steps):
        with Recorder() as hook:
            for step in steps:
                self.step(*step)
            self.held.clear()
        self.seen.append(self.pool.used_bytes())
        # How often the driver is asked differs by design: segments are larger than arrays.
        calls = [call for call in hook.calls if not call[0].startswith("alloc_")]
        return self.seen, [
            (name, {k: v for k, v in what.items() if k not in ("mem_ptr", "pmem_id")})
            for name, what in calls
        ]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_one_program_on_both_pools_looks_the_same(steps):
    ours = Program(cupy_zc.MemoryPool(driver="cuda")).run(steps)
    theirs = Program(cupy.cuda.MemoryPool()).run(steps)
    assert ours == theirs


def test_out_of_memory_is_cupys_exception_on_both():
    for pool in (cupy_zc.MemoryPool(driver="cuda"), cupy.cuda.MemoryPool()):
        pool.set_limit(size=100 * MiB)
        kept = pool.malloc(60 * MiB)
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            pool.malloc(60 * MiB)
        assert pool.used_bytes() == kept.mem.size


def test_more_than_the_device_has_is_out_of_memory():
    pool = cupy_zc.MemoryPool(driver="cuda")
    with pytest.raises(cupy_zc.OutOfMemoryError, match="cuMemCreate"):
        pool.malloc(1 << 39)
    with pytest.raises(cupy_zc.OutOfMemoryError, match="addresses"):
        pool.malloc(1 << 50)
    assert pool.total_bytes() == 0


DELAY = cupy.RawKernel(
    r"""
    extern "C" __global__ void delay_and_fill(unsigned long long nanoseconds, int* data, int n) {
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); }
        while (now - start < nanoseconds);
        for (int i = threadIdx.x; i < n; i += blockDim.x) data[i] = 7;
    }
    """,
    "delay_and_fill",
)


def delay_and_fill(array, stream, seconds=0.2):
    with stream:
        DELAY((1,), (256,), (np.uint64(seconds * 1e9), array, np.int32(array.size)))


def test_an_array_used_on_another_stream_is_kept_until_it_is_done(allocator):
    pool = cupy_zc.MemoryPool(driver="cuda")
    allocator(pool)
    other = cupy.cuda.Stream(non_blocking=True)
    delay_and_fill(cupy.zeros(1, "i4"), other, 0)  # compiled and loaded before it matters
    cupy.cuda.Device().synchronize()
    array = cupy.zeros(1000, dtype="i4")
    cupy.cuda.Device().synchronize()
    address = array.data.ptr
    delay_and_fill(array, other)
    pool.record_stream(array, other)
    del array
    fresh = [cupy.zeros(1000, dtype="i4") for _ in range(10)]
    assert address not in {a.data.ptr for a in fresh}
    other.synchronize()
    assert all((a == 0).all() for a in fresh)
    pool.free_all_blocks()
    assert pool.statistics().deferred_bytes == 0


def test_a_replay_does_not_touch_what_was_allocated_after_the_capture(allocator):
    """Ends: 7s read back as 2s, as measured with CuPy's own pool."""
    pool = cupy_zc.MemoryPool(driver="cuda")
    allocator(pool)
    stream = cupy.cuda.Stream(non_blocking=True)
    source = cupy.ones(1 << 16, dtype="f4")
    cupy.cuda.Device().synchronize()
    with stream:
        source + source  # compiled before the capture
        stream.synchronize()
        stream.begin_capture()
        temporary = source + source
        del temporary
        graph = stream.end_capture()
        fresh = cupy.full(1 << 16, 7, dtype="f4")
        for _ in range(1000):
            graph.launch(stream)
        stream.synchronize()
        assert (fresh == 7).all()
    stream.synchronize()
    del graph
    gc.collect()


def test_memory_comes_back_when_captures_are_dropped(allocator):
    pool = cupy_zc.MemoryPool(driver="cuda")
    allocator(pool)
    stream = cupy.cuda.Stream(non_blocking=True)
    free = cupy.cuda.runtime.memGetInfo()[0]
    with stream:
        for _ in range(200):
            stream.begin_capture()
            cupy.empty(1000)
            graph = stream.end_capture()
            del graph
    stream.synchronize()
    for _ in range(100):
        pool.free_all_blocks()
        if pool.total_bytes() == 0:
            break
        cupy.cuda.Device().synchronize()
    assert pool.total_bytes() == 0
    assert cupy.cuda.runtime.memGetInfo()[0] >= free - 64 * MiB


def test_ordinary_cupy_work_gives_right_results(allocator):
    pool = cupy_zc.MemoryPool(driver="cuda")
    allocator(pool)
    rng = np.random.default_rng(0)
    a, b = rng.random((300, 400)), rng.random((400, 200))
    result = cupy.asnumpy(cupy.linalg.norm(cupy.asarray(a) @ cupy.asarray(b), axis=1))
    np.testing.assert_allclose(result, np.linalg.norm(a @ b, axis=1))
    assert pool.total_bytes() > 0


def test_no_multicast_object_was_made():
    from cupy_zc.driver import select

    assert select("cuda").multicast_objects_created == 0
