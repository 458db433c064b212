"""Looking at what peers say before it is read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import group_workers as workers
import pytest

from cupy_zc.group import Channel, closing
from cupy_zc.group.messages import Kind, Label, Outbound, parse


@pytest.fixture(autouse=True)
def _descriptors_are_what_they_were() -> Iterator[None]:
    with workers.flat_descriptors():
        yield


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


def test_a_message_can_be_looked_at_as_soon_as_all_that_it_says_is_there() -> None:
    label = Label(Kind.EXCHANGE, 3, "tag")
    for fds in ((), (0,)):
        whole = b"".join(bytes(data) for data, _ in Outbound(label, b"abc", fds)._pieces)
        said = len(whole) - len(fds)
        assert parse(whole + b"the next one") == parse(whole[:said]) == (label, b"abc")
        assert all(parse(whole[:length]) is None for length in range(said))
        assert parse(b"x" + whole) is None


def test_descriptors_of_a_message_that_was_looked_at_arrive_once() -> None:
    with workers.channels(2) as opened, workers.files([b"content"]) as fds:

        def body(channel: Channel) -> list[bytes]:
            if channel.rank == 0:
                until = time.monotonic() + 5
                while not channel.waiting("here") and time.monotonic() < until:
                    time.sleep(0.001)
                for _ in range(3):
                    assert channel.waiting("here") == {1: b"says"}
            messages = channel.exchange(b"says", fds, tag="here", timeout=10)
            with closing(messages):
                return [os.pread(fd, 99, 0) for each in messages for fd in each.fds]

        for told in workers.all_fine(workers.on_all(opened, body)):
            assert told == [b"content"]
