from __future__ import annotations

import contextlib
import re
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import group_workers as workers
import pytest

from cupy_zc.errors import (
    InvalidValueError,
    MismatchError,
    PeerTimeoutError,
)
from cupy_zc.group import (
    tcp_store,
    wire,
)
from cupy_zc.group.tcp_store import Store


@pytest.fixture(autouse=True)
def _descriptors_are_what_they_were() -> Iterator[None]:
    with workers.flat_descriptors():
        yield


HELLO = wire.frame(wire.Kind.HELLO, wire.HELLO.pack(2, 1, bytes(wire.NONCE)))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not those of a cupy-zc store"),
        (wire.frame(wire.Kind.HELLO, b"x" * 5000), "5,000 bytes, where 4,096"),
        (wire.frame(wire.Kind.GATHER, b"x"), "GATHER out of turn"),
        (HELLO + HELLO, "HELLO out of turn"),
        (2 * wire.frame(wire.Kind.HELLO, wire.HELLO.pack(9, 1, bytes(32))), "2 ranks and rank 1"),
        (HELLO[:4] + b"\x63" + bytes(8), "unknown kind 99"),
        (wire.frame(wire.Kind.HELLO, wire.HELLO.pack(2, 2, bytes(32))), "no rank 2 among 2"),
    ],
)
def test_garbage_is_refused_and_disturbs_nobody(
    said: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with workers.half_a_group() as port:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(said)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while data := stranger.recv(1 << 12):
                    answer += data
        assert b"CZS2\x05" in answer
        assert any(re.search(reason, record.getMessage()) for record in caplog.records)


def test_a_stranger_that_resets_its_connection_disturbs_nobody() -> None:
    with workers.half_a_group() as port:
        stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
        stranger.sendall(HELLO)
        assert stranger.recv(99)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()


def test_an_answer_that_cannot_be_sent_now_is_sent_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = socket.socket.send
    refused: list[socket.socket] = []

    def send(connection: socket.socket, data: memoryview) -> int:
        if connection not in refused:
            refused.append(connection)
            raise BlockingIOError
        return real(connection, data)

    monkeypatch.setattr(socket.socket, "send", send, raising=False)
    group = workers.over_tcp(2)
    assert len(refused) == 2
    for member in reversed(group):
        member.close()


def test_a_rank_to_which_no_answer_can_be_sent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    group = workers.over_tcp(3)
    there = group[1]._connection.raw.getsockname()  # type: ignore[attr-defined]
    real = socket.socket.send

    def send(connection: socket.socket, data: memoryview) -> int:
        if connection.getpeername() == there:
            raise ConnectionResetError
        return real(connection, data)

    monkeypatch.setattr(socket.socket, "send", send, raising=False)

    def body(rank: int) -> None:
        if rank == 1:
            with pytest.raises(PeerTimeoutError, match="the store is closed"):
                group[1].barrier(timeout=10)
            return
        group[rank].barrier(timeout=10)  # its part was there
        # Rank 0 closes the store at its error, which rank 2 may find before it asks.
        said = "rank 1 has gone" if rank == 0 else "rank 1 has gone|the store is closed"
        with pytest.raises(PeerTimeoutError, match=said):
            group[rank].barrier(timeout=10)

    workers.all_fine(workers.in_threads(3, body))


def test_a_store_that_does_not_end_is_left_behind_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_store, "_LINGER", 0.1)
    monkeypatch.setattr(tcp_store, "_PATIENCE", 0.05)
    monkeypatch.setattr(Store, "_turn", lambda _: time.sleep(0.05))
    store = Store("127.0.0.1", 0, 2, b"")
    store.close()
    assert "did not end; its thread is left behind" in caplog.text
    monkeypatch.undo()
    store._thread.join(5)
    assert not store._thread.is_alive()


def test_a_member_that_talks_garbage_counts_as_gone(caplog: pytest.LogCaptureFixture) -> None:
    group = workers.over_tcp(2)
    group[1]._connection.raw.sendall(b"garbage that is long enough")  # type: ignore[attr-defined]
    with pytest.raises(PeerTimeoutError, match="rank 1 has gone"):
        group[0].barrier(timeout=10)
    assert workers.logged(caplog, "the store refuses rank 1")
    group[1].close()


def test_strangers_who_say_nothing_are_sent_away(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_store, "_PATIENCE", 0.2)
    monkeypatch.setattr(tcp_store, "_MOST_STRANGERS", 3)
    port = workers.free_port()
    store = Store("127.0.0.1", port, 2, b"")
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            for _ in range(5)
        ]
        assert [stranger.recv(1) for stranger in strangers] == [b""] * 5
    store.close()
    assert workers.logged(caplog, "did not join in time")
    assert workers.logged(caplog, "too many strangers")


def test_a_store_that_runs_out_of_descriptors_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class _Listener:
        def __init__(self, real: socket.socket) -> None:
            self.real = real
            self.failures = 2

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(24, "Too many open files")
            return self.real.accept()

    real = socket.create_server
    monkeypatch.setattr("socket.create_server", lambda *a, **k: _Listener(real(*a, **k)))
    for member in reversed(workers.over_tcp(2)):
        member.close()
    assert workers.logged(caplog, "Too many open files")


def test_a_store_of_many_ranks_raises_the_limit_of_descriptors_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [(1024, 1 << 20)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    for size in (500, 4096):
        Store("127.0.0.1", 0, size, b"").close()
    ((soft, hard),) = limits[1:]
    assert 4096 < soft < 5000
    assert hard == 1 << 20
    limits.append((1024, 4096))
    with pytest.raises(InvalidValueError, match=r"size=4096.*ranks at most.*4096 desc.*ulimit -n"):
        Store("127.0.0.1", 0, 4096, b"")


def test_an_answer_waits_once_for_all_ranks_that_do_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not once for each: rank 0 would need the square of what a rank gets."""
    size = 4
    group = workers.over_tcp(size)
    store = group[0]._store  # type: ignore[attr-defined]
    held = threading.Event()
    real = Store._write
    monkeypatch.setattr(Store, "_write", lambda *a: real(*a) if held.is_set() else None)
    calls = [
        threading.Thread(target=lambda each=each: each.all_gather(bytes(1000))) for each in group
    ]
    for call in calls:
        call.start()
    until = time.monotonic() + 10
    while sum(len(each.outbox) for each in store._members.values()) < size:
        assert time.monotonic() < until
        time.sleep(0.01)
    waiting = {id(each.outbox[0].obj) for each in store._members.values()}
    held.set()
    for call in calls:
        call.join(10)
    for member in reversed(group):
        member.close()
    assert len(waiting) == 1


def test_ranks_that_leave_are_told_to_those_who_wait_alone_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[bytes] = []
    real = tcp_store.frame
    monkeypatch.setattr(tcp_store, "frame", lambda kind, *a: told.append(kind) or real(kind, *a))
    group = workers.over_tcp(6)
    waits = threading.Thread(target=lambda: workers.in_threads(1, lambda _: group[1].barrier()))
    waits.start()
    for member in group[:1:-1]:
        while len(group[0]._store._waiting) < 1 and wire.Kind.GONE not in told:  # type: ignore[attr-defined]
            time.sleep(0.01)
        member.close()
    waits.join(10)
    group[1].close()
    group[0].close()
    assert told.count(wire.Kind.GONE) == 1


def test_a_store_that_fails_is_closed_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = workers.over_tcp(2)

    def fail(*_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Store, "_gather", fail)

    def body(rank: int) -> None:
        with pytest.raises(PeerTimeoutError, match="the store is closed"):
            group[rank].barrier(timeout=5)

    workers.all_fine(workers.in_threads(2, body))
    assert "failed; its ranks find it closed" in caplog.text


def test_a_store_that_does_not_read_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    group = workers.over_tcp(2)
    monkeypatch.setattr(Store, "_read", lambda *_: time.sleep(0.05))
    with pytest.raises(PeerTimeoutError, match="its store does not read") as info:
        group[1].all_gather(bytes(64 << 20), timeout=0.3)
    assert info.value.ranks == (0,)
    monkeypatch.undo()
    group[0].close()


def test_an_answer_that_makes_no_sense_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    group = workers.over_tcp(2)
    monkeypatch.setattr(tcp_store, "pack_offers", lambda _: b"short")

    def body(rank: int) -> None:
        with pytest.raises(MismatchError, match="does not make sense: a list of items"):
            group[rank].barrier(timeout=5)
        assert group[rank].closed

    workers.all_fine(workers.in_threads(2, body))


def test_the_last_answer_is_delivered_or_the_loss_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_store, "_LINGER", 0.3)
    group = workers.over_tcp(2)
    talk = group[1]._connection  # type: ignore[attr-defined]
    talk.send(wire.Kind.GATHER, b"\0\0" + bytes(32 << 20), 5)  # and never reads the answer
    with contextlib.suppress(MismatchError):
        group[0].all_gather(b"", timeout=5)
    group[0].close()
    group[1].close()
    assert workers.logged(caplog, "the store ended before rank 1 read the last answer")
