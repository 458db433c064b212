"""The control area: how ranks meet and tell each other what they are about to do.

Each rank has one, in its heap, at an offset that is the same on all ranks: a POSIX semaphore for
each other rank, which only that one posts, and two *slots* for the words of the negotiation.

*Meeting* (:meth:`Control.meet`) is to post one's semaphore at every peer and to wait for the own
ones. ``sem_post`` and a wait that succeeds synchronise memory (POSIX, "General Concepts", 4.12), so
what a rank stored before it came is seen by all who met. The semaphores count, so a rank that runs
ahead into the next meeting is no trouble. They block in the kernel: nothing spins.

*Words*: a rank writes the word of call ``k`` into slot ``k % 2`` before the first meeting of that
call, and its peers read it after. The slot is written again for call ``k + 2``, that is after a
meeting of call ``k + 1``, to which the peers came only after reading.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from collections.abc import Callable, Collection, Sequence

from ..errors import Error
from ..group.waiting import Wait, gone

__all__ = ["WORD_BYTES", "Control"]

#: Bytes of a slot.
WORD_BYTES = 64
#: A semaphore has a cache line of its own.
_LINE = 64
#: Seconds to wait before looking whether a peer has died.
_SLICE = 0.1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_init, _post, _try = _libc.sem_init, _libc.sem_post, _libc.sem_trywait
_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
_post.argtypes = _try.argtypes = (ctypes.c_void_p,)
_timed = _libc.sem_timedwait
_timed.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Timespec))


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise Error(f"{call} on a semaphore of the control area failed: {os.strerror(number)}")


def _wait(semaphore: int, seconds: float) -> bool:
    """Take a semaphore; False where that did not happen in time, or a signal came.

    ``sem_timedwait`` goes by the wall clock. If somebody sets that back meanwhile, the wait becomes
    longer by as much, and it ends all the same.
    """
    at = time.time() + seconds
    until = _Timespec(int(at), int(at % 1 * 1e9))
    if _timed(semaphore, ctypes.byref(until)) == 0:
        return True
    if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
        _check(-1, "sem_timedwait")
    return False


class Control:
    """The control areas of all ranks, as this one sees them.

    Args:
        rank: This one.
        addresses: Where the area of each rank is in this process, by rank.
        departed: Gives the ranks that have died or closed.
        linger: Told of the ranks that are waited for, now and then in a long wait.
        timeout: Seconds that a meeting may take.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[int],
        departed: Callable[[], Collection[int]],
        linger: Callable[[Collection[int]], None],
        timeout: float,
    ) -> None:
        self._rank = rank
        self._departed = departed
        self._linger = linger
        self._timeout = timeout
        own = addresses[rank]
        size = len(addresses)
        peers = [peer for peer in range(size) if peer != rank]
        self._mine = {peer: own + _LINE * peer for peer in peers}
        self._theirs = [addresses[peer] + _LINE * rank for peer in peers]
        slots = _LINE * size
        self._slots = [
            [(ctypes.c_char * WORD_BYTES).from_address(address + slots + WORD_BYTES * parity)
             for address in addresses]
            for parity in range(2)
        ]  # fmt: skip
        for semaphore in self._mine.values():
            _check(_init(semaphore, 1, 0), "sem_init")

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes of an area."""
        return _LINE * ranks + 2 * WORD_BYTES

    def write(self, parity: int, form: struct.Struct, *values: int) -> None:
        """Write this rank's word."""
        form.pack_into(self._slots[parity][self._rank], 0, *values)

    def read(self, parity: int, size: int) -> list[bytes]:
        """The words of all ranks, after a meeting; ``size`` bytes of each."""
        return [slot.raw[:size] for slot in self._slots[parity]]

    def meet(self, what: str) -> None:
        """Return when all ranks have come.

        Args:
            what: Where this rank is, for messages.

        Raises:
            PeerTimeoutError: a rank has gone, or did not come in time.
        """
        for semaphore in self._theirs:
            _post(semaphore)
        for peer, semaphore in self._mine.items():
            if not _wait(semaphore, _SLICE):
                self._wait_longer(peer, what)
                return

    def _wait_longer(self, first: int, what: str) -> None:
        """Wait for ``first`` and those behind it, with an eye on who can still come."""
        awaited = {peer: sem for peer, sem in self._mine.items() if peer >= first}
        wait = Wait(f"rank {self._rank}: {what}", self._timeout)
        while self._strike_out(awaited):
            dead = awaited.keys() & set(self._departed())
            if dead and dead & self._strike_out(awaited):  # it may have come, and then left
                raise gone(wait.what, dead & awaited.keys())
            if awaited:
                wait.check(awaited)
                self._linger(awaited)
                peer = next(iter(awaited))
                if _wait(awaited[peer], wait.slice(_SLICE)):
                    del awaited[peer]

    @staticmethod
    def _strike_out(awaited: dict[int, int]) -> set[int]:
        """Take off those that have come; who is left."""
        for peer in [peer for peer, semaphore in awaited.items() if _try(semaphore) == 0]:
            del awaited[peer]
        return set(awaited)
