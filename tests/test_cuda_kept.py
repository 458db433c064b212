"""Memory for kernels that is dropped anywhere: when it is used again, and that nothing waits."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_zc.driver.cuda_kept import Keeper, KeptMemory


class Maker:
    """Allocates blocks, at other addresses each time."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, size: int) -> Any:
        self.sizes.append(size)
        return SimpleNamespace(ptr=1000 * len(self.sizes))


def test_what_was_dropped_is_used_again_when_its_device_was_waited_for() -> None:
    keeper, make = Keeper(), Maker()
    first = keeper.take("plain", 0, 600, make).ptr
    assert keeper.take("plain", 0, 600, make).ptr != first  # kernels may use it still
    with keeper.waiting(1):
        pass
    assert keeper.take("plain", 0, 600, make).ptr != first
    with keeper.waiting(0):
        pass
    again = [keeper.take("plain", 0, size, make) for size in (513, 1024, 1000)]
    assert {each.ptr for each in again} == {1000, 2000, 3000}
    assert make.sizes == [1024] * 3


def test_blocks_of_another_kind_size_or_device_are_not_mixed_up() -> None:
    keeper, make = Keeper(), Maker()
    kinds = [("plain", 0, 8), ("mapped", 0, 8), ("plain", 1, 8), ("plain", 0, 513)]
    places = {kind: keeper.take(*kind, make).ptr for kind in kinds}
    for device in (0, 1):
        with keeper.waiting(device):
            pass
    assert {kind: keeper.take(*kind, make).ptr for kind in reversed(kinds)} == places
    assert make.sizes == [512, 512, 512, 1024]


def test_a_wait_that_fails_frees_nothing_and_forgets_nothing() -> None:
    keeper, make = Keeper(), Maker()
    keeper.take("plain", 0, 8, make)
    with pytest.raises(RuntimeError, match="a kernel failed"), keeper.waiting(0):
        raise RuntimeError("a kernel failed")
    assert keeper.take("plain", 0, 8, make).ptr == 2000
    with keeper.waiting(0):
        pass
    assert {keeper.take("plain", 0, 8, make).ptr} <= {1000, 2000}
    assert len(make.sizes) == 2


def test_what_is_dropped_while_somebody_waits_is_not_free_behind_it() -> None:
    """The wait need not have seen the kernels that use it."""
    keeper, make = Keeper(), Maker()
    held = [keeper.take("plain", 0, 8, make)]
    with keeper.waiting(0):
        held.clear()
    assert keeper.take("plain", 0, 8, make).ptr == 2000


def test_the_collector_may_drop_it_in_any_thread() -> None:
    keeper, make = Keeper(), Maker()

    def leave_garbage() -> None:
        cycle: list[Any] = [keeper.take("plain", 0, 8, make)]
        cycle.append(cycle)

    leave_garbage()
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    with keeper.waiting(0):
        pass
    assert keeper.take("plain", 0, 8, make).ptr == 1000


def test_the_collector_does_not_free_what_is_kept() -> None:
    """The kind of bug: an object that is put back by a finalizer had others that were finalized.

    Those of a cycle are all finalized, and only then does the collector ask which of them live on.
    """
    freed = []

    class Memory:
        ptr = 4096

        def __del__(self) -> None:
            freed.append(self.ptr)

    keeper = Keeper()

    def leave_garbage() -> None:
        cycle: list[Any] = [keeper.take("mapped", 0, 8, lambda size: Memory())]
        cycle.append(cycle)

    leave_garbage()
    gc.collect()
    assert not freed
    with keeper.waiting(0):
        pass
    assert keeper.take("mapped", 0, 8, Maker()).ptr == 4096


_steps = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 1), st.integers(1, 2000)),
    st.tuples(st.just("drop"), st.integers(0, 20), st.none()),
    st.tuples(st.just("wait"), st.integers(0, 1), st.none()),
)


@given(st.lists(_steps, max_size=60))
def test_no_block_has_two_owners_and_none_comes_back_too_early(steps: list[Any]) -> None:
    keeper, make = Keeper(), Maker()
    owned: list[tuple[KeptMemory, int]] = []
    unsafe: dict[int, int] = {}  # dropped, of a device that nobody waited for since
    for what, number, size in steps:
        if what == "take":
            memory = keeper.take("plain", number, size, make)
            assert memory.ptr not in unsafe
            owned.append((memory, number))
        elif what == "drop" and owned:
            memory, device = owned.pop(number % len(owned))
            unsafe[memory.ptr] = device
            del memory
        elif what == "wait":
            with keeper.waiting(number):
                pass
            unsafe = {ptr: device for ptr, device in unsafe.items() if device != number}
        memory = None  # type: ignore[assignment]
        assert max(Counter(each.ptr for each, _ in owned).values(), default=1) == 1
