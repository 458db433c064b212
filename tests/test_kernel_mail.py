"""The mail kernel, compiled for the host as it is: messages between ranks, of any kind and size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from emulated import FIBERS, MISMATCH, TIMEOUT, build, build_directory
from emulated_cases import THOROUGH
from emulated_mail import FINGERPRINT, Call, Mail, Record, Scene, check, content
from emulated_mail_cases import BOUNDARIES, any_scene, ring, swap
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

SMALL, MIDDLE, LARGE = 40, 300, 3000
OTHER = FINGERPRINT + 1


@pytest.fixture(scope="module")
def mail(request: pytest.FixtureRequest) -> Iterator[Mail]:
    program = build(build_directory(request.config), FIBERS, name="mail")
    with Mail(program) as running:
        yield running


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("nbytes", BOUNDARIES)
def test_two_ranks_that_exchange_arrays_of_one_size_have_each_other_s(
    mail: Mail, rng: np.random.Generator, nbytes: int
) -> None:
    for _ in range(4):
        scene = swap(rng, nbytes, nbytes)
        check(scene, mail.play(scene))


def test_two_ranks_exchange_arrays_of_different_sizes(mail: Mail, rng: np.random.Generator) -> None:
    for one in (0, SMALL, MIDDLE, LARGE):
        for other in (0, SMALL, MIDDLE, LARGE):
            scene = swap(rng, one, other)
            check(scene, mail.play(scene))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_sends_to_the_next_and_then_receives(
    mail: Mail, rng: np.random.Generator, size: int
) -> None:
    for nbytes in (0, 1, SMALL, MIDDLE, LARGE):
        scene = ring(rng, size, [nbytes])
        check(scene, mail.play(scene))


def test_sends_to_several_ranks_are_received_in_any_order_of_ranks(
    mail: Mail, rng: np.random.Generator
) -> None:
    scene = Scene(4)
    for rank in range(4):
        for step in (1, 2, 3):
            peer = (rank + step) % 4
            scene.add(rank, Call(peer, content(rng, LARGE)), f"to {peer}")
            scene.recv(rank, peer, LARGE)
    check(scene, mail.play(scene))


def test_messages_of_several_ranks_are_received_at_the_same_time(
    mail: Mail, rng: np.random.Generator
) -> None:
    scene = Scene(3)
    for nbytes in (LARGE, SMALL, MIDDLE):
        for rank in range(3):
            for peer in {0, 1, 2} - {rank}:
                scene.add(rank, Call(peer, content(rng, nbytes)), f"to {peer}")
                scene.recv(rank, peer, nbytes, stream=f"from {peer}")
    check(scene, mail.play(scene))


@pytest.mark.parametrize("size", [2, 3])
def test_messages_in_a_row_arrive_in_order_whatever_their_sizes(
    mail: Mail, rng: np.random.Generator, size: int
) -> None:
    sizes = [int(rng.choice([n, n % 70])) for n in rng.integers(0, 1500, 40)]
    scene = ring(rng, size, sizes)
    check(scene, mail.play(scene))


def test_a_channel_lives_on_from_scene_to_scene(mail: Mail, rng: np.random.Generator) -> None:
    for number in range(12):
        scene = ring(rng, 2, [int(n) for n in rng.integers(0, 1000, 3)])
        scene.fresh = number == 0
        check(scene, mail.play(scene))


def test_an_exchange_meets_a_send_and_a_recv(mail: Mail, rng: np.random.Generator) -> None:
    for one in (SMALL, LARGE):
        for other in (SMALL, LARGE):
            scene = Scene(2)
            scene.send_recv(0, 1, content(rng, one), other)
            scene.send(1, 0, content(rng, other))
            scene.recv(1, 0, one)
            check(scene, mail.play(scene))


@pytest.mark.parametrize("tracks", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [SMALL, 121, MIDDLE, 384, LARGE])
def test_a_sender_may_use_fewer_tracks_than_its_receiver_has(
    mail: Mail, rng: np.random.Generator, nbytes: int, tracks: int
) -> None:
    """Each for itself, as the header says; the tracks that a message leaves out lose no count."""
    scene = Scene(2)
    for used in (tracks, 3, tracks, 1, tracks):
        scene.send(0, 1, content(rng, nbytes), tracks=used)
        scene.recv(1, 0, nbytes)
    check(scene, mail.play(scene))


def test_sends_of_few_tracks_and_exchanges_of_all_share_a_channel(
    mail: Mail, rng: np.random.Generator
) -> None:
    for number in range(6):
        scene = Scene(2, threads=int(rng.choice([8, 32])), fresh=number == 0)
        for tracks in (1, 2, 3):
            scene.send(0, 1, content(rng, LARGE), tracks=tracks)
            scene.recv(1, 0, LARGE)
            one, other = content(rng, MIDDLE), content(rng, LARGE)
            scene.add(0, Call(1, one, 1, LARGE, tracks=3 if tracks == 1 else 0))
            scene.add(1, Call(0, other, 0, MIDDLE, tracks=tracks))
        check(scene, mail.play(scene))


def test_the_tracks_of_a_message_are_no_part_of_what_both_sides_must_agree_on(
    mail: Mail, rng: np.random.Generator
) -> None:
    """A length that differs is an error, whatever the number beside it in the header."""
    for tracks in (1, 2, 3):
        scene = Scene(2, budget=50_000_000)
        scene.send(0, 1, content(rng, LARGE), tracks=tracks)
        call = scene.recv(1, 0, LARGE + 1)
        outcome = mail.play(scene)
        assert [record.code for record in outcome.records] == [MISMATCH, MISMATCH]
        assert outcome.untouched(call)


@settings(max_examples=500 if THOROUGH else 60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4))
def test_any_messages_at_all(mail: Mail, seed: int, size: int) -> None:
    scene = any_scene(np.random.default_rng(seed), size, events=12)
    check(scene, mail.play(scene))


@pytest.mark.parametrize("messages", [(1 << 32) - 4, (1 << 32) - 1, (1 << 33) - 4, (1 << 40) - 2])
def test_messages_pass_where_the_flags_of_letters_wrap(
    mail: Mail, rng: np.random.Generator, messages: int
) -> None:
    """Flags of 32 bits repeat, and fresh memory must not be taken for a letter."""
    for _ in range(6):
        scene = ring(rng, 2, [SMALL, 0, SMALL, LARGE, 1, SMALL, MIDDLE])
        scene.messages, scene.passed = messages, (1 << 32) - 3
        check(scene, mail.play(scene))


@pytest.mark.parametrize("byte", [0, 1, 0x80, 0xFF])
def test_no_value_of_the_data_is_taken_for_a_signal(mail: Mail, byte: int) -> None:
    scene = Scene(2)
    for nbytes in (48, 64, 300, 2000) * 3:
        data = bytes([byte]) * nbytes
        for rank in (0, 1):
            scene.send_recv(rank, 1 - rank, data, nbytes)
    check(scene, mail.play(scene))


def test_a_sender_runs_ahead_of_its_receiver_as_far_as_there_is_room(
    mail: Mail, rng: np.random.Generator
) -> None:
    """Two letters and two slots a track: a send that fits does not wait for anybody."""
    scene = Scene(2, budget=2_000_000)
    scene.send(0, 1, content(rng, SMALL))
    scene.send(0, 1, content(rng, 2 * 128 * 3))
    assert [record.code for record in mail.play(scene).records] == [0, 0]


def test_one_letter_less_than_there_are_fits_whatever_was_received_before(
    mail: Mail, rng: np.random.Generator
) -> None:
    """The last one that was received is told by the next drain alone."""
    before = Scene(2, letters=4)
    for _ in range(3):
        before.send(0, 1, content(rng, SMALL))
        before.recv(1, 0, SMALL)
    check(before, mail.play(before))
    for count, code in ((3, 0), (1, TIMEOUT)):
        more = Scene(2, letters=4, fresh=False, budget=2_000_000)
        for _ in range(count):
            more.send(0, 1, content(rng, SMALL))
        assert mail.play(more).records[0].code == code


@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])
@pytest.mark.parametrize("sent", [SMALL, MIDDLE, LARGE])
def test_a_message_that_was_not_expected_is_an_error_and_writes_nothing(
    mail: Mail, rng: np.random.Generator, sent: int, size: int
) -> None:
    """The next message fits what is expected, and must not be taken for this one."""
    scene = Scene(2, budget=50_000_000)
    for data, fingerprint in ((content(rng, sent), OTHER), (content(rng, size), FINGERPRINT)):
        scene.add(0, Call(1, data, sent=fingerprint), "sends")
    first, second = scene.recv(1, 0, size), scene.recv(1, 0, size)
    outcome = mail.play(scene)
    assert outcome.records[1] == Record(MISMATCH, 0, 7, 1, OTHER, FINGERPRINT)
    assert outcome.untouched(first)
    assert outcome.untouched(second)


@pytest.mark.parametrize("threads", [8, 32])
@pytest.mark.parametrize("sent", [0, 90, 600, MIDDLE * 10])
def test_a_shorter_or_longer_letter_than_expected_is_noticed_long_before_the_deadline(
    mail: Mail, rng: np.random.Generator, sent: int, threads: int
) -> None:
    """The header is looked at first, even where every thread waits for data of its own."""
    scene = Scene(2, threads=threads, letter=720, budget=10**15)
    scene.add(0, Call(1, content(rng, sent), sent=OTHER))
    call = scene.recv(1, 0, 620)
    outcome = mail.play(scene)
    assert outcome.records[1] == Record(MISMATCH, 0, 7, 1, OTHER, FINGERPRINT)
    assert outcome.untouched(call)


def test_messages_of_equal_fingerprint_and_other_length_are_an_error(
    mail: Mail, rng: np.random.Generator
) -> None:
    scene = Scene(2, budget=50_000_000)
    scene.send(0, 1, content(rng, MIDDLE))
    call = scene.recv(1, 0, MIDDLE + 1)
    outcome = mail.play(scene)
    assert outcome.records[1].code == MISMATCH
    assert outcome.untouched(call)


@pytest.mark.parametrize("back", [SMALL, LARGE])
def test_a_sender_whose_message_is_refused_learns_it_long_before_its_deadline(
    mail: Mail, rng: np.random.Generator, back: int
) -> None:
    """Rank 0 waits for room, or for what rank 1 has no mind to send any more."""
    scene = Scene(2, budget=10**15)
    scene.add(0, Call(1, content(rng, LARGE), 1, back, sent=OTHER))
    scene.recv(1, 0, LARGE)
    outcome = mail.play(scene)
    assert outcome.records[0] == Record(MISMATCH, 1, 7, 1, FINGERPRINT, OTHER)
    assert outcome.records[1] == Record(MISMATCH, 0, 7, 1, OTHER, FINGERPRINT)


def test_an_exchange_that_one_rank_refuses_ends_on_both_at_once(
    mail: Mail, rng: np.random.Generator
) -> None:
    """The small message of rank 0 is gone before it is refused; its own recv must not wait on.

    Both go on for as long as nobody waits: then rank 0 has what rank 1 sent.
    """
    codes = set()
    for _ in range(20):
        scene = Scene(2, budget=10**15)
        exchange = scene.add(0, Call(1, content(rng, SMALL), 1, LARGE, sent=OTHER))
        data = content(rng, LARGE)
        scene.add(1, Call(0, data, 0, SMALL))
        outcome = mail.play(scene)
        assert outcome.records[1].code == MISMATCH
        code = outcome.records[0].code
        assert code == MISMATCH or outcome.of(exchange) == data
        codes.add(code)
    assert MISMATCH in codes


def test_a_refused_sender_is_told_by_its_next_call_at_the_latest(
    mail: Mail, rng: np.random.Generator
) -> None:
    scene = Scene(2)
    scene.add(0, Call(1, content(rng, SMALL), sent=OTHER))
    scene.recv(1, 0, SMALL)
    assert [record.code for record in mail.play(scene).records] == [0, MISMATCH]
    scene = Scene(2, fresh=False, budget=10**18)
    scene.send(0, 1, content(rng, SMALL))
    assert mail.play(scene).records[0] == Record(MISMATCH, 1, 7, 1, FINGERPRINT, OTHER)


@pytest.mark.parametrize("nbytes", [0, SMALL, LARGE])
def test_a_sender_that_never_comes_is_named_when_the_budget_is_spent(
    mail: Mail, nbytes: int
) -> None:
    scene = Scene(3, budget=5_000_000)
    call = scene.recv(1, 2, nbytes)
    outcome = mail.play(scene)
    record = outcome.records[1]
    assert (record.code, record.rank, record.lane, record.epoch) == (TIMEOUT, 2, 7, 1)
    assert (record.mine, record.abort) == (FINGERPRINT, 0)
    assert 5_000_000 <= record.detail < 6_000_000
    assert outcome.untouched(call)
    assert [outcome.records[rank].code for rank in (0, 2)] == [0, 0]


@pytest.mark.parametrize(("sizes", "epoch"), [([0] * 3, 3), ([1, SMALL, MIDDLE], 3), ([LARGE], 1)])
def test_a_receiver_that_never_comes_is_named_once_there_is_no_room(
    mail: Mail, rng: np.random.Generator, sizes: list[int], epoch: int
) -> None:
    scene = Scene(3, budget=500_000)
    for nbytes in sizes:
        scene.send(2, 0, content(rng, nbytes))
    record = mail.play(scene).records[2]
    assert (record.code, record.rank, record.epoch) == (TIMEOUT, 0, epoch)
    assert 500_000 <= record.detail < 1_000_000


def test_mail_that_failed_returns_at_once_ever_after(mail: Mail, rng: np.random.Generator) -> None:
    scene = Scene(3, budget=2_000_000)
    scene.recv(0, 1, SMALL)
    assert mail.play(scene).records[0].code == TIMEOUT
    again = Scene(3, fresh=False, budget=10**18)  # a wait would last for ever
    calls = [again.recv(0, 1, SMALL), again.recv(0, 2, LARGE)]
    again.send_recv(0, 1, content(rng, LARGE), LARGE)
    outcome = mail.play(again)
    assert [record.code for record in outcome.records] == [0] * 3  # the record was written once
    assert all(outcome.untouched(call) for call in calls)
