from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import group_workers as workers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_zc.errors import (
    AgreementError,
    ClosedError,
    Error,
    InvalidTypeError,
    MismatchError,
    PeerTimeoutError,
)
from cupy_zc.group import Channel, Transaction, agree_equal, in_process, vote

STEPS = ("create", "export", "import", "map")


@pytest.fixture(autouse=True)
def _descriptors_are_what_they_were() -> Iterator[None]:
    with workers.flat_descriptors():
        yield


class _RefusedError(Exception):
    pass


def _take_steps(
    transaction: Transaction, journal: list[str], fails_at: str | None = None
) -> list[str]:
    """Four steps that write down what they do; the results."""

    def do(name: str) -> str:
        if name == fails_at:
            raise _RefusedError(f"no room to {name}")
        journal.append(name)
        return f"result of {name}"

    def undo(result: str) -> None:
        journal.append(f"undo {result}")

    return [transaction.step(name, lambda name=name: do(name), undo) for name in STEPS]


# Votes


def test_a_vote_without_failures_passes() -> None:
    with workers.channels(3) as opened:
        assert workers.on_all(opened, lambda channel: vote(channel, "anything")) == [None] * 3


def test_failures_are_one_error_on_every_rank() -> None:
    def body(channel: Channel) -> AgreementError:
        error = _RefusedError(f"full at {channel.rank}") if channel.rank else None
        with pytest.raises(AgreementError) as info:
            vote(channel, "map", error)
        assert info.value.__cause__ is error
        vote(channel, "the next step")
        return info.value

    with workers.channels(3) as opened:
        outcomes = workers.on_all(opened, body)
    assert {(str(error), error.rank) for error in outcomes} == {
        (
            "map failed on rank 1: _RefusedError: full at 1 "
            "(2 of 3 ranks failed; no rank keeps the step)",
            1,
        )
    }


def test_the_rank_that_failed_by_itself_is_named_before_those_that_missed_it() -> None:
    def body(channel: Channel) -> int:
        missed = PeerTimeoutError("rank 2 did not come", [2])
        with pytest.raises(AgreementError, match="failed on rank 2: _RefusedError: full") as info:
            vote(channel, "open", _RefusedError("full") if channel.rank == 2 else missed)
        return info.value.rank

    with workers.channels(3) as opened:
        assert workers.all_fine(workers.on_all(opened, body)) == [2, 2, 2]


def test_votes_on_different_steps_are_a_mismatch() -> None:
    def body(channel: Channel) -> str:
        with pytest.raises(MismatchError) as info:
            vote(channel, "bind" if channel.rank == 2 else "map")
        return str(info.value)

    with workers.channels(3) as opened:
        outcomes = set(workers.all_fine(workers.on_all(opened, body)))
    assert outcomes == {
        "the ranks did different steps: ranks 0, 1 are at 'map'; rank 2 is at 'bind'"
    }


def test_a_vote_that_cannot_be_held_keeps_the_local_error() -> None:
    refusal = _RefusedError("local")
    with workers.channels(2) as opened:
        opened[1].close()
        with pytest.raises(PeerTimeoutError, match="rank 1 has gone") as info:
            vote(opened[0], "map", refusal)
        assert info.value.__cause__ is refusal
        with pytest.raises(ClosedError) as second:
            vote(opened[0], "map")
        assert second.value.__cause__ is None


def test_ranks_of_several_nodes_vote_on_a_bootstrap() -> None:
    group = in_process(3)

    def body(rank: int) -> int:
        with pytest.raises(AgreementError) as info:
            vote(group[rank], "probe", _RefusedError("no") if rank == 2 else None)
        agree_equal(group[rank], "count", 5)
        return info.value.rank

    assert workers.all_fine(workers.in_threads(3, body)) == [2, 2, 2]


def test_a_very_long_text_is_cut() -> None:
    with workers.channels(1) as (alone,), pytest.raises(AgreementError) as info:
        vote(alone, "step", _RefusedError("x" * 100_000))
    assert len(str(info.value)) < 3000


# Equal values


@settings(max_examples=25, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=3).map(tuple),
        max_leaves=5,
    )
)
def test_equal_values_of_any_plain_kind_agree(value: Any) -> None:
    with workers.channels(2) as opened:
        outcomes = workers.on_all(opened, lambda each: agree_equal(each, "value", value))
    assert outcomes == [None, None]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((1, 2, 1), "ranks 0, 2 have 1; rank 1 has 2"),
        ((b"a", b"b", b"c"), "rank 0 has b'a'; rank 1 has b'b'; rank 2 has b'c'"),
        (("sum", "sum", "max"), "ranks 0, 1 have 'sum'; rank 2 has 'max'"),
        ((1, 1.0, True), "rank 0 has 1; rank 1 has 1.0; rank 2 has True"),
        (((1, "f4"), (1, "f8"), (1, "f8")), "rank 0 has (1, 'f4'); ranks 1, 2 have (1, 'f8')"),
    ],
)
def test_different_values_are_a_mismatch_naming_both_sides(
    values: tuple[Any, ...], said: str
) -> None:
    def body(channel: Channel) -> str:
        with pytest.raises(MismatchError) as info:
            agree_equal(channel, "count", values[channel.rank])
        agree_equal(channel, "the next value", 0)
        return str(info.value)

    with workers.channels(3) as opened:
        outcomes = set(workers.all_fine(workers.on_all(opened, body)))
    assert outcomes == {f"count must be equal on all ranks: {said}"}


@pytest.mark.parametrize("value", [object(), [1], (1, {2})])
def test_values_that_say_nothing_elsewhere_are_refused(value: Any) -> None:
    with workers.channels(1) as (alone,), pytest.raises(InvalidTypeError, match="agree_equal"):
        agree_equal(alone, "value", value)


# Transactions


def test_committed_steps_are_kept() -> None:
    def body(channel: Channel) -> list[str]:
        journal: list[str] = []
        with Transaction(channel) as transaction:
            results = _take_steps(transaction, journal)
            transaction.commit()
        assert results == [f"result of {name}" for name in STEPS]
        return journal

    with workers.channels(3) as opened:
        assert workers.all_fine(workers.on_all(opened, body)) == [list(STEPS)] * 3


def test_steps_that_are_not_committed_are_undone_last_first() -> None:
    def body(channel: Channel) -> list[str]:
        journal: list[str] = []
        with Transaction(channel) as transaction:
            _take_steps(transaction, journal)
        return journal

    undone = [f"undo result of {name}" for name in reversed(STEPS)]
    with workers.channels(2) as opened:
        assert workers.all_fine(workers.on_all(opened, body)) == [[*STEPS, *undone]] * 2


@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize("fails_at", STEPS)
def test_one_rank_that_fails_at_any_step_undoes_it_on_every_rank(
    fails_at: str, culprit: int
) -> None:
    done = STEPS.index(fails_at)
    journals: list[list[str]] = [[], [], []]

    def body(channel: Channel) -> AgreementError:
        own = channel.rank == culprit
        with pytest.raises(AgreementError) as info, Transaction(channel) as transaction:
            try:
                _take_steps(transaction, journals[channel.rank], fails_at if own else None)
            except AgreementError:
                # Undone before the error is raised, not only when the block ends.
                assert journals[channel.rank][-1:] in (["undo result of create"], [])
                raise
        assert isinstance(info.value.__cause__, _RefusedError) == own
        # The ranks are in step: what comes next works.
        agree_equal(channel, "what is left", done)
        return info.value

    began = time.monotonic()
    with workers.channels(3) as opened:
        outcomes = workers.in_threads(3, lambda r: body(opened[r]))
    assert time.monotonic() - began < 5
    assert {(str(error), error.rank) for error in outcomes} == {
        (
            f"{fails_at} failed on rank {culprit}: _RefusedError: no room to {fails_at} "
            "(1 of 3 ranks failed; no rank keeps the step)",
            culprit,
        )
    }
    for rank, journal in enumerate(journals):
        kept = list(STEPS[: done + (rank != culprit)])
        assert journal == kept + [f"undo result of {name}" for name in reversed(kept)]


def test_an_undo_that_fails_does_not_stop_the_others_and_is_not_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    undone: list[str] = []

    def refuse(_: object) -> None:
        undone.append("second")
        raise _RefusedError("cannot undo")

    with workers.channels(1) as (alone,):
        with (
            pytest.raises(AgreementError, match="third failed") as info,
            Transaction(alone) as transaction,
        ):
            transaction.step("first", lambda: 1, lambda _: undone.append("first"))
            transaction.step("second", lambda: 2, refuse)
            transaction.step("third", lambda: 1 / 0)
        assert undone == ["second", "first"]
        assert info.value.__notes__ == [
            "undoing 'second' failed as well: _RefusedError('cannot undo')"
        ]
        assert "undoing 'second' failed" in caplog.text
        with (
            pytest.raises(Error, match="undoing 'second' failed: cannot undo") as second_info,
            Transaction(alone) as transaction,
        ):
            transaction.step("second", lambda: 2, refuse)
        assert isinstance(second_info.value.__cause__, _RefusedError)


def test_an_error_of_one_rank_between_steps_reaches_the_others() -> None:
    def body(channel: Channel, at_commit: bool) -> list[str]:
        journal: list[str] = []
        expected: type[Exception] = _RefusedError if channel.rank == 1 else AgreementError
        with pytest.raises(expected) as info, Transaction(channel) as transaction:
            transaction.step("create", lambda: 1, lambda _: journal.append("undone"))
            if channel.rank == 1:
                raise _RefusedError("mine alone")
            if at_commit:
                transaction.commit()
            transaction.step("map", lambda: 2, lambda _: journal.append("map undone"))
        if channel.rank != 1:
            assert "what follows 'create' failed on rank 1: _RefusedError: mine alone" in str(
                info.value
            )
        vote(channel, "in step again")
        return journal

    with workers.channels(3) as opened:
        for at_commit in (True, False):
            outcomes = workers.on_all(opened, lambda each, at=at_commit: body(each, at))
            undone = ["undone"] if at_commit else ["map undone", "undone"]
            assert workers.all_fine(outcomes) == [undone, ["undone"], undone]


def test_an_error_of_all_ranks_between_steps_stays_itself() -> None:
    def body(channel: Channel) -> list[str]:
        journal: list[str] = []
        with pytest.raises(_RefusedError, match="everybody"), Transaction(channel) as transaction:
            transaction.step("create", lambda: 1, lambda _: journal.append("undone"))
            raise _RefusedError("everybody")
        with pytest.raises(MismatchError), Transaction(channel) as transaction:
            transaction.step("create", lambda: 1, lambda _: journal.append("undone"))
            agree_equal(channel, "rank", channel.rank)
        vote(channel, "in step again")
        return journal

    with workers.channels(2) as opened:
        assert workers.all_fine(workers.on_all(opened, body)) == [["undone"] * 2] * 2


def test_different_steps_are_a_mismatch_and_undone() -> None:
    def body(channel: Channel) -> list[str]:
        journal: list[str] = []
        name = f"step {channel.rank}"
        with (
            pytest.raises(MismatchError, match="different steps"),
            Transaction(channel) as transaction,
        ):
            transaction.step(name, lambda: 1, lambda _: journal.append("undone"))
        return journal

    with workers.channels(2) as opened:
        assert workers.all_fine(workers.on_all(opened, body)) == [["undone"]] * 2


def test_an_interrupt_in_a_step_is_told_and_goes_on_as_itself() -> None:
    def body(channel: Channel) -> list[str]:
        journal: list[str] = []

        def interrupted() -> None:
            if channel.rank == 0:
                raise KeyboardInterrupt

        expected = KeyboardInterrupt if channel.rank == 0 else AgreementError
        with pytest.raises(expected), Transaction(channel) as transaction:
            transaction.step("create", lambda: 1, lambda _: journal.append("undone"))
            transaction.step("long", interrupted)
        return journal

    with workers.channels(2) as opened:
        assert workers.all_fine(workers.on_all(opened, body)) == [["undone"]] * 2


def test_a_rank_that_stays_away_from_a_step_undoes_it_on_the_others() -> None:
    def body(channel: Channel) -> list[str]:
        journal: list[str] = []
        if channel.rank == 2:
            time.sleep(0.6)
            return journal
        with pytest.raises(PeerTimeoutError) as info, Transaction(channel, timeout=0.3) as both:
            both.step("create", lambda: 1, lambda _: journal.append("undone"))
        assert "rank 2" in str(info.value)
        return journal

    with workers.channels(3) as opened:
        assert workers.all_fine(workers.on_all(opened, body)) == [["undone"], ["undone"], []]


def test_a_transaction_that_is_over_takes_no_more_steps() -> None:
    with workers.channels(1) as (alone,), Transaction(alone) as transaction:
        transaction.commit()
        with pytest.raises(ClosedError, match="'late' comes after its end"):
            transaction.step("late", lambda: 1)
        with pytest.raises(ClosedError, match="'commit' comes after"):
            transaction.commit()


def test_one_rank_alone_needs_no_socket() -> None:
    with workers.channels(1) as (alone,):
        assert not alone._streams.peers
        vote(alone, "step")
        agree_equal(alone, "value", 1)
        with Transaction(alone) as transaction:
            assert transaction.step("step", threading.get_ident) == threading.get_ident()
            transaction.commit()
