"""Registrations, pools and agreed points in any order, on ranks that do different things."""

from __future__ import annotations

import contextlib
import gc
import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from registration_workers import GRANULE, UNKNOWN, each, fine, ranks

from cupy_zc import AgreementError

SIZES = [512, GRANULE, 2 * GRANULE]
FAILURES = ["export_segment", "import_segment", "map", "set_access", "unmap", "synchronize"]
PICK = st.integers(0, 1 << 16)


class Registrations(RuleBasedStateMachine):
    @initialize(n=st.integers(2, 3))
    def start(self, n):
        self.stack = contextlib.ExitStack()
        self.ranks = self.stack.enter_context(ranks(n))
        self.arrays = [[] for _ in range(n)]  # (array, fill) of each rank
        self.registrations = [[] for _ in range(n)]  # with the segments they hold
        self.fill = 0
        self.calls = 0

    def teardown(self):
        if hasattr(self, "stack"):
            self.stack.close()
            self.__dict__.clear()
            gc.collect()

    def pick(self, rank, number):
        arrays = self.arrays[rank.rank]
        return arrays[number % len(arrays)][0] if arrays else rank.array(0)

    # Each rank for itself

    @rule(rank=PICK, size=st.sampled_from(SIZES))
    def allocate(self, rank, size):
        rank %= len(self.ranks)
        self.fill = self.fill % 255 + 1
        self.arrays[rank].append((self.ranks[rank].array(size, self.fill), self.fill))

    @rule(rank=PICK, which=PICK)
    def drop(self, rank, which):
        arrays = self.arrays[rank % len(self.ranks)]
        if arrays:
            del arrays[which % len(arrays)]

    @rule(rank=PICK)
    def free_blocks(self, rank):
        self.ranks[rank % len(self.ranks)].pool.free_all_blocks()

    @rule(rank=PICK, which=PICK)
    def deregister(self, rank, which):
        mine = self.registrations[rank % len(self.ranks)]
        if mine:
            mine.pop(which % len(mine))[0].deregister()

    @rule(rank=PICK, which=PICK)
    def touch(self, rank, which):
        me = self.ranks[rank % len(self.ranks)]
        location = me.registry.locate(self.pick(me, which))
        if location.segment is not None:
            me.registry.touched(location.segment)

    # All together

    @rule(which=st.lists(PICK, min_size=3, max_size=3))
    def register(self, which):
        chosen = [self.pick(rank, which[rank.rank]) for rank in self.ranks]
        made = fine(self.ranks, lambda rank: rank.registry.register(chosen[rank.rank]))
        self._keep(made)
        self._agreed()

    @rule()
    def register_pools(self):
        self._keep(fine(self.ranks, lambda rank: rank.registry.register(rank.pool)))
        self._agreed()

    def _keep(self, made):
        for mine, registration in zip(self.registrations, made, strict=True):
            mine.append((registration, list(registration._segments)))

    @rule(
        which=st.lists(PICK, min_size=3, max_size=3),
        culprit=PICK,
        step=st.sampled_from(FAILURES),
    )
    def register_and_fail(self, which, culprit, step):
        chosen = [self.pick(rank, which[rank.rank]) for rank in self.ranks]
        driver = self.ranks[culprit % len(self.ranks)].driver
        driver.fail[step] = [UNKNOWN]
        outcomes = each(self.ranks, lambda rank: rank.registry.register(chosen[rank.rank]))
        if driver.fail.pop(step):  # nothing needed that call
            self._keep(outcomes)
            self._agreed()
            return
        assert {type(outcome) for outcome in outcomes} == {AgreementError}
        assert len({str(outcome) for outcome in outcomes}) == 1

    @rule()
    def collect(self):
        fine(self.ranks, lambda rank: rank.registry.collect())
        self._agreed()

    @rule()
    def agreed_call(self):
        self.calls += 1024
        touched = [list(rank.registry._touched) for rank in self.ranks]
        fine(self.ranks, lambda rank: rank.registry.at_call(self.calls))
        for rank, segments in zip(self.ranks, touched, strict=True):
            live = rank.pool.device_pool().segments()
            assert all(s in rank.registry._published for s in segments if s in live)
        self._agreed()

    def _agreed(self):
        """Peers have mapped exactly what a rank has published."""
        for owner, peer in itertools.permutations(self.ranks, 2):
            published = {
                entry.name: segment.size for segment, entry in owner.registry._published.items()
            }
            windows = peer.registry.windows._windows
            mapped = {
                (key[1], offset, generation): size
                for key, window in windows.items()
                if key[0] == owner.rank
                for offset, (size, generation) in window._mapped.items()
            }
            names = {(n.arena, n.offset, n.generation): size for n, size in published.items()}
            assert mapped == names
            assert owner.registry._leaving == []

    # What always holds

    @invariant()
    def peers_read_what_a_rank_says_is_registered(self):
        for owner in getattr(self, "ranks", ()):
            for array, fill in self.arrays[owner.rank]:
                location = owner.registry.locate(array)
                if location.registered:
                    for peer in self.ranks:
                        data = peer.read(owner.rank, location[:2], array.nbytes)
                        assert data == bytes([fill]) * array.nbytes

    @invariant()
    def what_is_registered_is_pinned_and_found(self):
        for rank in getattr(self, "ranks", ()):
            held = [s for _, segments in self.registrations[rank.rank] for s in segments]
            live = rank.pool.device_pool().segments()
            assert [s.pins for s in live] == [held.count(s) for s in live]
            assert set(held) <= set(live)
            for array, _ in self.arrays[rank.rank]:
                if array.data.mem.segment in held:
                    assert rank.registry.locate(array).registered


TestRegistrations = Registrations.TestCase
TestRegistrations.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
