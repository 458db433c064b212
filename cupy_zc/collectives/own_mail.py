"""Point-to-point calls of a rank with itself, and arrays of one call that overlap."""

from __future__ import annotations

from collections import deque
from typing import Any

from ..driver.api import KernelDriver
from ..errors import MismatchError
from .call import Transfer
from .checks import Checker, overlap
from .device_copies import Copies
from .point_to_point import Letter, Parcel

__all__ = ["OwnMail", "apart"]


def apart(copies: Copies, given: Parcel, taken: Parcel, stream: Any) -> tuple[Any, str]:
    """What to send where the receiving array must not overlap it, and why it is a copy."""
    if not overlap(given.info, taken.info):
        return given.array, ""
    copy = copies.of(given.info.ptr, given.nbytes, stream)  # freed in the order of the stream
    return copy, "in_array overlaps out_array, so it was copied"


class OwnMail:
    """What one rank sends to itself, in order.

    Args:
        driver: Of the device.
        checker: The names of calls, for errors.
        copies: Makes copies.
    """

    def __init__(self, driver: KernelDriver, checker: Checker, copies: Copies) -> None:
        self._driver = driver
        self._checker = checker
        self._copies = copies
        self._sent: deque[tuple[Any, Any]] = deque()

    def enqueue(self, letter: Letter, stream: Any) -> Transfer:
        """Put a call with this rank as its peer at the end of a stream.

        Raises:
            MismatchError: a ``recv`` finds no message that fits.
        """
        given, taken = letter.given, letter.taken
        if given is not None and taken is not None:
            source, reason = apart(self._copies, given, taken, stream)
            self._driver.copy(taken.info.ptr, source.data.ptr, given.nbytes, stream)
            return Transfer("send_recv", "copy", not reason, reason, given.nbytes)
        if given is not None:
            copy = self._copies.of(given.info.ptr, given.nbytes, stream)
            self._sent.append((given.kind, copy))
            return Transfer("send", "copy", False, "a send does not wait", given.nbytes)
        assert taken is not None  # a letter has one of the two
        rank, name = self._checker.rank, self._checker.name("recv")
        if not self._sent:
            raise MismatchError(f"{name}: rank {rank} receives from itself and has sent nothing")
        sent, copy = self._sent.popleft()
        if sent != taken.kind:
            raise MismatchError(
                f"{name}: rank {rank} sent {sent} to itself and expects {taken}; arrays are "
                "received in the order in which they were sent; nothing was written"
            )
        self._driver.copy(taken.info.ptr, copy.data.ptr, taken.nbytes, stream)
        self._copies.record_stream(copy, stream)
        return Transfer("recv", "copy", False, "the sender copied it", taken.nbytes)

    def close(self) -> None:
        """Drop what was not received."""
        self._sent.clear()
