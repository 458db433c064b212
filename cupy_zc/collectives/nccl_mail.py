"""send, recv and send_recv by NCCL.

NCCL carries out the calls of one communicator one after another, whatever their streams, and a send
ends only when it is received. So a ``send`` copies its array and goes out on a stream of its own,
and there are two communicators: one for messages to higher ranks and one for those to lower ranks.
In a ring of sends with all receives behind them, the last rank has nothing to send upwards, so it
receives, then the one before it can, and so on.

The first message between two ranks connects them, and until both are at it their hosts wait. So
ranks are all connected in the beginning, up to :data:`PAIRS` of them; where there are more, a ring
of first sends is a time-out.

Nothing is compared: a ``recv`` that expects another size than was sent is an error of NCCL, or a
time-out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..driver.api import CaptureInfo, KernelDriver, capturing
from .call import Transfer
from .checks import Checker
from .device_copies import Copies
from .nccl_calls import BYTES
from .nccl_library import Nccl
from .own_mail import OwnMail, apart
from .point_to_point import Letter, Parcel

__all__ = ["PAIRS", "NcclMail"]

#: Ranks that are connected with each other in the beginning.
PAIRS = 64


class _Ways(NamedTuple):
    """Communicators of all ranks."""

    up: Any
    down: Any


class NcclMail:
    """The point-to-point calls of one rank.

    Args:
        library: NCCL.
        up: A communicator for messages to higher ranks.
        down: One for those to lower ranks.
        driver: Of the device.
        checker: The names of calls, for errors.
        copies: Makes copies.
    """

    def __init__(
        self,
        library: Nccl,
        up: Any,
        down: Any,
        driver: KernelDriver,
        checker: Checker,
        copies: Copies,
    ) -> None:
        self._library = library
        self._ways = _Ways(up, down)
        self._driver = driver
        self._rank = checker.rank
        self._copies = copies
        self._own = OwnMail(driver, checker, copies)
        #: Where sends wait: of those to higher ranks, and of those to lower ones. The first is for
        #: eager calls, each other one is in a capture, or free.
        self._ahead: dict[bool, list[Any]] = {False: [], True: []}

    def connect(self, address: int, ranks: int, stream: Any) -> None:
        """Exchange a byte with every rank, both ways. Collective.

        Args:
            address: Of two bytes for each rank.
            ranks: How many there are.
            stream: Where.
        """
        if ranks <= PAIRS:
            for way in self._ways:
                self._library.all_to_all(address, address + ranks, 1, BYTES, way, stream.ptr)

    def enqueue(
        self, letter: Letter, stream: Any, capture: CaptureInfo | None
    ) -> tuple[Transfer, Any, int]:
        """Put a point-to-point call at the end of a stream.

        Args:
            letter: The call.
            stream: Where.
            capture: What that is capturing.

        Returns:
            What it does, the stream that NCCL's part of it is on, and which queue that is: 0 that
            of the user's streams, 1 and 2 of sends that are ahead of those.

        Raises:
            MismatchError: a ``recv`` of this rank from itself finds no message that fits.
            DriverError: NCCL refused.
        """
        given, taken, peer = letter.given, letter.taken, letter.peer
        if peer == self._rank:
            return self._own.enqueue(letter, stream), stream, 0
        if given is not None and taken is not None:
            source, reason = apart(self._copies, given, taken, stream)
            # On two streams: one kernel would wait for the other, in another order on each rank.
            ahead = self._stream_to(peer, capture)
            self._driver.follow(ahead, stream)
            self._send(source.data.ptr, given, peer, ahead)
            self._recv(taken, peer, stream)
            self._driver.follow(stream, ahead)
            return Transfer("send_recv", "nccl", not reason, reason, given.nbytes), stream, 0
        if taken is not None:
            self._recv(taken, peer, stream)
            return Transfer("recv", "nccl", True, "", taken.nbytes), stream, 0
        assert given is not None  # a letter has one of the two
        if capture is not None:
            self._send(given.info.ptr, given, peer, stream)
            return Transfer("send", "nccl", True, "", given.nbytes), stream, 0
        copy = self._copies.of(given.info.ptr, given.nbytes, stream)
        ahead = self._stream_to(peer, None)
        self._driver.follow(ahead, stream)
        self._send(copy.data.ptr, given, peer, ahead)
        self._copies.record_stream(copy, ahead)
        reason = "a send does not wait for its peer"
        return Transfer("send", "copy", False, reason, given.nbytes), ahead, 1 + (peer > self._rank)

    def _send(self, address: int, given: Parcel, peer: int, stream: Any) -> None:
        way = self._ways.up if peer > self._rank else self._ways.down
        self._library.send(address, given.nbytes, BYTES, peer, way, stream.ptr)

    def _recv(self, taken: Parcel, peer: int, stream: Any) -> None:
        way = self._ways.down if peer > self._rank else self._ways.up
        self._library.recv(taken.info.ptr, taken.nbytes, BYTES, peer, way, stream.ptr)

    def _stream_to(self, peer: int, capture: CaptureInfo | None) -> Any:
        """Where sends go out; of a capture another one: what joins it stays in it to its end."""
        streams = self._ahead[peer > self._rank]
        if not streams:
            streams.append(self._driver.make_stream(non_blocking=True))
        if capture is None:
            return streams[0]
        for stream in streams[1:]:
            if not capturing(self._driver, stream):
                return stream
            found = self._driver.capture_info(stream)
            if found is not None and found.id == capture.id:
                return stream
        streams.append(self._driver.make_stream(non_blocking=True))
        return streams[-1]

    def wait(self, wait: Callable[[Any], None]) -> None:
        """Wait for sends that are ahead."""
        for streams in self._ahead.values():
            for stream in streams[:1]:
                wait(stream)

    def close(self) -> None:
        """Drop what was sent to this rank itself, and the streams: all has ended."""
        self._own.close()
        self._ahead.clear()
