"""Registrations in any order, with failures, against a model of what is bound on every rank."""

from __future__ import annotations

import contextlib
import gc
import itertools
from typing import Any

import multicast_workers as work
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from multicast_workers import GRANULE, Rank, bindings, casting, each, fine, multicast, statuses

from cupy_zc import AgreementError, MemoryPool
from cupy_zc.config import multicast_refusal
from cupy_zc.memory.pool import reap
from cupy_zc.registration.agreed import News
from cupy_zc.registration.ledger import Ledger, Place
from cupy_zc.registration.window import SegmentName, SegmentOffer

SIZES = [512, GRANULE, 2 * GRANULE]
PICK = st.integers(0, 1 << 16)
#: Steps that end in P2P, and steps that end in an error.
MILD = ["multicast_create", "multicast_import", "multicast_add_device", "multicast_bind"]
HARSH = ["multicast_unbind", "synchronize", "export_segment"]


class Windows(RuleBasedStateMachine):
    """Three ranks that do the same most of the time, so that much is in common."""

    @initialize()
    def start(self) -> None:
        self.stack = contextlib.ExitStack()
        self.ranks = self.stack.enter_context(casting())
        self.arrays: list[list[Any]] = [[] for _ in self.ranks]
        self.registrations: list[list[Any]] = [[] for _ in self.ranks]
        #: What is bound: by place, size and the generations of all ranks.
        self.bound: dict[tuple[int, int], tuple[int, ...]] = {}
        self.calls = 0
        self.agreed()

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            for rank in self.ranks:
                rank.registry.close()
                assert work.live(rank) == 0
            self.stack.close()
            self.__dict__.clear()
            gc.collect()
            reap()

    # Each rank for itself, or all of them alike

    def some(self, who: int) -> list[Rank]:
        """One rank, or all: ``who`` is drawn from much more than three."""
        return [self.ranks[who % 3]] if who % 4 == 0 else list(self.ranks)

    @rule(who=PICK, size=st.sampled_from(SIZES))
    def allocate(self, who: int, size: int) -> None:
        for rank in self.some(who):
            self.arrays[rank.rank].append(rank.array(size))

    @rule(who=PICK, which=PICK)
    def drop(self, who: int, which: int) -> None:
        for rank in self.some(who):
            arrays = self.arrays[rank.rank]
            if arrays:
                del arrays[which % len(arrays)]

    @rule(who=PICK)
    def free_blocks(self, who: int) -> None:
        for rank in self.some(who):
            rank.pool.free_all_blocks()

    @rule(who=PICK, which=PICK)
    def deregister(self, who: int, which: int) -> None:
        for rank in self.some(who):
            mine = self.registrations[rank.rank]
            if mine:
                mine.pop(which % len(mine)).deregister()

    @rule(who=PICK, which=PICK)
    def touch(self, who: int, which: int) -> None:
        for rank in self.some(who):
            location = rank.registry.locate(self.pick(rank, which))
            if location.segment is not None:
                rank.registry.touched(location.segment)

    @rule(who=PICK)
    def change_pools(self, who: int) -> None:
        for rank in self.some(who):
            self.arrays[rank.rank].clear()
            while self.registrations[rank.rank]:
                self.registrations[rank.rank].pop().deregister()
            rank.pool = MemoryPool(driver=rank.driver, segment_size=GRANULE)
        gc.collect()
        reap()

    def pick(self, rank: Rank, number: int) -> Any:
        arrays = self.arrays[rank.rank]
        return arrays[number % len(arrays)] if arrays else rank.array(0)

    # All together

    @rule(which=PICK)
    def register(self, which: int) -> None:
        chosen = [self.pick(rank, which) for rank in self.ranks]
        self.keep(fine(self.ranks, lambda rank: rank.registry.register(chosen[rank.rank])))

    @rule()
    def register_pools(self) -> None:
        self.keep(fine(self.ranks, lambda rank: rank.registry.register(rank.pool)))

    def keep(self, made: list[Any]) -> None:
        for mine, registration in zip(self.registrations, made, strict=True):
            mine.append(registration)
        self.agreed()

    @rule()
    def collect(self) -> None:
        fine(self.ranks, lambda rank: rank.registry.collect())
        self.agreed()

    @rule()
    def agreed_call(self) -> None:
        self.calls += 1024
        fine(self.ranks, lambda rank: rank.registry.at_call(self.calls))
        self.agreed()

    @rule(which=PICK, culprit=PICK, step=st.sampled_from(MILD))
    def register_where_multicast_fails(self, which: int, culprit: int, step: str) -> None:
        driver = self.ranks[culprit % 3].driver
        driver.fail[step] = [("CUDA_ERROR_UNKNOWN", 999)]
        before = multicast(self.ranks[0]).status.fallen
        self.register_pools()
        failed = not driver.fail.pop(step)
        assert (multicast(self.ranks[0]).status.fallen != before) == failed

    @rule(culprit=PICK, step=st.sampled_from(HARSH))
    def register_and_fail(self, culprit: int, step: str) -> None:
        driver = self.ranks[culprit % 3].driver
        driver.fail[step] = [("CUDA_ERROR_UNKNOWN", 999)]
        outcomes = each(self.ranks, lambda rank: rank.registry.register(rank.pool))
        if driver.fail.pop(step):  # nothing needed that call
            self.keep(outcomes)
            return
        assert {type(outcome) for outcome in outcomes} == {AgreementError}
        assert len({str(outcome) for outcome in outcomes}) == 1
        self.collect()

    # The model

    def agreed(self) -> None:
        """All ranks have talked: what is common is bound, but for arenas that fell before."""
        owned = [work.published(rank) for rank in self.ranks]
        common = {
            place: (owned[0][place][0], *(each_one[place][1] for each_one in owned))
            for place in set.intersection(*map(set, owned))
            if len({each_one[place][0] for each_one in owned}) == 1
        }
        fallen = {arena for arena, _ in multicast(self.ranks[0]).status.fallen}
        kept = {place: value for place, value in self.bound.items() if common.get(place) == value}
        new = {place: value for place, value in common.items() if place[0] not in fallen}
        self.bound = kept | new

    @invariant()
    def ranks_have_bound_what_the_model_has(self) -> None:
        for rank in getattr(self, "ranks", ()):
            found = bindings(rank)
            assert {place: size for place, (size, _) in found.items()} == {
                place: value[0] for place, value in self.bound.items()
            }
            own = work.published(rank)
            for place, (_, segment) in found.items():
                if place in own:  # else the rank let go of it, and all unbind it when they meet
                    assert own[place][2] is segment
                assert multicast(rank).refusal(*place) == ""

    @invariant()
    def all_ranks_know_the_same(self) -> None:
        ranks = getattr(self, "ranks", ())
        if ranks:
            assert len(set(statuses(ranks))) == 1
            assert len({work.live(rank) for rank in ranks}) == 1
            assert (
                len(
                    {
                        tuple(
                            (place, segment.size)
                            for place, segment in multicast(rank)._bound.items()
                        )
                        for rank in ranks
                    }
                )
                == 1
            )
            windows = [tuple(multicast(rank)._windows) for rank in ranks]
            assert windows.count(windows[0]) == 3


TestWindows = pytest.mark.skipif(
    multicast_refusal() is not None, reason="runs in the child of test_the_rest_of_this_file"
)(Windows.TestCase)
TestWindows.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@pytest.mark.skipif(multicast_refusal() is None, reason="multicast is not switched off here")
def test_the_rest_of_this_file() -> None:
    work.run_elsewhere(__file__)


# The ledger by itself


def _offer(arena: int, offset: int, generation: int, size: int = 8) -> SegmentOffer:
    return SegmentOffer(SegmentName(arena, offset, generation), size, 64 * (arena + 1))


def test_the_ledger_has_what_all_ranks_published_and_nobody_released() -> None:
    ledger = Ledger((0, 1))
    assert ledger.common() == {}
    ledger.add({0: News(offers=(_offer(1, 8, 5), _offer(0, 0, 1))), 1: News()})
    assert ledger.common() == {}
    assert ledger.room(1) == 0
    ledger.add({0: News(), 1: News(offers=(_offer(0, 0, 3), _offer(1, 8, 7, size=4)))})
    assert ledger.common() == {Place(0, 0): 8}
    assert ledger.room(1) == 128
    ledger.release({0: News(), 1: News(released=(SegmentName(1, 8, 7), SegmentName(0, 0, 2)))})
    ledger.add({0: News(), 1: News(offers=(_offer(1, 8, 8),))})
    assert list(ledger.common()) == [Place(0, 0), Place(1, 8)]
    for _ in range(2):
        ledger.release({0: News(retired=(1,)), 1: News(released=(SegmentName(0, 0, 3),))})
        assert ledger.common() == {}
        assert ledger.room(1) == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_ledger_is_in_the_order_of_places_whoever_came_first(order: tuple[int, ...]) -> None:
    ledger = Ledger((0, 1))
    offers = [_offer(1, 0, 1), _offer(0, 8, 1), _offer(1, 16, 1)]
    ledger.add({0: News(offers=tuple(offers[at] for at in order)), 1: News(offers=tuple(offers))})
    assert list(ledger.common()) == [Place(0, 8), Place(1, 0), Place(1, 16)]
