from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import group_workers as workers
import pytest

from cupy_zc.errors import (
    AgreementError,
    InvalidValueError,
    MismatchError,
    PeerTimeoutError,
)
from cupy_zc.group import (
    from_tcp,
    wire,
)
from cupy_zc.group.tcp_store import Store


@pytest.fixture(autouse=True)
def _descriptors_are_what_they_were() -> Iterator[None]:
    with workers.flat_descriptors():
        yield


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_meet_however_they_were_started(method: str) -> None:
    port = workers.free_port()
    outcomes = workers.in_processes(method, 4, workers.everything_over_tcp, port)
    assert outcomes == [("value", workers.expected(rank, 4)) for rank in range(4)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_process_is_named_by_the_others(victim: int) -> None:
    port = workers.free_port()
    outcomes = workers.in_processes(
        "fork", 3, workers.be_killed_between_gathers, port, victim, killed=[victim]
    )
    assert outcomes.pop(victim) is None
    for kind, name, text, ranks in outcomes:
        assert (kind, name, ranks) == ("error", "PeerTimeoutError", (victim,))
        assert f"rank {victim} has gone" in text


def test_ranks_may_come_in_any_order_and_at_any_time() -> None:
    chance = random.Random(3)
    port = workers.free_port()
    for _ in range(25):  # one group after the other at one port, as a program does
        delays = [chance.random() * 0.03 for _ in range(3)]

        def body(rank: int, delays: list[float] = delays) -> list[bytes]:
            time.sleep(delays[rank])
            with from_tcp(3, rank, port=port, timeout=10) as bootstrap:
                return bootstrap.all_gather(bytes([rank]))

        assert workers.all_fine(workers.in_threads(3, body)) == [[b"\0", b"\1", b"\2"]] * 3


def test_groups_follow_each_other_without_a_pause() -> None:
    port = workers.free_port()

    def body(rank: int) -> None:
        for _ in range(20):
            with from_tcp(3, rank, port=port, timeout=10) as bootstrap:
                bootstrap.barrier()

    workers.all_fine(workers.in_threads(3, body))


def test_a_rank_that_never_joins_is_named() -> None:
    port = workers.free_port()

    def body(rank: int) -> tuple[int, ...]:
        with pytest.raises(PeerTimeoutError, match="for rank 2") as info:
            from_tcp(3, rank, port=port, timeout=0.6)
        return info.value.ranks

    assert workers.all_fine(workers.in_threads(2, body)) == [(2,), (2,)]


def test_when_rank_0_gives_up_the_others_learn_for_whom_it_waited() -> None:
    group = workers.over_tcp(3)

    def body(rank: int) -> tuple[int, ...]:
        said = "rank 0 gave up waiting for rank 2" if rank else "for rank 2"
        with pytest.raises(PeerTimeoutError, match=said) as info:
            group[rank].barrier(timeout=20 if rank else 0.3)
        return info.value.ranks

    assert workers.all_fine(workers.in_threads(2, body)) == [(2,), (2,)]
    group[2].close()


def test_a_rank_that_comes_while_the_group_ends_tries_again() -> None:
    group = workers.over_tcp(3)
    group[1].close()
    port = group[0]._store.port  # type: ignore[attr-defined]
    with pytest.raises(PeerTimeoutError, match="the group at this address is ending"):
        from_tcp(3, 1, port=port, timeout=0.3)
    for member in reversed(group):
        member.close()


def test_without_rank_0_the_error_says_why() -> None:
    with pytest.raises(PeerTimeoutError, match=r"rank 0 \(ConnectionRefusedError") as info:
        from_tcp(2, 1, port=workers.free_port(), timeout=0.2)
    assert info.value.ranks == (0,)


def test_a_port_that_takes_connections_and_is_silent_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(PeerTimeoutError, match="does not answer"),
    ):
        from_tcp(2, 1, port=silent.getsockname()[1], timeout=0.3)


def test_a_port_of_another_program_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1 << 12)
                connection.sendall(b"220 mail.example.org ESMTP\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(MismatchError, match="another program is there"):
            from_tcp(2, 1, port=other.getsockname()[1], timeout=5)
        thread.join(5)


def test_a_socket_that_connected_to_itself_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect_to_itself(*_: Any, **__: Any) -> socket.socket:
        odd = socket.socket()
        odd.bind(("127.0.0.1", 0))
        odd.connect(odd.getsockname())
        return odd

    monkeypatch.setattr("socket.create_connection", connect_to_itself)
    with pytest.raises(PeerTimeoutError, match="nobody listens there"):
        from_tcp(2, 1, port=workers.free_port(), timeout=0.2)


def test_an_address_that_cannot_be_listened_at_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(InvalidValueError, match=r"free port.*CUPYX_DISTRIBUTED_PORT"),
    ):
        from_tcp(2, 0, port=taken.getsockname()[1])
    with pytest.raises(InvalidValueError, match="host:port"):
        from_tcp(2, 0, host="203.0.113.1", port=workers.free_port())


def test_a_store_that_cannot_be_opened_for_a_split_fails_it_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = workers.over_tcp(4)

    def refuse(*_: Any) -> None:
        raise InvalidValueError("from_tcp", "host:port", "here", "a free port")

    monkeypatch.setattr("cupy_zc.group.bootstrap_tcp.Store", refuse)

    def body(rank: int) -> str:
        with pytest.raises(AgreementError, match=r"failed on rank 0.*\(2 of 4 ranks") as info:
            group[rank].split(rank % 2)
        group[rank].barrier()
        return str(info.value)

    assert len(set(workers.all_fine(workers.in_threads(4, body)))) == 1
    for member in reversed(group):
        member.close()


@pytest.mark.parametrize(
    ("size", "rank", "secret", "reason"),
    [
        (3, 1, "word", "this group has 2 ranks and rank 1 was told 3"),
        (2, 1, "other", "has another secret"),
        (2, 1, "", "has another secret"),
    ],
)
def test_who_does_not_belong_is_refused_with_a_reason(
    size: int,
    rank: int,
    secret: str,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with workers.half_a_group("word") as port:
        with pytest.raises(MismatchError, match=reason):
            from_tcp(size, rank, port=port, secret=secret, timeout=5)
        assert workers.logged(caplog, reason)


def test_a_rank_that_is_already_here_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    group = workers.over_tcp(2)
    port = group[0]._store.port  # type: ignore[attr-defined]
    with pytest.raises(MismatchError, match="rank 1 is already here, from 127"):
        from_tcp(2, 1, port=port, timeout=5)
    assert workers.logged(caplog, "rank 1 is already here")
    outcomes = workers.in_threads(2, lambda r: group[r].all_gather(bytes([r])))
    assert workers.all_fine(outcomes) == [[b"\0", b"\1"]] * 2
    for member in reversed(group):
        member.close()


def test_a_store_without_the_secret_is_found_out() -> None:
    port = workers.free_port()
    store = Store("127.0.0.1", port, 2, b"")
    with pytest.raises(MismatchError, match="another secret"):
        from_tcp(2, 1, port=port, secret="word", timeout=5)
    store.close()
    store.close()


def test_a_false_store_that_welcomes_everybody_is_found_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as false:

        def serve() -> None:
            connection, _ = false.accept()
            with connection:
                connection.recv(1 << 12)
                connection.sendall(wire.frame(wire.Kind.CHALLENGE, bytes(wire.NONCE)))
                connection.recv(1 << 12)
                connection.sendall(wire.frame(wire.Kind.WELCOME, bytes(32)))
                connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(MismatchError, match="store does not know the secret"):
            from_tcp(2, 1, port=false.getsockname()[1], secret="word", timeout=5)
        thread.join(5)
