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

__all__ = ["Parcel", "Post"]

#: dtype, whether in Fortran order, whether a receipt is wanted, count, arena, offset.
_HEADER = struct.Struct("<BBBqiq")
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

    def __str__(self) -> str:
        return _show(self.code, self.elements, self.fortran)


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
        self._own: deque[tuple[bytes, Array]] = deque()

    def send(self, parcel: Parcel, peer: int) -> Transfer:
        """Send an array; returns when it may be changed.

        Raises:
            DriverError: there is no memory for the copy. PeerTimeoutError: the peer has gone.
        """
        header = self._header(parcel, receipt=False, arena=_COPIED, offset=0)
        if peer == self._checker.rank:
            self._own.append((header, parcel.values.copy()))
        else:
            with packed(self._driver, self._device, parcel.values) as fds:
                self._channel.send(peer, header, fds, tag=_ARRAY, timeout=self._timeout)
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
        return self._recv("recv", parcel, peer)

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
        header = self._header(given, receipt=True, arena=arena, offset=offset)
        values = given.values if copy else np.empty(0, given.dtype)
        with packed(self._driver, self._device, values) as fds:
            self._channel.send(peer, header, fds, tag=_ARRAY, timeout=self._timeout)
        trouble: MismatchError | None = None
        try:
            got = self._recv("send_recv", taken, peer)
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

    def _header(self, parcel: Parcel, *, receipt: bool, arena: int, offset: int) -> bytes:
        return _HEADER.pack(parcel.code, parcel.fortran, receipt, parcel.elements, arena, offset)

    def _recv(self, call: str, parcel: Parcel, peer: int) -> Transfer:
        message = self._channel.recv(peer, tag=_ARRAY, timeout=self._timeout)
        with closing([message]):
            code, fortran, receipt, elements, arena, offset = _HEADER.unpack(message.payload)
            problem = self._problem(parcel, peer, code, fortran, elements)
            if not problem:
                self._read(parcel, peer, message, arena, offset)
            if receipt:
                answer = problem.encode()
                self._channel.send(peer, answer, tag=_RECEIPT, timeout=self._timeout)
        if problem:
            raise MismatchError(f"{self._checker.name(call)}: {problem}")
        if arena == _COPIED:
            return Transfer(call, "pull", False, f"rank {peer} copied it", parcel.nbytes)
        return Transfer(call, "pull", True, "", parcel.nbytes)

    def _read(self, parcel: Parcel, peer: int, message: Message, arena: int, offset: int) -> None:
        if arena == _COPIED:
            with opened(
                self._driver, self._device, message.fds, parcel.elements, parcel.dtype
            ) as values:
                np.copyto(parcel.values, values)
        else:
            address = self._registry.address(peer, arena, offset)
            np.copyto(parcel.values, matrix(address, 1, parcel.elements, parcel.dtype)[0])

    def _recv_own(self, parcel: Parcel) -> None:
        me, name = self._checker.rank, self._checker.name("recv")
        if not self._own:
            raise MismatchError(f"{name}: rank {me} receives from itself and has sent nothing")
        header, values = self._own.popleft()
        code, fortran, _, elements, _, _ = _HEADER.unpack(header)
        problem = self._problem(parcel, me, code, fortran, elements)
        if problem:
            raise MismatchError(f"{name}: {problem}")
        np.copyto(parcel.values, values)

    def _problem(self, parcel: Parcel, peer: int, code: int, fortran: int, elements: int) -> str:
        """Why a parcel cannot take what came; empty where it can."""
        if (parcel.code, parcel.fortran, parcel.elements) == (code, fortran, elements):
            return ""
        return (
            f"rank {peer} sent {_show(code, elements, fortran)} and rank {self._checker.rank} "
            f"expects {parcel}; ranks must receive in the order in which arrays were sent; nothing "
            "was written"
        )


def _show(code: int, elements: int, fortran: int) -> str:
    order = " in Fortran order" if fortran else ""
    return f"{elements} elements of {DTYPES[code]}{order}"
