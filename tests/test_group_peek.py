"""Looking at what peers say before it is read."""

from __future__ import annotations

import time

import group_workers as workers

from cupy_zc.group import Channel
from cupy_zc.group.messages import Kind, Label, Outbound, parse


def test_what_peers_say_that_wait_in_an_exchange_is_known_without_reading() -> None:
    with workers.channels(3) as opened:

        def body(channel: Channel) -> list[bytes]:
            if channel.rank == 0:
                until = time.monotonic() + 5
                while len(channel.waiting("here")) < 2 and time.monotonic() < until:
                    time.sleep(0.001)
                assert channel.waiting("here") == {1: b"", 2: b"2" * 1000}
                assert channel.waiting("elsewhere") == {}
            payload = b"2" * 1000 if channel.rank == 2 else b""
            return channel.all_gather(payload, tag="here", timeout=10)

        for gathered in workers.all_fine(workers.on_all(opened, body)):
            assert gathered == [b"", b"", b"2" * 1000]
        assert opened[0].waiting("here") == {}


def test_only_a_whole_message_without_descriptors_can_be_looked_at() -> None:
    label = Label(Kind.EXCHANGE, 3, "tag")
    whole = b"".join(bytes(data) for data, _ in Outbound(label, b"abc", ())._pieces)
    assert parse(whole + b"the next one") == (label, b"abc")
    assert all(parse(whole[:length]) is None for length in range(len(whole)))
    assert parse(b"x" + whole) is None
    with_fds = Outbound(label, b"abc", (0,))._pieces
    assert parse(b"".join(bytes(data) for data, _ in with_fds)) is None
