"""How ranks that know nothing of each other yet talk: gathers of bytes, and nothing else.

:class:`Bootstrap` has three makers:

* :func:`~cupy_zc.group.from_mpi`: any mpi4py communicator;
* :func:`~cupy_zc.group.from_tcp`: a store that rank 0 keeps in a thread;
* :func:`~cupy_zc.group.in_process`: ranks that are threads of one process.

A bootstrap carries set-up only: addresses, identities, votes between nodes. Bytes go as they are;
nothing is pickled. It is for one thread at a time. A call that fails closes the bootstrap (the rank
would be out of step for ever), and the other ranks learn of it as of a rank that has gone.
"""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ClosedError, InvalidTypeError, InvalidValueError, MismatchError
from .naming import sides
from .waiting import Wait

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MAX_PAYLOAD", "Bootstrap", "Offer", "check_member"]

#: Most bytes a rank may give to one call; also what a receiver believes of a length at most.
MAX_PAYLOAD = 1 << 30

_SPLIT = struct.Struct("!?qq")


class Offer(NamedTuple):
    """What a rank gives to a gather."""

    #: The call that it makes, in words.
    call: bytes
    payload: bytes


def check_member(call: str, rank: int, size: int) -> None:
    """Refuse a rank that is not one of ``size``.

    Raises:
        InvalidValueError: ``size < 1``, or ``rank`` outside ``0 .. size - 1``.
    """
    if size < 1:
        raise InvalidValueError(call, "size", size, "at least 1")
    if not 0 <= rank < size:
        raise InvalidValueError(call, "rank", rank, f"0 to {size - 1}")


class Bootstrap(ABC):
    """The ranks of a group, able to gather bytes. A context manager that closes itself.

    Every method but :meth:`close` is collective: all ranks call it, in the same order. Timeouts are
    seconds; None stands for ``settings().setup_timeout``.

    Raises (every collective method):
        PeerTimeoutError: a rank did not come before the deadline, or has gone; see ``ranks``.
        MismatchError: ranks called different things; on all of them; they stay in step.
        ClosedError: the bootstrap is closed, or was made by the parent of this process.
    """

    def __init__(self, rank: int, size: int) -> None:
        check_member("Bootstrap", rank, size)
        self.rank = rank
        self.size = size
        self._owner = os.getpid()
        self._closed = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in the order in which :meth:`all_gather` lists what they gave."""
        return tuple(range(self.size))

    @property
    def closed(self) -> bool:
        """Whether it can no longer be used."""
        return self._closed

    def all_gather(
        self, payload: bytes, *, tag: str = "", timeout: float | None = None
    ) -> list[bytes]:
        """Give a payload, get that of every rank, in the order of ranks.

        Args:
            payload: Up to :data:`MAX_PAYLOAD` bytes; ranks may give different lengths.
            tag: What the call is for; must be equal on all ranks.
            timeout: See the class.
        """
        return self._call(f"all_gather({tag!r})", payload, timeout)

    def broadcast(
        self, payload: bytes | None, root: int = 0, *, timeout: float | None = None
    ) -> bytes:
        """Get what ``root`` gave; other ranks pass None.

        Raises:
            InvalidValueError: ``root`` is no rank. InvalidTypeError: the root passed no bytes.
        """
        if not 0 <= root < self.size:
            raise InvalidValueError("broadcast", "root", root, f"0 to {self.size - 1}")
        given = payload if self.rank == root else b""
        if given is None:
            raise InvalidTypeError("broadcast", "payload", given, "bytes on the root")
        return self._call(f"broadcast(root={root})", given, timeout)[root]

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has called it."""
        self._call("barrier()", b"", timeout)

    def split(
        self, color: int | None, key: int = 0, *, timeout: float | None = None
    ) -> Bootstrap | None:
        """Part the group into groups of equal ``color``, ordered by ``(key, rank)``.

        Each new group is closed by itself and outlives this one.

        Returns:
            The group of this rank, or None for ``color=None``, which takes no part.

        Raises:
            InvalidValueError: ``color`` or ``key`` does not fit 64 bits.
        """
        for name, value in (("color", color or 0), ("key", key)):
            if not -(1 << 63) <= value < 1 << 63:
                raise InvalidValueError("split", name, value, "a 64-bit integer")
        offer = _SPLIT.pack(color is not None, color or 0, key)
        answers = [_SPLIT.unpack(item) for item in self._call("split()", offer, timeout)]
        members: list[int] = []
        if color is not None:
            same = [
                rank for rank, (joins, other, _) in enumerate(answers) if joins and other == color
            ]
            members = sorted(same, key=lambda rank: (answers[rank][2], rank))
        return self._join(members, timeout)

    def part(self, ranks: Sequence[int], *, timeout: float | None = None) -> Bootstrap:
        """:meth:`split` for ranks that know the groups already, and need not ask each other.

        Args:
            ranks: The group of this rank, in its order; all ranks of it give the same.
            timeout: See the class.

        Raises:
            InvalidValueError: this rank is not among them, or one is no rank or there twice.
        """
        if self.rank not in ranks or len(set(ranks) & set(self.ranks)) < len(ranks):
            raise InvalidValueError("part", "ranks", ranks, f"ranks with {self.rank} among them")
        group = self._join(ranks, timeout)
        assert group is not None  # there are members
        return group

    def close(self) -> None:
        """Leave the group. Local, allowed twice, and what a forked child may call as well."""
        if not self._closed:
            self._closed = True
            self._leave(owner=os.getpid() == self._owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, name: str, payload: bytes, timeout: float | None) -> list[bytes]:
        """Gather payloads under a name that must be the same on all ranks."""
        if not isinstance(payload, bytes):
            raise InvalidTypeError(name, "payload", payload, "bytes")
        if len(payload) > MAX_PAYLOAD:
            raise InvalidValueError(name, "len(payload)", len(payload), f"at most {MAX_PAYLOAD:,}")
        if self._closed or os.getpid() != self._owner:
            why = "is closed" if self._closed else "belongs to the parent of this process"
            raise ClosedError(f"rank {self.rank}: {name}: this bootstrap {why}; make a new one")
        wait = Wait(f"rank {self.rank}: {name}", timeout)
        label = name.encode()[: 1 << 10]
        try:
            offers = self._gather(Offer(label, payload), wait)
        except BaseException:
            self.close()
            raise
        if len({offer.call for offer in offers}) > 1:
            names = {rank: offer.call.decode(errors="replace") for rank, offer in enumerate(offers)}
            raise MismatchError(
                f"the ranks do not make the same call: {sides(names, 'is at')}; "
                "every rank must make the same calls in the same order"
            )
        return [offer.payload for offer in offers]

    @abstractmethod
    def _gather(self, offer: Offer, wait: Wait) -> list[Offer]:
        """Gather what all ranks give, in order."""

    @abstractmethod
    def _join(self, members: Sequence[int], timeout: float | None) -> Bootstrap | None:
        """Make the group of ``members`` (ranks of this one); None where there are none.

        Called on all ranks of this group.
        """

    @abstractmethod
    def _leave(self, *, owner: bool) -> None:
        """Let go of everything. ``owner`` is false in a forked child: say nothing to peers then."""
