from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator

import group_workers as workers
import pytest

from cupy_zc import config
from cupy_zc.errors import (
    AgreementError,
    ClosedError,
    Error,
    InvalidTypeError,
    InvalidValueError,
    MismatchError,
    PeerTimeoutError,
)
from cupy_zc.group import (
    Bootstrap,
    from_tcp,
    in_process,
    tcp_store,
    waiting,
)
from cupy_zc.group.bootstrap import MAX_PAYLOAD
from cupy_zc.group.naming import name_ranks, numbered, shorten, sides

Maker = Callable[[int], list[Bootstrap]]


@pytest.fixture(autouse=True)
def _descriptors_are_what_they_were() -> Iterator[None]:
    with workers.flat_descriptors():
        yield


@pytest.fixture(params=[in_process, workers.over_tcp], ids=["threads", "tcp"])
def make(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """Makes groups of ranks that are threads of the test, and closes them."""
    with contextlib.ExitStack() as stack:

        def maker(n: int) -> list[Bootstrap]:
            group = request.param(n)
            for member in reversed(group):
                stack.callback(member.close)
            return list(group)

        yield maker


def test_every_call_works_whatever_carries_it(make: Maker) -> None:
    group = make(4)
    outcomes = workers.all_fine(workers.in_threads(4, lambda r: workers.use_everything(group[r])))
    for rank, outcome in enumerate(outcomes):
        del outcome["leaked"]  # the ranks share one process here; the fixture looks
        assert {**outcome, "leaked": 0} == workers.expected(rank, 4)


def test_one_rank_alone_needs_nobody(make: Maker) -> None:
    (alone,) = make(1)
    assert alone.all_gather(b"me") == [b"me"]
    assert alone.broadcast(b"me") == b"me"
    part = alone.split(3)
    assert part is not None
    assert part.size == 1
    part.close()


def test_a_split_group_outlives_its_parent(make: Maker) -> None:
    group = make(4)

    def body(rank: int) -> list[bytes]:
        part = group[rank].split(rank // 2)
        assert part is not None
        group[rank].close()
        with part:
            return [part.all_gather(bytes([rank])) for _ in range(3)][-1]

    outcomes = workers.all_fine(workers.in_threads(4, body))
    assert outcomes == [[b"\0", b"\1"]] * 2 + [[b"\2", b"\3"]] * 2


def test_groups_that_all_ranks_know_need_not_be_asked_for(make: Maker) -> None:
    group = make(6)

    def body(rank: int) -> list[list[bytes]]:
        node, rail = [rank // 3 * 3 + at for at in range(3)], [rank % 3 + 3, rank % 3]
        with group[rank].part(node) as one, group[rank].part(rail) as other:
            assert other.rank == 1 - rank // 3
            return [each.all_gather(bytes([rank])) for each in (other, one)]

    for rank, (rail, node) in enumerate(workers.all_fine(workers.in_threads(6, body))):
        assert rail == [bytes([rank % 3 + 3]), bytes([rank % 3])]
        assert node == [bytes([rank // 3 * 3 + at]) for at in range(3)]


@pytest.mark.parametrize("ranks", [[], [0], [1, 2], [1, 1], [-1, 1]])
def test_a_group_without_this_rank_or_with_none_is_refused(make: Maker, ranks: list[int]) -> None:
    with pytest.raises(InvalidValueError, match="part: ranks"):
        make(2)[1].part(ranks)


def test_different_calls_are_a_mismatch_on_every_rank_and_leave_the_group_in_step(
    make: Maker,
) -> None:
    group = make(3)

    def body(rank: int) -> list[bytes]:
        with pytest.raises(MismatchError, match=r"ranks 0, 1 are at barrier.*rank 2 is at all_g"):
            group[rank].barrier() if rank < 2 else group[rank].all_gather(b"")
        with pytest.raises(MismatchError, match=r"rank 0 is at broadcast\(root=0\); ranks 1, 2"):
            group[rank].broadcast(b"x", root=0 if rank == 0 else 1)
        return group[rank].all_gather(bytes([rank]))

    assert workers.all_fine(workers.in_threads(3, body)) == [[b"\0", b"\1", b"\2"]] * 3


def test_a_rank_that_does_not_come_is_named_at_the_deadline(make: Maker) -> None:
    group = make(4)

    def body(rank: int) -> tuple[int, ...]:
        if rank in (1, 3):
            time.sleep(0.8)
            return ()
        # Over TCP, rank 0 keeps the store, and may end it a moment before rank 2 gives up as well.
        with pytest.raises(PeerTimeoutError, match=r"wait.* for ranks 1, 3") as info:
            group[rank].barrier(timeout=0.4)
        return info.value.ranks

    assert workers.all_fine(workers.in_threads(4, body)) == [(1, 3), (), (1, 3), ()]
    assert group[0].closed
    assert not group[1].closed


def test_a_rank_that_leaves_is_named_at_once(make: Maker) -> None:
    group = make(3)
    began = time.monotonic()

    def body(rank: int) -> tuple[int, ...]:
        if rank == 1:
            time.sleep(0.1)
            group[1].close()
            return ()
        with pytest.raises(PeerTimeoutError, match="rank 1 has gone") as info:
            group[rank].barrier(timeout=20)
        return info.value.ranks

    assert workers.all_fine(workers.in_threads(3, body)) == [(1,), (), (1,)]
    assert time.monotonic() - began < 5


def test_a_long_wait_says_whom_it_is_for(
    make: Maker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "WARN_AFTER", 0.1)
    group = make(2)

    def body(rank: int) -> None:
        time.sleep(0.7 * rank)
        group[rank].barrier(timeout=2)

    with caplog.at_level(logging.WARNING, "cupy_zc"):
        workers.all_fine(workers.in_threads(2, body))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "rank 0: barrier()" in warnings[0]
    assert "for rank 1, and will" in warnings[0]


def test_wrong_arguments_are_refused_before_anything_is_sent(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone,) = make(1)
    with pytest.raises(InvalidTypeError, match="payload"):
        alone.all_gather("text")  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="bytes on the root"):
        alone.broadcast(None)
    with pytest.raises(InvalidValueError, match="root=1"):
        alone.broadcast(b"", root=1)
    with pytest.raises(InvalidValueError, match="64-bit"):
        alone.split(1 << 63)
    with pytest.raises(InvalidValueError, match="timeout=0"):
        alone.barrier(timeout=0)
    monkeypatch.setattr("cupy_zc.group.bootstrap.MAX_PAYLOAD", 10)
    with pytest.raises(InvalidValueError, match="at most 10"):
        alone.all_gather(b"x" * 11)
    assert alone.all_gather(b"x") == [b"x"]


def test_a_closed_bootstrap_says_so(make: Maker) -> None:
    (alone,) = make(1)
    alone.close()
    alone.close()
    with pytest.raises(ClosedError, match="rank 0: barrier"):
        alone.barrier()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_can_close_its_copy_and_do_no_harm(make: Maker) -> None:
    group = make(2)
    pid = os.fork()
    if pid == 0:  # in the child: report by the exit status alone
        status = 1
        with contextlib.suppress(BaseException):
            try:
                group[0].barrier()
            except ClosedError as error:
                status = 0 if "parent of this process" in str(error) else 2
            for member in group:
                member.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    outcomes = workers.in_threads(2, lambda r: group[r].all_gather(bytes([r])))
    assert workers.all_fine(outcomes) == [[b"\0", b"\1"]] * 2


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_a_rank_outside_the_group_is_refused(size: int, rank: int) -> None:
    with pytest.raises(InvalidValueError, match="from_tcp"):
        from_tcp(size, rank)


def test_no_rank_at_all_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="in_process: n=0"):
        in_process(0)


def test_the_settings_of_a_group_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYX_DISTRIBUTED_HOST", "node7")
    monkeypatch.setenv("CUPYX_DISTRIBUTED_PORT", "14000")
    monkeypatch.setenv("CUPY_ZC_SECRET", "hush")
    monkeypatch.setenv("CUPY_ZC_SETUP_TIMEOUT", "5")
    values = config._read(os.environ)
    assert (values.host, values.port, values.setup_timeout) == ("node7", 14000, 5)
    assert (values.secret, values.node_size) == ("hush", 0)
    assert "hush" not in repr(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUPYX_DISTRIBUTED_PORT", "0"),
        ("CUPYX_DISTRIBUTED_PORT", "65536"),
        ("CUPYX_DISTRIBUTED_PORT", "http"),
        ("CUPY_ZC_NODE_SIZE", "-1"),
        ("CUPY_ZC_SETUP_TIMEOUT", "inf"),
    ],
)
def test_a_setting_that_is_not_allowed_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidValueError, match=name):
        config._read({name: value})


def test_ranks_find_each_other_by_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYX_DISTRIBUTED_PORT", str(workers.free_port()))
    monkeypatch.setenv("CUPY_ZC_SECRET", "hush")
    config.settings.cache_clear()
    try:
        group = workers.all_fine(workers.in_threads(2, lambda r: from_tcp(2, r)))
    finally:
        monkeypatch.undo()
        config.settings.cache_clear()
    for member in reversed(group):
        member.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            MismatchError("differ"),
            r"0 is 3, 1 is 11, 2 is 19, .*, 15 is 123, \.\.\. \(512 in all\)",
        ),
        (AgreementError("no", 300), r"300 is 2403, 0 is 3, 1 is 11, .*, 14 is 115, \.\.\. \(512"),
        (PeerTimeoutError("gone", [9, 511]), r"9 is 75, 511 is 4091, 0 is 3, .* \(512 in all\)"),
    ],
)
def test_of_a_large_group_an_error_says_which_ranks_of_it_are_concerned(
    error: Error, words: str
) -> None:
    with pytest.raises(type(error), match=words), numbered("rail 3", range(3, 4096, 8)):
        raise error


def test_a_rank_that_waits_asks_seldom_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that wait do so, and the answer is as long as they are many."""
    asked: list[object] = []
    real = tcp_store.pack_ranks
    monkeypatch.setattr(tcp_store, "pack_ranks", lambda ranks: asked.append(1) or real(ranks))
    group = workers.over_tcp(2)

    def body(rank: int) -> None:
        time.sleep(1.2 * rank)
        group[rank].barrier(timeout=60)

    workers.all_fine(workers.in_threads(2, body))
    for member in reversed(group):
        member.close()
    assert not asked


def test_many_ranks_and_long_values_are_named_briefly() -> None:
    assert name_ranks([4]) == "rank 4"
    assert name_ranks(range(100)).endswith("14, 15, ... (100 in all)")
    assert sides({rank: str(rank) for rank in range(16)}).endswith("rank 15 has 15")
    many = sides({rank: str(rank // 8) for rank in range(4096)})
    assert many.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 have 0; ranks 8, 9")
    assert many.endswith("126, 127 have 15, ... (512 in all)")
    assert shorten("x" * 300) == "x" * 200 + "... (300 characters)"
    assert MAX_PAYLOAD == 1 << 30
