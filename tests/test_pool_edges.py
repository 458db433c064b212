"""User code that the garbage collector runs while a thread enters or leaves the pool."""

from __future__ import annotations

import pytest

import cupy_zc
from cupy_zc.driver.host import HostDriver


@pytest.mark.parametrize("when", ["entering", "leaving"])
def test_a_finalizer_at_the_edge_of_the_pool_is_served(monkeypatch, when):
    """Ends: a thread that waits for a lock of its own, where the collector runs beside the lock.

    From Python 3.12 on it runs after any call, that of the lock among them.
    """
    monkeypatch.setattr("cupy_zc.memory.region.DEADLINE", 0.5)
    pool = cupy_zc.MemoryPool(driver=HostDriver())
    region = pool.device_pool().region
    kept = [pool.malloc(50_000)]

    class Edge:
        def __init__(self, lock):
            self.lock, self.armed = lock, True

        def interrupt(self):
            if self.armed:
                self.armed = False
                kept.append(pool.malloc(70_000))
                kept.pop(0)

        def acquire(self, *arguments, **more):
            taken = self.lock.acquire(*arguments, **more)
            if taken and when == "entering":
                self.interrupt()
            return taken

        def release(self):
            if when == "leaving":
                self.interrupt()
            self.lock.release()

    region._lock = Edge(region._lock)
    kept.append(pool.malloc(90_000))
    assert not region._lock.armed
    assert not region.mine
    region._lock = region._lock.lock
    assert pool.used_bytes() == sum(each.mem.size for each in kept)
    kept.clear()
    assert pool.used_bytes() == 0


def test_a_finalizer_that_allocates_while_a_device_pool_is_made_is_served():
    """The same for the lock under which the pool of a device is made."""
    pool = cupy_zc.MemoryPool(driver=HostDriver())
    kept = []

    class Edge:
        def __init__(self, lock):
            self.lock, self.armed = lock, True

        def __enter__(self):
            self.lock.__enter__()
            if self.armed:
                self.armed = False
                kept.append(pool.malloc(70_000))

        def __exit__(self, *exception):
            self.lock.__exit__(*exception)

    assert pool._making.acquire(timeout=5)
    assert pool._making.acquire(timeout=5), "by the thread that has it"
    pool._making.release()
    pool._making.release()
    pool._making = Edge(pool._making)
    kept.append(pool.malloc(1000))
    assert len(kept) == 2
    assert pool.used_bytes() == sum(each.mem.size for each in kept)
    assert len(pool._devices) == 1
    kept.clear()
    assert pool.used_bytes() == 0


def test_what_waits_for_a_region_to_be_left_runs_once():
    """Ends: a block given back twice, where a thread came in before another was quite out."""
    region = cupy_zc.MemoryPool(driver=HostDriver()).device_pool().region
    ran = []

    class Edge:
        def __init__(self, lock):
            self.lock, self.armed = lock, True

        def acquire(self, *arguments, **more):
            return self.lock.acquire(*arguments, **more)

        def release(self):
            self.lock.release()
            if self.armed:
                self.armed = False
                with region:
                    region.afterwards(lambda: ran.append("another's"))
                    assert ran == []
                assert ran == ["another's"]

    region._lock = Edge(region._lock)
    with region:
        pass
    assert ran == ["another's"]
    with region:
        region.afterwards(lambda: ran.append("own"))
    assert ran == ["another's", "own"]
