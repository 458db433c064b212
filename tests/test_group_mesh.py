from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import group_workers as workers
import pytest

from cupy_zc.errors import (
    AgreementError,
    Error,
    MismatchError,
    PeerTimeoutError,
)
from cupy_zc.group import (
    Bootstrap,
    Channel,
    Topology,
    in_process,
    mesh,
)


@pytest.fixture(autouse=True)
def _descriptors_are_what_they_were() -> Iterator[None]:
    with workers.flat_descriptors():
        yield


class _Interrupted(Bootstrap):
    """A bootstrap that lets a test act between the exchange of addresses and the connections."""

    def __init__(self, inner: Bootstrap, act: Callable[[list[bytes]], None]) -> None:
        super().__init__(inner.rank, inner.size)
        self.inner = inner
        self.act = act

    def all_gather(
        self, payload: bytes, *, tag: str = "", timeout: float | None = None
    ) -> list[bytes]:
        offers = self.inner.all_gather(payload, tag=tag, timeout=timeout)
        if tag == "open channel":
            self.act([offer[: -mesh.TOKEN] for offer in offers])
            self.inner.barrier()
        return offers

    def _gather(self, payload: bytes, wait: object) -> list[bytes]:
        raise NotImplementedError

    def _join(self, members: object, timeout: object) -> None:
        raise NotImplementedError

    def _leave(self, *, owner: bool) -> None:
        raise NotImplementedError


def _open_all(
    n: int, act: Callable[[int, list[bytes]], None], timeout: float = 10
) -> tuple[list[Any], list[Bootstrap]]:
    """Open a channel on ``n`` threads; ``act`` is called on each before anybody connects."""
    group = in_process(n)

    def body(rank: int) -> Channel:
        spied = _Interrupted(group[rank], lambda addresses: act(rank, addresses))
        return Channel.open(spied, Topology(rank, (0,) * n), timeout=timeout)

    return workers.in_threads(n, body), group


def _hello(token: bytes, address: bytes, rank: int) -> bytes:
    return mesh._HELLO.pack(mesh._MAGIC, rank, mesh._mac(token, b"connect", address, rank))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (lambda address: _hello(b"guess" * 6, address, 1), "claims to be rank 1"),
        (lambda address: b"GET / HTTP/1.1\r\n" * 5, "does not speak this protocol"),
        (lambda address: b"short", "closed before it said who it is"),
        (lambda address: b"", "closed before it said who it is"),
    ],
)
def test_a_stranger_is_refused_and_logged_and_disturbs_nobody(
    said: Callable[[bytes], bytes], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def act(rank: int, addresses: list[bytes]) -> None:
        if rank == 2:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(addresses[0])
                stranger.sendall(said(addresses[0]))

    opened, _ = _open_all(3, act)
    for channel in workers.all_fine(opened):
        channel.close()
    assert "refused a connection to the channel" in caplog.text
    assert reason in caplog.text


def test_a_stranger_that_stays_silent_disturbs_nobody() -> None:
    with contextlib.ExitStack() as stack:

        def act(rank: int, addresses: list[bytes]) -> None:
            if rank == 0:
                stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
                stranger.connect(addresses[0])

        opened, _ = _open_all(3, act)
        outcomes = workers.on_all(workers.all_fine(opened), lambda each: each.all_gather(b"x"))
        assert workers.all_fine(outcomes) == [[b"x"] * 3] * 3
        for channel in opened:
            channel.close()


def _meet_as_rank_0(
    act: Callable[[bytes, bytes], None], timeout: float = 5
) -> dict[int, socket.socket] | Error:
    """Run the set-up of rank 0 of two; ``act(address, token)`` plays the others."""
    listener, address = mesh.listen()
    token = bytes(mesh.TOKEN)

    def body(rank: int) -> Any:
        if rank == 1:
            return act(address, token)
        wait = mesh.Wait("rank 0: open channel", timeout)
        return mesh.connect(listener, {0: address, 1: b"\0nobody"}, token, 0, wait)

    with listener:
        met, acted = workers.in_threads(2, body)
    assert not isinstance(acted, BaseException), acted
    return met  # type: ignore[no-any-return]


def test_a_rank_that_is_not_awaited_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    def act(address: bytes, token: bytes) -> None:
        for rank in (0, 7, 1, 1):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(5)
                peer.connect(address)
                peer.sendall(_hello(token, address, rank))
                answer = peer.recv(99)
                right = mesh._mac(token, b"accept", address, rank)
                assert answer == (right if rank == 1 else b"")
                if rank == 1:
                    return

    met = _meet_as_rank_0(act)
    assert isinstance(met, dict)
    met[1].close()
    assert "rank 0 is not awaited here" in caplog.text
    assert "rank 7 is not awaited here" in caplog.text


def test_a_crowd_of_strangers_is_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_MOST_STRANGERS", 2)

    def act(address: bytes, token: bytes) -> None:
        with contextlib.ExitStack() as stack:
            crowd = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
            for stranger in crowd:
                stranger.settimeout(5)
                stranger.connect(address)
            assert crowd[2].recv(1) == b""

    met = _meet_as_rank_0(act, timeout=0.5)
    assert isinstance(met, PeerTimeoutError)
    assert met.ranks == (1,)
    assert "too many strangers" in caplog.text


def test_a_rank_that_ends_during_its_set_up_is_named_at_once() -> None:
    def meet(ends: Callable[[bytes], None]) -> None:
        listener, address = mesh.listen()
        with listener:
            wait = mesh.Wait("rank 0: open channel", 10)
            ends(address)
            with pytest.raises(PeerTimeoutError, match=r"rank 1 has gone .it ended its") as info:
                mesh.connect(listener, {0: address, 1: b"", 2: b""}, bytes(32), 0, wait)
            assert info.value.ranks == (1,)

    with contextlib.ExitStack() as stack:

        def before_the_answer(address: bytes) -> None:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(address)
                peer.sendall(_hello(bytes(32), address, 1))

        def after_the_answer(address: bytes) -> None:
            peer = stack.enter_context(socket.socket(socket.AF_UNIX))
            peer.connect(address)
            peer.sendall(_hello(bytes(32), address, 1))
            peer.shutdown(socket.SHUT_WR)

        meet(before_the_answer)
        meet(after_the_answer)


def test_another_user_is_refused_by_the_listener(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_uid", lambda _: os.geteuid() + 1)

    def act(address: bytes, token: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(5)
            peer.connect(address)
            assert peer.recv(1) == b""

    met = _meet_as_rank_0(act, timeout=0.5)
    assert isinstance(met, PeerTimeoutError)
    assert f"comes from user {os.geteuid() + 1}" in caplog.text


def _meet_as_rank_1(act: Callable[[socket.socket], None], token: bytes = bytes(32)) -> Any:
    """Run the set-up of rank 1 of two; ``act(listener)`` plays rank 0."""
    false, there = mesh.listen()
    listener, here = mesh.listen()

    def body(rank: int) -> Any:
        if rank == 0:
            return act(false)
        wait = mesh.Wait("rank 1: open channel", 2)
        return mesh.connect(listener, {0: there, 1: here}, token, 1, wait)

    false.settimeout(5)
    with false, listener:
        acted, met = workers.in_threads(2, body)
    assert not isinstance(acted, BaseException), acted
    return met


def test_a_listener_of_another_user_is_an_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh, "_uid", lambda _: os.geteuid() + 1)
    outcomes, _ = _open_all(3, lambda *_: None, timeout=1)
    texts = {str(outcome) for outcome in outcomes}
    assert all(isinstance(outcome, AgreementError) for outcome in outcomes)
    assert len(texts) == 1
    assert "open channel failed on rank" in texts.pop()
    met = _meet_as_rank_1(lambda _: None)
    assert isinstance(met, MismatchError)
    assert f"rank 0 runs as user {os.geteuid() + 1} and this rank as user" in str(met)


def test_a_listener_without_the_token_is_found_out() -> None:
    def act(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.recv(99)
            connection.sendall(bytes(32))

    met = _meet_as_rank_1(act)
    assert isinstance(met, MismatchError)
    assert "rank 0 does not know the token" in str(met)


def test_an_answer_may_come_in_pieces() -> None:
    def act(listener: socket.socket) -> None:
        address = listener.getsockname()
        answer = mesh._mac(bytes(32), b"accept", address, 1)
        with listener.accept()[0] as connection:
            connection.recv(99)
            connection.sendall(answer[:10])
            time.sleep(0.05)
            connection.sendall(answer[10:])

    met = _meet_as_rank_1(act)
    assert list(met) == [0]
    met[0].close()


def test_a_listener_that_hangs_up_is_named() -> None:
    def act(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.recv(99)

    met = _meet_as_rank_1(act)
    assert isinstance(met, PeerTimeoutError)
    assert "it refused this rank, or ended" in str(met)


def test_a_listener_that_went_away_is_named() -> None:
    listener, here = mesh.listen()
    gone, there = mesh.listen()
    gone.close()
    with listener, pytest.raises(PeerTimeoutError, match="refused this rank, or ended") as info:
        mesh.connect(listener, {0: there, 1: here}, bytes(32), 1, mesh.Wait("rank 1", 5))
    assert info.value.ranks == (0,)


def test_a_full_queue_is_tried_again_until_there_is_room() -> None:
    with contextlib.ExitStack() as stack:

        def act(listener: socket.socket) -> None:
            time.sleep(0.2)
            for _ in range(2):  # those who filled the queue
                listener.accept()[0].close()
            connection = stack.enter_context(listener.accept()[0])
            connection.recv(99)
            connection.sendall(mesh._mac(bytes(32), b"accept", address, 1))

        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        address = b"\0cupy-zc-test-" + os.urandom(8).hex().encode()
        listener.bind(address)
        listener.listen(1)
        listener.settimeout(5)
        for _ in range(2):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(address)
        own, here = mesh.listen()
        stack.callback(own.close)

        def body(rank: int) -> Any:
            if rank == 0:
                return act(listener)
            wait = mesh.Wait("rank 1", 5)
            return mesh.connect(own, {0: address, 1: here}, bytes(32), 1, wait)

        met = workers.all_fine(workers.in_threads(2, body))[1]
        met[0].close()


def test_a_rank_that_fails_to_set_up_fails_it_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = mesh.connect

    def connect(listener: Any, addresses: Any, token: Any, rank: int, wait: Any) -> Any:
        if rank == 1:
            for connection in real(listener, addresses, token, rank, wait).values():
                connection.close()
            raise OSError(24, "Too many open files")
        return real(listener, addresses, token, rank, wait)

    monkeypatch.setattr("cupy_zc.group.channel.connect", connect)
    outcomes, _ = _open_all(3, lambda *_: None)
    assert {type(outcome) for outcome in outcomes} == {AgreementError}
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert outcomes[0].rank == 1
    assert isinstance(outcomes[1].__cause__, OSError)


def test_a_rank_that_never_opens_the_channel_is_named() -> None:
    group = in_process(3)

    def body(rank: int) -> tuple[int, ...]:
        with pytest.raises(PeerTimeoutError, match="for rank 2") as info:
            Channel.open(group[rank], Topology(rank, (0, 0, 0)), timeout=0.3)
        return info.value.ranks

    assert workers.all_fine(workers.in_threads(2, body)) == [(2,), (2,)]
