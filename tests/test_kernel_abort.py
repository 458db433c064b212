"""Kernels end soon after the host says that a rank cannot come any more, whatever their budget.

The clock is virtual, and coarse: a wait looks at it each 64 turns, and each turn of any thread
takes 100 ns of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from emulated import (
    FIBERS,
    SANITIZED,
    SMALL,
    TIMEOUT,
    TSAN,
    Emulation,
    Launch,
    Outcome,
    build,
    build_directory,
    mutant,
)
from emulated_cases import FLOAT32, check, launch_of
from emulated_mail import FINGERPRINT, Call, Mail, Scene, content
from emulated_push import push_launch, verify

pytestmark = pytest.mark.slow

MILLISECOND = 1_000_000
#: Longer than any test: what ends before, the word of the host has ended.
BUDGET = 10**15
SOON = 30 * MILLISECOND
CASES = ("barrier", "two_shot", "all_gather", "ll128", "ll128 two-step", "ll", "push_reduce")


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest) -> Path:
    return build_directory(request.config)


@pytest.fixture(scope="module")
def emulation(cache: Path) -> Iterator[Emulation]:
    with Emulation(build(cache, SMALL)) as running:
        yield running


@pytest.fixture(scope="module")
def mail(cache: Path) -> Iterator[Mail]:
    with Mail(build(cache, FIBERS, name="mail")) as running:
        yield running


def launch_with(case: str, lost: int, after: int, repeats: int = 1) -> Launch:
    """A call of three ranks of which one is given up; it comes nevertheless."""
    rng = np.random.default_rng(4)
    if case == "push_reduce":
        launch = push_launch(rng, case, 3, count=500, repeats=repeats)
    else:
        launch = launch_of(rng, case, 3, FLOAT32, count=100, repeats=repeats)
    for rank in launch.ranks:
        rank.in_place, rank.row = "", 0
    launch.budget, launch.lost, launch.lost_after = BUDGET, lost, after
    return launch


def ended_soon(outcomes: list[Outcome], lost: int, after: int) -> None:
    for outcome in outcomes:
        assert (outcome.code, outcome.rank, outcome.lane) == (TIMEOUT, lost, 7)
        assert MILLISECOND <= outcome.detail < after + SOON
        assert outcome.untouched


@pytest.mark.parametrize("missing", [0, 2])
@pytest.mark.parametrize("after", [0, 4 * MILLISECOND])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_ends_soon_after_the_host_gave_up_one_that_never_comes(
    emulation: Emulation, case: str, after: int, missing: int
) -> None:
    launch = launch_with(case, missing, after)
    launch.ranks[missing].absent = True
    outcomes = emulation.run(launch)
    assert outcomes.pop(missing).code == 0
    ended_soon(outcomes, missing, after)
    assert {outcome.mine for outcome in outcomes} == {launch.ranks[0].fingerprint}


@pytest.mark.parametrize(
    ("case", "file", "old", "new"),
    [
        ("push_reduce", "push_reduce.cu", "!flags.await<OWN<HOW>>(piece + 1)",
         "(args.rank == 1 && piece == 4) || !flags.await(piece + 1)"),
        ("two_shot", "exchange.cuh", "!meet(args, epoch, ++step)",
         "args.rank == 1 || !meet(args, epoch, ++step)"),
        ("ll128 two-step", "lines.cuh", "store_line(", "if (args_.rank != 1) store_line("),
    ],
)  # fmt: skip
def test_ranks_that_wait_in_the_middle_of_a_call_end_soon(
    cache: Path, case: str, file: str, old: str, new: str
) -> None:
    """Rank 1 announces the call and then stops, so that the others wait at another place."""
    program = build(cache, SMALL, mutant(file, old, new))
    launch = launch_with(case, 1, 4 * MILLISECOND)
    launch.chunk = 3 * 128
    with Emulation(program) as running:
        outcomes = running.run(launch)
    assert {outcome.code for outcome in (outcomes[0], outcomes[2])} == {TIMEOUT}
    assert all(outcomes[rank].rank == 1 for rank in (0, 2))
    assert all(outcomes[rank].detail < 4 * MILLISECOND + SOON for rank in (0, 2))


@pytest.mark.parametrize("after", [0, 8 * MILLISECOND])
@pytest.mark.parametrize("case", CASES[1:])
def test_a_call_to_which_all_come_in_time_takes_no_notice_of_the_host(
    emulation: Emulation, case: str, after: int
) -> None:
    """Neither where the word was there before, nor where it comes when the call has ended."""
    launch = launch_with(case, 1, after)
    for rank in launch.ranks:
        rank.input = rank.input[:, :, :40].copy()
    (verify if case == "push_reduce" else check)(launch, emulation.run(launch))


def receives(lost: int, after: int) -> Scene:
    """Ranks that wait for a small and a large message of rank 2, and for room at it."""
    rng = np.random.default_rng(1)
    scene = Scene(4, budget=BUDGET, lost=lost, lost_after=after)
    scene.recv(0, 2, 40)
    scene.recv(1, 2, 3000)
    scene.send(3, 2, content(rng, 3000))
    return scene


@pytest.mark.parametrize("after", [0, 4 * MILLISECOND])
def test_waits_for_a_message_and_for_room_end_soon_after_the_host_gave_up_a_rank(
    mail: Mail, after: int
) -> None:
    scene = receives(2, after)
    outcome = mail.play(scene)
    for rank in (0, 1, 3):
        record = outcome.records[rank]
        assert (record.code, record.rank, record.epoch) == (TIMEOUT, 2, 1)
        assert (record.mine, record.abort) == (FINGERPRINT, 3)
        assert MILLISECOND <= record.detail < after + SOON
    assert outcome.records[2].code == 0
    assert all(outcome.untouched(call) for stream in scene.streams.values() for call in stream)


def test_a_wait_for_a_rank_names_the_one_that_the_host_gave_up(mail: Mail) -> None:
    """Rank 2 itself waits for rank 1, say, which will never come."""
    outcome = mail.play(receives(1, MILLISECOND))
    assert [outcome.records[rank].rank for rank in (0, 1, 3)] == [1, 1, 1]


@pytest.mark.parametrize("after", [0, 8 * MILLISECOND])
def test_messages_that_arrive_in_time_take_no_notice_of_the_host(mail: Mail, after: int) -> None:
    rng = np.random.default_rng(1)
    scene = Scene(2, budget=BUDGET, lost=1, lost_after=after)
    scene.send_recv(0, 1, content(rng, 40), 600)
    scene.send_recv(1, 0, content(rng, 600), 40)
    outcome = mail.play(scene)
    assert {record.abort for record in outcome.records} == {2}
    assert {record.code for record in outcome.records} == {0}
    assert all(outcome.of(call) == data for call, data in scene.expected())


def test_thread_sanitizer_sees_no_race_with_the_word_of_the_host(cache: Path) -> None:
    launch = launch_with("two_shot", 2, 4 * MILLISECOND)
    launch.ranks[2].absent, launch.budget = True, 20 * 10**9
    with Emulation(build(cache, SANITIZED), environment=TSAN) as running:
        outcomes = running.run(launch)
    assert [outcome.code for outcome in outcomes] == [TIMEOUT, TIMEOUT, 0]
    assert all(outcome.detail < 10 * 10**9 for outcome in outcomes)
    scene = Scene(2, threads=8, budget=20 * 10**9, lost=1, lost_after=4 * MILLISECOND)
    scene.add(0, Call(origin=1, size=40))
    with Mail(build(cache, SANITIZED, name="mail"), environment=TSAN) as sanitized:
        assert sanitized.play(scene).records[0].detail < 10 * 10**9


DEAF = mutant(
    "wait.cuh", "return load_relaxed(&reinterpret_cast<const ErrorRecord*>(error)->abort)",
    "return error & 0",
)  # fmt: skip
#: Without the first the word is never seen; without the others some waits do not ask for it.
MUTATIONS: dict[str, tuple[Callable[[str, str], str], bool, bool]] = {
    "word of the host": (DEAF, True, True),
    "question of a collective": (
        mutant("wait.cuh", "timer_.lost(args.error)", "0"), True, False),
    "question of a message": (
        mutant("channel.cuh", "timer.lost(args_.error)", "0"), False, True),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_never_reading_the_word_of_the_host_is_noticed(cache: Path, name: str) -> None:
    change, collectives, messages = MUTATIONS[name]
    budget = 60 * MILLISECOND
    if collectives:
        launch = launch_with("two_shot", 2, 4 * MILLISECOND)
        launch.ranks[2].absent, launch.budget = True, budget
        with Emulation(build(cache, SMALL, change)) as running:
            assert running.run(launch)[0].detail >= budget
    if messages:
        scene = receives(2, 4 * MILLISECOND)
        scene.budget = budget
        with Mail(build(cache, SMALL, change, name="mail")) as running_mail:
            assert running_mail.play(scene).records[0].detail >= budget
