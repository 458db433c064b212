"""What ranks say to each other at an agreed point, and how it is carried out on all or on none.

An agreed point is one exchange; where it brought news, votes follow:

1. Each rank says which segments and lanes it released, which segments are new, and hands over their
   descriptors.
   A rank that failed in preparing this says so instead, and all ranks raise its error.
2. Released segments are taken out of multicast windows on all ranks, and then those of peers are
   unmapped, after the device has finished what may use them. This is not undone when something
   fails later, for nobody needs them; a rank repeats its releases until a vote has said that all
   peers carried them out, and to carry one out twice does nothing.
3. New segments of peers are mapped. If that fails anywhere it is undone everywhere.

Descriptors are closed in every case.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

from ..driver.api import Driver, SegmentHandle
from ..errors import Error
from ..group import Channel, Message, Transaction, closing
from .multicast import Multicast
from .window import SegmentName, SegmentOffer, Windows

__all__ = ["News", "carry_out"]


@dataclass(frozen=True, slots=True)
class News:
    """What one rank says at an agreed point."""

    #: False where the rank could not prepare its part; the rest is empty then.
    prepared: bool = True
    released: tuple[SegmentName, ...] = ()
    #: Arenas of the rank that are gone.
    retired: tuple[int, ...] = ()
    offers: tuple[SegmentOffer, ...] = ()
    #: (arena, offset) of the array that is being registered; None where it is not one array.
    array: tuple[int, int] | None = None
    #: Lanes of graphs that are gone on the rank.
    lanes: tuple[int, ...] = ()
    #: What the call is, as plain data, where ranks compare that.
    call: tuple[Any, ...] = ()

    def to_bytes(self) -> bytes:
        """For the way through a channel."""
        return json.dumps(
            [
                self.prepared,
                [[name.arena, name.offset, name.generation] for name in self.released],
                self.retired,
                [
                    [o.name.arena, o.name.offset, o.name.generation, o.size, o.arena_size]
                    for o in self.offers
                ],
                self.array,
                self.lanes,
                self.call,
            ]
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> News:
        """The inverse of :meth:`to_bytes`."""
        prepared, released, retired, offers, array, lanes, call = json.loads(data)
        return cls(
            prepared,
            tuple(SegmentName(*name) for name in released),
            tuple(retired),
            tuple(SegmentOffer(SegmentName(*offer[:3]), *offer[3:]) for offer in offers),
            None if array is None else (array[0], array[1]),
            tuple(lanes),
            tuple(call),
        )


def carry_out(
    driver: Driver,
    device: int,
    channel: Channel,
    windows: Windows,
    multicast: Multicast,
    tag: str,
    prepare: Callable[[], tuple[News, Sequence[SegmentHandle]]],
    check: Callable[[Mapping[int, News]], None],
    *,
    heard: Callable[[Mapping[int, News]], None],
    settled: Callable[[News], None],
    timeout: float,
) -> dict[int, News]:
    """One agreed point. Collective.

    Args:
        driver: Exports, imports and maps.
        device: The device of this rank.
        channel: The ranks of the node.
        windows: Where peers' segments are mapped.
        multicast: Where segments of all ranks are bound.
        tag: Which call it is, equal on all ranks.
        prepare: Local part; gives what to say, and the handles of the offers in their order.
        check: What all ranks conclude from what all said; it raises on all of them or on none.
        heard: Takes what all said, on all ranks as soon as one has it; it must not fail.
        settled: Takes what this rank said, once all peers have carried out its releases.
        timeout: Seconds to wait for the peers to come here.

    Returns:
        What each rank said.

    Raises:
        AgreementError: a step failed on a rank; on all of them, and nothing is new on any.
        MismatchError: the ranks are at different calls; nothing is changed.
        PeerTimeoutError, ClosedError: see :meth:`~cupy_zc.group.Channel.exchange`.
    """
    failure: BaseException | None = None
    with ExitStack() as stack:
        try:
            own, handles = prepare()
            fds = [_export(driver, handle, stack) for handle in handles]
        except BaseException as error:  # noqa: BLE001 - told to all ranks and raised below
            failure, own, fds = error, News(prepared=False), []
        try:
            messages = channel.exchange(own.to_bytes(), fds, tag=tag, timeout=timeout)
        except Error as trouble:
            raise trouble from failure
    with closing(messages), Transaction(channel) as transaction:
        said = {message.rank: News.from_bytes(message.payload) for message in messages}
        heard(said)
        if not all(news.prepared for news in said.values()):
            transaction.step(tag, functools.partial(_raise, failure) if failure else _nothing)
        check(said)
        peers = {rank: news for rank, news in said.items() if rank != channel.rank}
        releases = any(news.released or news.retired for news in said.values())
        offers = any(news.offers for news in said.values())
        if releases:
            multicast.let_go(transaction, tag, said)
            transaction.step(
                f"{tag}: unmap released segments",
                functools.partial(_unmap, driver, device, windows, peers),
            )
            settled(own)
        if offers:
            transaction.step(
                f"{tag}: map the peers' segments",
                functools.partial(_map, windows, messages, peers),
                ExitStack.close,
            )
        if releases or offers:
            transaction.commit()
    return said


def _export(driver: Driver, handle: SegmentHandle, stack: ExitStack) -> int:
    fd = driver.export_segment(handle)
    stack.callback(os.close, fd)
    return fd


def _raise(error: BaseException) -> NoReturn:
    raise error


def _nothing() -> None:
    """The part of a rank that was prepared in a step where another one was not."""


def _unmap(driver: Driver, device: int, windows: Windows, peers: Mapping[int, News]) -> None:
    if any(news.released or news.retired for news in peers.values()):
        driver.synchronize(device)  # unmapping does not wait for work that uses the memory
    for rank, news in peers.items():
        for name in news.released:
            windows.unmap(rank, name)
        for arena in news.retired:
            windows.shut(rank, arena)


def _map(windows: Windows, messages: Sequence[Message], peers: Mapping[int, News]) -> ExitStack:
    with ExitStack() as undo:
        for message in messages:
            if message.rank not in peers:
                continue
            for offer, fd in zip(peers[message.rank].offers, message.fds, strict=True):
                arena = offer.name.arena
                if windows.open(message.rank, arena, offer.arena_size):
                    undo.callback(windows.shut, message.rank, arena)
                windows.map(message.rank, offer, fd)
                undo.callback(windows.unmap, message.rank, offer.name)
        return undo.pop_all()
