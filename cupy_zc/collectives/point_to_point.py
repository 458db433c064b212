"""send, recv and send_recv: one rank to another, in order, over the mail of a channel.

A ``send`` copies the array into memory of its own and passes its descriptor, so it does not wait
for the receiver. A ``send_recv`` does wait for its peer anyway: a registered array is not copied,
the peer is told where it is, reads it there and gives a receipt. The two kinds can meet: a
``send_recv`` on one side and a ``send`` and a ``recv`` on the other.

A ``recv`` that expects something else than what was sent is a MismatchError on the receiver; the
message is gone, and the next one can be received. A sender that waits for a receipt is told.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from ..arrays import ArrayInfo
from ..errors import MismatchError
from ..group import Channel, Message, closing
from ..registration import Registry
from .call import Transfer
from .checks import Checker
from .dtypes import DTYPES, code_of
from .memory import matrix, opened, packed
from .reductions import Array

__all__ = ["Letter", "Parcel", "Post"]

_HEADER = struct.Struct("<?BBqBBqiq")
_COPIED = -1
_ARRAY, _RECEIPT = "array", "receipt"


class Parcel(NamedTuple):
    """One array of this rank in a point-to-point call, checked."""

    array: Any
    info: ArrayInfo
    #: 1 where the elements follow each other in Fortran order.
    fortran: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its element type."""
        return self.info.dtype

    @property
    def code(self) -> int:
        """The number of that."""
        code = code_of(self.dtype)
        assert code is not None  # checked with the array
        return code

    @property
    def elements(self) -> int:
        """How many it has."""
        return self.info.size

    @property
    def values(self) -> Array:
        """Its elements, as they lie in memory."""
        values: Array = matrix(self.info.ptr, 1, self.elements, self.dtype)[0]
        return values

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.info.nbytes

    @property
    def kind(self) -> _Kind:
        """What a peer's array must be, to fit."""
        return _Kind(self.code, self.fortran, self.elements)

    def __str__(self) -> str:
        return str(self.kind)


class Letter(NamedTuple):
    """One point-to-point call of this rank, checked."""

    #: Name of the method.
    call: str
    peer: int
    #: What it sends and what it receives; one of them may be None.
    given: Parcel | None
    taken: Parcel | None

    def __str__(self) -> str:
        return f"Communicator.{self.call}"


class _Kind(NamedTuple):
    """What must be equal on both sides."""

    code: int
    fortran: int
    elements: int

    def __str__(self) -> str:
        order = " in Fortran order" if self.fortran else ""
        return f"{self.elements} elements of {DTYPES[self.code]}{order}"


class _Header(NamedTuple):
    """What a message says of the array it brings."""

    #: Whether it is one half of a ``send_recv``, which waits for a receipt.
    swap: bool
    kind: _Kind
    #: In a ``send_recv``: what the sender expects in return.
    expected: _Kind
    #: Where the receiver can read it; arena -1: a copy comes with the message.
    arena: int
    offset: int

    def to_bytes(self) -> bytes:
        return _HEADER.pack(self.swap, *self.kind, *self.expected, self.arena, self.offset)

    @classmethod
    def from_bytes(cls, data: bytes) -> _Header:
        swap, *kinds, arena, offset = _HEADER.unpack(data)
        return cls(swap, _Kind(*kinds[:3]), _Kind(*kinds[3:]), arena, offset)


class Post:
    """The point-to-point calls of one rank; for one thread at a time.

    Args:
        registry: Where arrays are.
        channel: The ranks; not the registry's, so that mail and agreements of two threads cannot
            get into each other's way.
        checker: The names of calls, for errors.
        timeout: Seconds to wait for a peer.
    """

    def __init__(
        self, registry: Registry, channel: Channel, checker: Checker, timeout: float
    ) -> None:
        self._registry = registry
        self._driver = registry.driver
        self._device = registry.device
        self._channel = channel
        self._checker = checker
        self._timeout = timeout
        #: What this rank sent to itself.
        self._own: deque[tuple[_Header, Array]] = deque()

    def send(self, parcel: Parcel, peer: int) -> Transfer:
        """Send an array; returns when it may be changed.

        Raises:
            DriverError: there is no memory for the copy. PeerTimeoutError: the peer has gone.
        """
        header = _Header(False, parcel.kind, parcel.kind, _COPIED, 0)
        if peer == self._checker.rank:
            self._own.append((header, parcel.values.copy()))
        else:
            with packed(self._driver, self._device, parcel.values) as fds:
                self._channel.send(peer, header.to_bytes(), fds, tag=_ARRAY, timeout=self._timeout)
        return Transfer("send", "copy", False, "a send does not wait for its peer", parcel.nbytes)

    def recv(self, parcel: Parcel, peer: int) -> Transfer:
        """Receive the next array of a peer.

        Raises:
            MismatchError: the peer sent something else; nothing was written.
            PeerTimeoutError: nothing came, or the peer has gone.
        """
        if peer == self._checker.rank:
            self._recv_own(parcel)
            return Transfer("recv", "copy", False, "the sender copied it", parcel.nbytes)
        return self._recv("recv", parcel, peer, None)

    def send_recv(
        self, given: Parcel, taken: Parcel, peer: int, place: tuple[int, int] | None
    ) -> Transfer:
        """Send one array to a peer and receive another one from it.

        Args:
            given: What to send.
            taken: What to receive into.
            peer: The other rank.
            place: Arena and offset of ``given`` where the peer can read it; None to copy it.

        Raises:
            As :meth:`recv`; MismatchError also where the peer expected something else.
        """
        if peer == self._checker.rank:
            np.copyto(taken.values, given.values)
            return Transfer("send_recv", "copy", True, "", given.nbytes)
        copy = place is None
        arena, offset = place or (_COPIED, 0)
        header = _Header(True, given.kind, taken.kind, arena, offset).to_bytes()
        values = given.values if copy else np.empty(0, given.dtype)
        with packed(self._driver, self._device, values) as fds:
            self._channel.send(peer, header, fds, tag=_ARRAY, timeout=self._timeout)
        trouble: MismatchError | None = None
        try:
            got = self._recv("send_recv", taken, peer, given)
        except MismatchError as error:
            trouble = error
        answer = self._channel.recv(peer, tag=_RECEIPT, timeout=self._timeout).payload.decode()
        if trouble is not None:
            raise trouble
        if answer:
            raise MismatchError(f"{self._checker.name('send_recv')}: {answer}")
        if not copy:
            return got
        return Transfer("send_recv", "pull", False, "in_array was copied", given.nbytes)

    def _recv(self, call: str, taken: Parcel, peer: int, given: Parcel | None) -> Transfer:
        message = self._channel.recv(peer, tag=_ARRAY, timeout=self._timeout)
        with closing([message]):
            header = _Header.from_bytes(message.payload)
            problem = self._problem(header, taken, peer)
            if not problem and given is not None and header.swap and header.expected != given.kind:
                problem = self._differs(self._checker.rank, given.kind, peer, header.expected)
            if not problem:
                self._read(taken, peer, message, header)
            if header.swap:
                answer = problem.encode()
                self._channel.send(peer, answer, tag=_RECEIPT, timeout=self._timeout)
        if problem:
            raise MismatchError(f"{self._checker.name(call)}: {problem}")
        copied = header.arena == _COPIED
        reason = f"rank {peer} copied it" if copied else ""
        return Transfer(call, "pull", not copied, reason, taken.nbytes)

    def _read(self, parcel: Parcel, peer: int, message: Message, header: _Header) -> None:
        if header.arena == _COPIED:
            with opened(
                self._driver, self._device, message.fds, parcel.elements, parcel.dtype
            ) as values:
                np.copyto(parcel.values, values)
        else:
            address = self._registry.address(peer, header.arena, header.offset)
            np.copyto(parcel.values, matrix(address, 1, parcel.elements, parcel.dtype)[0])

    def _recv_own(self, parcel: Parcel) -> None:
        me, name = self._checker.rank, self._checker.name("recv")
        if not self._own:
            raise MismatchError(f"{name}: rank {me} receives from itself and has sent nothing")
        header, values = self._own.popleft()
        problem = self._problem(header, parcel, me)
        if problem:
            raise MismatchError(f"{name}: {problem}")
        np.copyto(parcel.values, values)

    def _problem(self, header: _Header, taken: Parcel, peer: int) -> str:
        """Why a parcel cannot take what came; empty where it can."""
        if header.kind == taken.kind:
            return ""
        return self._differs(peer, header.kind, self._checker.rank, taken.kind)

    @staticmethod
    def _differs(sender: int, sent: _Kind, receiver: int, expected: _Kind) -> str:
        return (
            f"rank {sender} sent {sent} and rank {receiver} expects {expected}; ranks must receive "
            f"in the order in which arrays were sent; rank {receiver} wrote nothing"
        )
