"""Any sequence of allocations, frees, streams, limits and releases, against a simple model."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

import cupy_zc
from cupy_zc.driver.host import HostDriver

GRANULE = 1 << 16
SEGMENT = 4 * GRANULE
SIZES = st.one_of(
    st.sampled_from([1, 512, 513, 1024, 4096, GRANULE, SEGMENT - 512, SEGMENT, SEGMENT + 1]),
    st.integers(1, 2 * SEGMENT),
)


def rounded(size: int) -> int:
    return (size + 511) // 512 * 512


class PoolMachine(RuleBasedStateMachine):
    """Two pools run the same program: one is checked, the other must give the same offsets."""

    blocks = Bundle("blocks")

    @initialize()
    def start(self):
        self.drivers = [HostDriver(granularity=GRANULE, memory=1 << 30) for _ in range(2)]
        self.pools = [
            cupy_zc.MemoryPool(driver=driver, segment_size=SEGMENT) for driver in self.drivers
        ]
        self.streams = [
            [driver.current_stream(), driver.make_stream(), driver.make_stream()]
            for driver in self.drivers
        ]
        self.live: dict[int, list] = {}
        self.sizes: dict[int, int] = {}
        self.count = 0
        self.limit = 0

    def _malloc(self, which: int, size: int, stream: int):
        with self.streams[which][stream]:
            return self.pools[which].malloc(size)

    @rule(target=blocks, size=SIZES, stream=st.integers(0, 2))
    def malloc(self, size, stream):
        total = self.pools[0].total_bytes()
        results = []
        for which in range(2):
            try:
                results.append(self._malloc(which, size, stream))
            except cupy_zc.OutOfMemoryError as error:
                assert error.limit == self.limit > 0
                assert error.size == rounded(size)
                # It is an error only if the limit leaves no room for a segment of its own, with
                # all that is wholly free released.
                least = -(-size // GRANULE) * GRANULE
                assert least > self.limit - self.pools[which].total_bytes()
                assert total <= max(self.limit, total)
        assert len(results) in (0, 2)
        if not results:
            return multiple()
        base = [pool.device_pool().arena.base for pool in self.pools]
        assert results[0].ptr - base[0] == results[1].ptr - base[1]
        self.count += 1
        self.live[self.count] = results
        self.sizes[self.count] = rounded(size)
        return self.count

    @rule(block=consumes(blocks), explicit=st.booleans())
    def free(self, block, explicit):
        pointers = self.live.pop(block)
        del self.sizes[block]
        if explicit:
            for pointer in pointers:
                pointer.mem.free()
                pointer.mem.free()

    @rule(stream=st.one_of(st.none(), st.integers(0, 2)))
    def free_all_blocks(self, stream):
        for which, pool in enumerate(self.pools):
            pool.free_all_blocks(None if stream is None else self.streams[which][stream])
        if stream is None:
            homes = {pointers[0].mem.segment for pointers in self.live.values()}
            assert len(self.pools[0].segments()) == len(homes)

    @rule(limit=st.one_of(st.just(0), st.integers(1, 12).map(lambda n: n * GRANULE)))
    def set_limit(self, limit):
        self.limit = limit
        for pool in self.pools:
            pool.set_limit(size=limit)

    @rule(size=SIZES, stream=st.integers(0, 2))
    def reserve(self, size, stream):
        for which, pool in enumerate(self.pools):
            with self.streams[which][stream]:
                try:
                    pool.reserve(size)
                except cupy_zc.OutOfMemoryError:
                    continue
                grown = pool.total_bytes()
                pointer = pool.malloc(size)
                assert pool.total_bytes() == grown
                del pointer

    @rule()
    def look(self):
        """Only at the first pool: looking must not change what it does next."""
        self.pools[0].snapshot()
        self.pools[0].n_free_blocks()

    @invariant()
    def holds(self):
        if not hasattr(self, "pools"):
            return
        pool = self.pools[0]
        assert pool.used_bytes() == sum(self.sizes.values())
        assert pool.used_bytes() + pool.free_bytes() == pool.total_bytes()
        spans = sorted(
            (pointers[0].ptr, pointers[0].ptr + self.sizes[block])
            for block, pointers in self.live.items()
        )
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(start % 512 == 0 for start, _ in spans)
        segments = pool.segments()
        assert sum(segment.size for segment in segments) == pool.total_bytes()
        assert all(s.size % GRANULE == 0 == s.address % GRANULE for s in segments)
        for start, end in spans:
            assert any(s.address <= start and end <= s.address + s.size for s in segments)
        figures = pool.statistics()
        assert figures.used_bytes == pool.used_bytes()
        assert figures.total_bytes == pool.total_bytes()
        assert figures.used_blocks == len(self.live)
        assert figures.peak_used_bytes >= figures.used_bytes
        for entry in pool.snapshot()["devices"]:
            for segment in entry["segments"]:
                at = segment["offset"]
                states = [block["state"] for block in segment["blocks"]]
                for block in segment["blocks"]:
                    assert block["offset"] == at
                    at += block["size"]
                assert at == segment["offset"] + segment["size"]
                assert ("free", "free") not in itertools.pairwise(states)

    def teardown(self):
        if not hasattr(self, "pools"):
            return
        self.live.clear()
        for driver, pool in zip(self.drivers, self.pools, strict=True):
            pool.free_all_blocks()
            assert pool.total_bytes() == 0
            assert driver.memory_info(0).free == driver.memory_info(0).total


TestPoolMachine = PoolMachine.TestCase
