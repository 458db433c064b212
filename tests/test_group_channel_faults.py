from __future__ import annotations

import contextlib
import re
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import group_workers as workers
import pytest

from cupy_zc.errors import (
    ClosedError,
    Error,
    MismatchError,
    PeerTimeoutError,
)
from cupy_zc.group import (
    Channel,
    messages,
)


@pytest.fixture(autouse=True)
def _descriptors_are_what_they_were() -> Iterator[None]:
    with workers.flat_descriptors():
        yield


def test_different_tags_are_a_mismatch_on_every_rank_and_leave_the_channel_usable() -> None:
    def body(channel: Channel) -> str:
        with workers.files([b"x"]) as fds, pytest.raises(MismatchError) as info:
            channel.exchange(b"", fds, tag="register" if channel.rank else "empty")
        assert channel.all_gather(b"y") == [b"y"] * 3
        return str(info.value)

    with workers.channels(3) as opened:
        said = workers.all_fine(workers.on_all(opened, body))
    assert len(set(said)) == 1
    assert "rank 0 is at step 1, exchange('empty')" in said[0]
    assert "ranks 1, 2 are at step 1, exchange('register')" in said[0]


def test_a_lost_message_is_a_mismatch_on_every_rank_naming_both_steps() -> None:
    def body(channel: Channel) -> str:
        channel.exchange(b"", tag="before")
        if channel.rank == 1:
            channel._step += 1  # as if it had been through a step that the others did not see
        with workers.files([b"x"]) as fds, pytest.raises(MismatchError) as info:
            channel.exchange(b"", fds, tag="same", timeout=10)
        assert channel.closed
        return str(info.value)

    with workers.channels(3) as opened:
        began = time.monotonic()
        said = workers.all_fine(workers.on_all(opened, body))
        assert time.monotonic() - began < 5
    for text in said:
        assert "ranks 0, 2 are at step 2, exchange('same')" in text
        assert "rank 1 is at step 3, exchange('same')" in text
        assert "a message was lost" in text


def test_a_message_lost_on_the_way_is_a_mismatch_on_every_rank() -> None:
    with workers.channels(3) as opened:
        real = opened[0]._streams._sockets[2]

        class _Lossy:
            lost = False

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def sendmsg(self, data: Sequence[memoryview], *rest: Any) -> int:
                if not self.lost and len(data[0]) > 8:  # the head of a message without payload
                    self.lost = True
                    return len(data[0])
                return real.sendmsg(data, *rest)

        opened[0]._streams._sockets[2] = _Lossy()  # type: ignore[assignment]

        def body(channel: Channel) -> str:
            with pytest.raises(MismatchError) as info:
                for _ in range(3):
                    channel.exchange(b"", timeout=10)
            return str(info.value)

        said = workers.all_fine(workers.on_all(opened, body))
    for text in said:
        assert "step 1" in text
        assert "step 2" in text


def test_a_broadcast_with_another_tag_is_a_mismatch_that_the_peers_learn() -> None:
    def body(channel: Channel) -> str:
        if channel.rank == 0:
            with workers.files([b"x"]) as fds:
                channel.broadcast(0, b"", fds, tag="one")
            with pytest.raises(MismatchError) as info:
                channel.exchange(b"", timeout=10)
        else:
            with pytest.raises(MismatchError) as info:
                channel.broadcast(0, tag="other", timeout=10)
        return str(info.value)

    with workers.channels(3) as opened:
        said = workers.all_fine(workers.on_all(opened, body))
    assert "rank 0 is at step 1, broadcast('one')" in said[2]
    assert "rank 2 is at step 1, broadcast('other')" in said[2]
    assert re.search("rank [12] gave up: the ranks are not at the same call", said[0])


def test_another_call_is_a_mismatch_on_every_rank() -> None:
    def body(channel: Channel) -> str:
        with pytest.raises(MismatchError) as info:
            if channel.rank == 2:
                channel.broadcast(0, timeout=10)
            else:
                channel.exchange(b"", timeout=10)
        return str(info.value)

    with workers.channels(3) as opened:
        said = workers.all_fine(workers.on_all(opened, body))
    assert "rank 0 is at step 1, exchange('')" in said[2]
    assert all("rank 2" in text and "broadcast" in text for text in said)


def test_a_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    def body(channel: Channel) -> tuple[int, ...]:
        if channel.rank in (1, 2):
            time.sleep(0.6)
            return ()
        with pytest.raises(PeerTimeoutError, match=r"waited 0\.3 s for ranks 1, 2") as info:
            channel.exchange(b"x", tag="late", timeout=0.3)
        with pytest.raises(ClosedError, match="this channel is closed"):
            channel.exchange(b"")
        return info.value.ranks

    with workers.channels(4) as opened:
        assert workers.all_fine(workers.on_all(opened, body)) == [(1, 2), (), (), (1, 2)]


def test_a_rank_that_comes_after_the_others_gave_up_learns_why() -> None:
    def body(channel: Channel) -> None:
        if channel.rank == 1:
            time.sleep(0.5)
            with pytest.raises(
                PeerTimeoutError,
                match=r"rank 0 has gone \(it gave up with PeerTimeoutError: rank 0",
            ) as info:
                channel.exchange(bytes(4 << 20), timeout=10)
            assert info.value.ranks == (0,)
        else:
            with pytest.raises(PeerTimeoutError, match="for rank 1"):
                channel.exchange(b"", timeout=0.2)

    with workers.channels(2) as opened:
        workers.all_fine(workers.on_all(opened, body))


def test_a_root_whose_peers_left_says_so() -> None:
    def body(channel: Channel) -> None:
        if channel.rank == 1:
            channel.close()
        else:
            time.sleep(0.1)
            with pytest.raises(PeerTimeoutError, match="rank 1 has gone"):
                channel.broadcast(0, b"x")

    with workers.channels(2) as opened:
        workers.all_fine(workers.on_all(opened, body))


def test_a_rank_that_closes_is_named_at_once() -> None:
    def body(channel: Channel) -> tuple[int, ...]:
        if channel.rank == 1:
            time.sleep(0.1)
            channel.close()
            channel.close()
            return ()
        with pytest.raises(PeerTimeoutError, match="rank 1 has gone") as info:
            channel.exchange(b"x", timeout=20)
        return info.value.ranks

    with workers.channels(2) as opened:
        began = time.monotonic()
        assert workers.all_fine(workers.on_all(opened, body)) == [(1,), ()]
        assert time.monotonic() - began < 5


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_process_is_named_at_once() -> None:
    began = time.monotonic()
    outcomes = workers.in_processes(
        "fork", 3, workers.be_killed_between_exchanges, workers.free_port(), 1, killed=[1]
    )
    assert time.monotonic() - began < 10
    assert outcomes.pop(1) is None
    for kind, name, text, ranks in outcomes:
        assert (kind, name) == ("error", "PeerTimeoutError")
        # Rank 0 or 2 may see the other one give up a moment before it looks at rank 1 itself.
        assert "rank 1 has gone" in text
        assert ranks


def test_a_long_wait_names_the_rank(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cupy_zc.group.waiting.WARN_AFTER", 0.1)

    def body(channel: Channel) -> None:
        time.sleep(0.3 * channel.rank)
        channel.exchange(b"", tag="slow")

    with workers.channels(2) as opened:
        workers.all_fine(workers.on_all(opened, body))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "rank 0: step 1, exchange('slow'): has waited" in caplog.text
    assert "for rank 1" in caplog.text


@contextlib.contextmanager
def _first_reads_what_second_sends(said: bytes) -> Iterator[Channel]:
    with workers.channels(2) as opened:
        opened[1]._streams._sockets[0].sendall(said)
        yield opened[0]


def _head(**changes: int) -> bytes:
    values = {"kind": 1, "step": 1, "tag": 0, "payload": 0, "fds": 0} | changes
    return messages._HEADER.pack(messages._MAGIC, *values.values())


@pytest.mark.parametrize(
    "said",
    [
        b"garbage" * 10,
        _head(kind=9),
        _head(tag=2000),
        _head(payload=1 << 40),
        _head(fds=1 << 20),
    ],
)
def test_what_is_no_message_is_refused(said: bytes) -> None:
    with _first_reads_what_second_sends(said) as channel:
        with pytest.raises(MismatchError, match=r"rank 1 sent .* no message of this version"):
            channel.exchange(b"")
        assert channel.closed


def test_announced_descriptors_must_come() -> None:
    with (
        _first_reads_what_second_sends(_head(fds=2) + b"\0") as channel,
        pytest.raises(MismatchError, match="rank 1 sent 0 descriptors where 2 were announced"),
    ):
        channel.exchange(b"")


@pytest.mark.parametrize("said", [_head(payload=100) + b"x" * 10, _head(fds=3), _head()[:7]])
def test_a_rank_that_dies_in_the_middle_of_a_message_is_gone(said: bytes) -> None:
    with workers.channels(2) as opened:
        opened[1]._streams._sockets[0].sendall(said)
        opened[1].close()
        with pytest.raises(PeerTimeoutError, match="rank 1 has gone"):
            opened[0].broadcast(1)


def test_descriptors_of_a_torn_message_are_closed() -> None:
    with workers.channels(2) as opened, workers.files([b"x"]) as fds:
        whole = messages.Outbound(
            messages.Label(messages.Kind.BROADCAST, 1, ""), bytes(1 << 22), fds * 300
        )
        assert not whole.advance(opened[1]._streams._sockets[0])
        assert whole.torn
        opened[1].close()
        before = workers.open_descriptors()
        with pytest.raises(PeerTimeoutError, match="rank 1 has gone"):
            opened[0].broadcast(1)
        assert workers.open_descriptors() < before  # its own socket went as well


def test_a_stream_torn_by_a_deadline_is_closed_without_a_second_message() -> None:
    with workers.channels(2) as opened:
        with pytest.raises(PeerTimeoutError, match="for rank 1"):
            opened[0].broadcast(0, bytes(8 << 20), timeout=0.2)
        with pytest.raises(PeerTimeoutError, match=r"rank 0 has gone \(closed"):
            opened[1].broadcast(0)


def test_too_many_descriptors_for_this_process_is_an_error_with_the_remedy() -> None:
    left, right = socket.socketpair()
    with left, right, workers.files([b"x"]) as fds:
        label = messages.Label(messages.Kind.EXCHANGE, 1, "")
        assert messages.Outbound(label, b"", fds * 50).advance(left)
        inbound = messages.Inbound(1)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(fds) + 20, hard))
        try:
            with pytest.raises(Error, match=r"of 50 descriptors from rank 1 .*ulimit -n"):
                inbound.advance(right)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            inbound.close()


def test_a_system_that_refuses_to_send_is_an_error_with_the_remedy() -> None:
    class _Refusing:
        def __init__(self, real: socket.socket) -> None:
            self.real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def sendmsg(self, *_: Any) -> int:
            raise OSError(109, "Too many references: cannot splice")

    with workers.channels(2) as opened:
        opened[0]._streams._sockets[1] = _Refusing(opened[0]._streams._sockets[1])  # type: ignore[assignment]
        with pytest.raises(Error, match=r"could not send to rank 1: .*references.*ulimit -n"):
            opened[0].exchange(b"")
        assert opened[0].closed
