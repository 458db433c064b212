from __future__ import annotations

import contextlib
import fcntl
import os
import random
import time
from collections.abc import Iterator

import group_workers as workers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_zc.errors import (
    ClosedError,
    InvalidTypeError,
    InvalidValueError,
    PeerTimeoutError,
)
from cupy_zc.group import (
    Bootstrap,
    Channel,
    Message,
    Topology,
    closing,
    discover,
    from_tcp,
    in_process,
)


@pytest.fixture(autouse=True)
def _descriptors_are_what_they_were() -> Iterator[None]:
    with workers.flat_descriptors():
        yield


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_every_rank_gets_what_every_rank_gave(n: int) -> None:
    def body(channel: Channel) -> None:
        rank = channel.rank
        for turn in range(3):
            with workers.files([f"{rank}.{k}.{turn}".encode() for k in range(rank)]) as fds:
                got = channel.exchange(bytes([rank]) * rank, fds, tag=f"turn {turn}")
            with closing(got):
                assert [m.rank for m in got] == list(channel.ranks) == list(range(n))
                assert [m.payload for m in got] == [bytes([r]) * r for r in range(n)]
                for message in got:
                    assert len(message.fds) == (0 if message.rank == rank else message.rank)
                    for k, fd in enumerate(message.fds):
                        assert os.pread(fd, 99, 0).decode() == f"{message.rank}.{k}.{turn}"
                        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        told = channel.broadcast(n - 1, b"news" if rank == n - 1 else None, tag="news")
        assert told == Message(n - 1, b"news")
        assert channel.all_gather(b"x") == [b"x"] * n
        assert channel.size == n

    with workers.channels(n) as opened:
        workers.all_fine(workers.on_all(opened, body))


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.integers(0, 100), st.integers(0, 1 << 20)),
            st.one_of(st.integers(0, 3), st.sampled_from([252, 253, 254, 300])),
        ),
        min_size=2,
        max_size=3,
    )
)
def test_any_size_and_any_number_of_descriptors_arrive(given_by: list[tuple[int, int]]) -> None:
    n = len(given_by)
    sent = [random.Random(size).randbytes(size) for size, _ in given_by]

    def body(channel: Channel) -> None:
        _, count = given_by[channel.rank]
        with workers.files([str(channel.rank).encode()]) as fds:
            got = channel.exchange(sent[channel.rank], fds * count)
        with closing(got):
            assert [m.payload for m in got] == sent
            for message in got:
                if message.rank != channel.rank:
                    assert len(message.fds) == given_by[message.rank][1]
                    expected = {str(message.rank).encode()}
                    assert {os.pread(fd, 9, 0) for fd in message.fds} <= expected

    with workers.channels(n) as opened:
        workers.all_fine(workers.on_all(opened, body))


def test_large_payloads_in_all_directions_do_not_block_each_other() -> None:
    size = 8 << 20

    def body(channel: Channel) -> bool:
        got = channel.exchange(bytes([channel.rank]) * size, timeout=20)
        return all(m.payload == bytes([m.rank]) * size for m in got)

    with workers.channels(4) as opened:
        assert workers.on_all(opened, body) == [True] * 4


def test_a_broadcast_carries_descriptors_and_the_root_keeps_its_own() -> None:
    def body(channel: Channel) -> bytes:
        if channel.rank == 1:
            with workers.files([b"from the root"]) as fds:
                message = channel.broadcast(1, b"", fds)
                assert message.fds == ()
                assert os.pread(fds[0], 99, 0) == b"from the root"
                return b"from the root"
        message = channel.broadcast(1)
        with closing([message]):
            return os.pread(message.fds[0], 99, 0)

    with workers.channels(3) as opened:
        assert workers.on_all(opened, body) == [b"from the root"] * 3


def test_a_message_outlives_the_channel_of_its_sender() -> None:
    def body(channel: Channel) -> bytes:
        if channel.rank == 0:
            channel.broadcast(0, b"last words" * 1000)
            channel.close()
            return b""
        time.sleep(0.1)
        return channel.broadcast(0).payload

    with workers.channels(2) as opened:
        assert workers.on_all(opened, body) == [b"", b"last words" * 1000]


def test_the_ranks_of_each_node_have_a_channel_of_their_own() -> None:
    group = in_process(5)
    node_of = (0, 1, 0, 1, 2)

    def body(rank: int) -> list[bytes]:
        with Channel.open(group[rank], Topology(rank, node_of)) as channel:
            return channel.all_gather(str(rank).encode())

    outcomes = workers.all_fine(workers.in_threads(5, body))
    assert outcomes == [[b"0", b"2"], [b"1", b"3"], [b"0", b"2"], [b"1", b"3"], [b"4"]]


def test_many_set_ups_with_random_delays_all_work() -> None:
    chance = random.Random(7)
    for _ in range(120):
        group = in_process(4)
        delays = [chance.random() * 0.004 for _ in range(8)]

        def body(
            rank: int, group: list[Bootstrap] = group, delays: list[float] = delays
        ) -> list[bytes]:
            time.sleep(delays[rank])
            topology = discover(group[rank])
            with Channel.open(group[rank], topology, timeout=10) as channel:
                time.sleep(delays[4 + rank])
                return channel.all_gather(bytes([rank]))

        outcomes = workers.all_fine(workers.in_threads(4, body))
        assert outcomes == [[b"\0", b"\1", b"\2", b"\3"]] * 4


def test_more_ranks_than_cores_do_not_starve_each_other() -> None:
    def body(channel: Channel) -> None:
        for _ in range(20):
            channel.exchange(b"x")

    with workers.channels(16) as opened:
        began = time.monotonic()
        workers.all_fine(workers.on_all(opened, body))
        assert time.monotonic() - began < 20


def test_wrong_arguments_are_refused_and_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_zc.group.channel.MAX_PAYLOAD", 100)
    with workers.files([b"x"]) as fds, workers.channels(2) as opened:
        channel = opened[0]
        with pytest.raises(InvalidTypeError, match="payload"):
            channel.exchange("text")  # type: ignore[arg-type]
        with pytest.raises(InvalidValueError, match="at most 100"):
            channel.exchange(bytes(101))
        with pytest.raises(InvalidValueError, match="tag"):
            channel.exchange(b"", tag="x" * 1025)
        with pytest.raises(InvalidValueError, match=r"fds=9999 .* open descriptors"):
            channel.exchange(b"", [fds[0], 9999])
        with pytest.raises(InvalidValueError, match="at most 16,384"):
            channel.exchange(b"", fds * 20000)
        with pytest.raises(InvalidValueError, match="root=2"):
            channel.broadcast(2)
        with pytest.raises(InvalidTypeError, match="bytes on the root"):
            channel.broadcast(0)
        with pytest.raises(InvalidValueError, match="timeout=-1"):
            channel.exchange(b"", timeout=-1)
        outcomes = workers.on_all(opened, lambda each: each.all_gather(b"fine"))
        assert workers.all_fine(outcomes) == [[b"fine"] * 2] * 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_can_close_its_copy_and_do_no_harm() -> None:
    with workers.channels(2) as opened:
        pid = os.fork()
        if pid == 0:  # in the child: report by the exit status alone
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    opened[0].exchange(b"")
                except ClosedError as error:
                    status = 0 if "parent of this process" in str(error) else 2
                for channel in opened:
                    channel.close()
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        outcomes = workers.on_all(opened, lambda each: each.all_gather(b"fine"))
        assert workers.all_fine(outcomes) == [[b"fine"] * 2] * 2


def test_two_groups_work_at_once() -> None:
    port = workers.free_port()

    def body(rank: int) -> list[bytes]:
        with from_tcp(4, rank, port=port, timeout=10) as everyone:
            half = everyone.split(rank // 2)
        assert half is not None
        with half, Channel.open(half, discover(half)) as channel:
            for turn in range(50):
                got = channel.all_gather(f"{rank // 2}.{turn}".encode(), tag=f"turn {turn}")
            return got

    outcomes = workers.all_fine(workers.in_threads(4, body))
    assert outcomes == [[b"0.49"] * 2] * 2 + [[b"1.49"] * 2] * 2


# Mail


def test_mail_arrives_in_order_for_each_sender_and_tag_with_its_descriptors() -> None:
    def body(channel: Channel) -> list[tuple[bytes, bytes]]:
        others = [rank for rank in channel.ranks if rank != channel.rank]
        with workers.files([f"of {channel.rank}".encode()]) as fds:
            for turn in range(3):
                for peer in others:
                    channel.send(peer, f"{channel.rank}.{turn}".encode(), fds, tag="a")
                    channel.send(peer, f"{turn}".encode(), tag="b")
        seen = []
        for tag in ("b", "a"):  # not the order in which they were sent
            for turn in range(3):
                for peer in others:
                    message = channel.recv(peer, tag=tag, timeout=10)
                    with closing([message]):
                        content = b"".join(os.pread(fd, 99, 0) for fd in message.fds)
                    seen.append((message.payload, content))
                    wanted = f"{peer}.{turn}" if tag == "a" else f"{turn}"
                    assert message.payload == wanted.encode()
                    assert content == (f"of {peer}".encode() if tag == "a" else b"")
        return seen

    with workers.channels(3) as opened:
        assert all(len(seen) == 12 for seen in workers.all_fine(workers.on_all(opened, body)))


def test_mail_and_collective_calls_do_not_disturb_each_other() -> None:
    def body(channel: Channel) -> None:
        peer = 1 - channel.rank
        if channel.rank == 0:
            channel.send(peer, b"before")
            channel.exchange(b"x", tag="one")
            channel.broadcast(0, b"news", tag="two")
            channel.send(peer, b"after", tag="late")
            assert channel.recv(peer, timeout=10).payload == b"answer"
        else:
            channel.exchange(b"x", tag="one")  # the mail before it is kept
            assert channel.recv(peer, tag="late", timeout=10).payload == b"after"
            assert channel.broadcast(0, tag="two").payload == b"news"  # passed over, and kept
            assert channel.recv(peer, timeout=10).payload == b"before"
            channel.send(peer, b"answer")
        channel.exchange(b"end")

    with workers.channels(2) as opened:
        workers.all_fine(workers.on_all(opened, body))


def test_ranks_that_fill_the_sockets_of_each_other_do_not_wait_for_ever() -> None:
    size, count = 1 << 18, 8  # far more than a socket holds

    def body(channel: Channel) -> None:
        after, before = (channel.rank + 1) % 3, (channel.rank - 1) % 3
        for _ in range(count):
            channel.send(after, bytes([channel.rank]) * size, timeout=20)
        for _ in range(count):
            assert channel.recv(before, timeout=20).payload == bytes([before]) * size

    with workers.channels(3) as opened:
        workers.all_fine(workers.on_all(opened, body))


def test_mail_that_nobody_reads_leaves_no_descriptor_behind() -> None:
    with workers.flat_descriptors(), workers.channels(2) as opened:
        with workers.files([b"x"]) as fds:
            opened[0].send(1, b"never read", fds * 5)

        def body(channel: Channel) -> list[bytes]:
            return channel.all_gather(b"y")

        assert workers.all_fine(workers.on_all(opened, body)) == [[b"y"] * 2] * 2


def test_who_waits_for_mail_of_a_rank_that_closed_or_gave_up_learns_it_at_once() -> None:
    def body(channel: Channel) -> None:
        if channel.rank == 0:
            channel.send(1, b"last")
            channel.close()
            return
        if channel.rank == 2:
            with pytest.raises(PeerTimeoutError):
                channel.recv(1, timeout=0.2)  # which closes it, and says why
            return
        assert channel.recv(0, timeout=10).payload == b"last"
        began = time.monotonic()
        with pytest.raises(PeerTimeoutError, match="rank 2 has gone") as caught:
            channel.recv(2, timeout=10)
        assert caught.value.ranks == (2,)
        assert "PeerTimeoutError" in str(caught.value)
        assert time.monotonic() - began < 5

    with workers.channels(3) as opened:
        workers.all_fine(workers.on_all(opened, body))


def test_a_sender_learns_that_the_receiver_has_gone_or_does_not_read() -> None:
    with workers.channels(3) as opened:
        opened[2].close()
        with pytest.raises(PeerTimeoutError, match="rank 2 has gone"):
            opened[1].send(2, b"x" * (1 << 20), timeout=5)
        with pytest.raises(ClosedError):
            opened[1].send(2, b"x")
        assert set(opened[0].gone()) == {1, 2}
    with workers.channels(2) as opened:
        with pytest.raises(PeerTimeoutError, match="for rank 1") as caught:
            opened[0].send(1, b"x" * (8 << 20), timeout=0.3)
        assert caught.value.ranks == (1,)
        with pytest.raises(PeerTimeoutError, match="rank 0 has gone"):
            opened[1].recv(0, timeout=5)


def test_the_ranks_that_have_gone_are_known_without_reading() -> None:
    with workers.channels(3) as opened:
        assert opened[0].gone() == ()
        opened[1].send(0, b"still to be read")
        opened[1].close()
        assert opened[0].gone() == (1,)
        assert opened[0].recv(1, timeout=5).payload == b"still to be read"
        assert opened[1].gone() == ()


def test_mail_to_nobody_is_refused() -> None:
    with workers.channels(2) as opened:
        for rank in (0, 2, -1):
            with pytest.raises(InvalidValueError, match=rf"rank={rank} .* one of \(1,\)"):
                opened[0].send(rank, b"")
            with pytest.raises(InvalidValueError, match=rf"rank={rank} .* one of \(1,\)"):
                opened[0].recv(rank)
        with pytest.raises(InvalidTypeError, match="payload"):
            opened[0].send(1, "text")  # type: ignore[arg-type]
        opened[0].close()
        with pytest.raises(ClosedError):
            opened[0].recv(1)


@pytest.mark.parametrize("size", [0, 10, 1 << 14, (1 << 14) + 1, 1 << 20])
def test_a_message_of_any_size_arrives_whole(size: int) -> None:
    """Small ones are sent in one piece with their head."""
    with workers.channels(2) as opened:
        payload = os.urandom(size)
        for gathered in workers.all_fine(workers.on_all(opened, lambda c: c.all_gather(payload))):
            assert gathered == [payload] * 2
