"""Unbinding and taking multicast windows apart when a step fails, on any rank."""

from __future__ import annotations

import gc

import multicast_workers as work
import pytest
from multicast_workers import (
    GRANULE,
    UNKNOWN,
    arrays,
    bindings,
    casting,
    each,
    fine,
    live,
    multicast,
    off,
    record,
    register,
)

from cupy_zc import (
    AgreementError,
    DriverError,
)
from cupy_zc.config import multicast_refusal
from cupy_zc.memory.pool import reap

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left_open")]


@pytest.mark.skipif(multicast_refusal() is None, reason="multicast is not switched off here")
def test_the_rest_of_this_file() -> None:
    work.run_elsewhere(__file__)


# Releases


@off
@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize("step", ["synchronize", "multicast_unbind"])
def test_an_unbinding_that_fails_is_told_and_carried_out_later(step: str, culprit: int) -> None:
    with casting() as made:
        kept = arrays(made, GRANULE, 9)
        for registration in register(made, kept):
            registration.deregister()
        made[culprit].driver.fail[step] = [UNKNOWN]
        log = record(made, "unmap")
        errors = each(made, lambda rank: rank.registry.collect())
        assert [type(error) for error in errors] == [AgreementError] * 3
        assert len({str(error) for error in errors}) == 1
        assert f"unbind released segments failed on rank {culprit}" in str(errors[0])
        assert log == []  # nobody has unmapped what is bound somewhere
        assert sum((1, 0) in bindings(rank) for rank in made) == 1
        fine(made, lambda rank: rank.registry.collect())
        assert [list(bindings(rank)) for rank in made] == [[(0, 0)]] * 3
        registrations = register(made, kept)
        assert [list(bindings(rank)) for rank in made] == [[(0, 0), (1, 0)]] * 3
        assert made[0].read(1, registrations[0].arrays[1]) == b"\t"


@off
@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize("step", ["unmap", "release", "free_range"])  # nothing is bound by then
def test_the_window_of_an_arena_that_is_gone_is_closed_later_if_it_must(
    step: str, culprit: int
) -> None:
    with casting() as made:
        for registration in register(made, arrays(made)):
            registration.deregister()
        fine(made, lambda rank: rank.registry.collect())
        for rank in made:
            rank.pool = type(rank.pool)(driver=rank.driver, segment_size=GRANULE)
        kept = arrays(made)  # of another arena
        gc.collect()
        reap()
        window = multicast(made[culprit])._windows[1]
        made[culprit].driver.fail[step] = [UNKNOWN]
        errors = each(made, lambda rank: rank.registry.register(kept[rank.rank]))
        assert [type(error) for error in errors] == [AgreementError] * 3
        assert f"unbind released segments failed on rank {culprit}" in str(errors[0])
        register(made, kept)
        assert [list(bindings(rank)) for rank in made] == [[(0, 0), (2, 0)]] * 3
        assert [live(rank) for rank in made] == [2] * 3
        assert (window._objects, window._mapped, window._range) == ({}, set(), 0)


# The end


@off
@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize(
    "step", ["synchronize", "unmap", "multicast_unbind", "release", "free_range"]
)
def test_what_fails_at_the_end_is_raised_and_the_rest_is_done(step: str, culprit: int) -> None:
    with casting() as made:
        register(made, arrays(made))
        rank = made[culprit]
        rank.driver.fail[step] = [UNKNOWN]
        names = ("unmap", "multicast_unbind", "release", "free_range")
        before = {name: rank.driver.calls[name] for name in names}
        with pytest.raises(DriverError, match=rf"{step}\(injected\)") as info:
            rank.registry.close()
        trail: BaseException | None = info.value
        while trail is not None:  # whatever followed from it came after it
            last, trail = trail, trail.__context__
        assert f"{step}(injected)" in str(last)
        made_calls = {name: rank.driver.calls[name] - before[name] for name in names}
        windows = 2  # of multicast; those of peers are two for each of two peers
        assert made_calls["multicast_unbind"] == made_calls["release"] == windows
        assert made_calls["unmap"] == windows + 4
        assert multicast(rank)._windows == {}
        assert multicast(rank).status.state == "off"
        rank.registry.close()
    work.shut(made[culprit])
