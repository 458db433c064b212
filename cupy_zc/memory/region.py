"""The critical region of a device pool: a lock that its own thread cannot dead-lock on.

Inside the region only Python lists and dicts change: no driver call, no hook. But the garbage
collector and signal handlers may run anywhere, and with them user code, on the very thread that is
inside. Giving an array *back* there is no problem: that is one ``list.append``. Memory hooks that
such a free would call wait until the region is left (:meth:`Region.afterwards`), and a request for
memory is served without the pool (:attr:`Region.mine`). What is left is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..errors import Error

__all__ = ["Region"]

#: Seconds to wait for a region that is never held for longer than some microseconds.
DEADLINE = 60.0


class Region:
    """``with region:`` for the bookkeeping of one device pool."""

    __slots__ = ("_holder", "_late", "_lock")

    def __init__(self) -> None:
        # The collector may run between the lock and the note of its holder, or the other way round:
        # what it runs enters and leaves then, as nothing is under way.
        self._lock = threading.RLock()
        self._holder = 0
        self._late: list[Callable[[], None]] = []

    @property
    def mine(self) -> bool:
        """Whether the calling thread is inside."""
        return self._holder == threading.get_ident()

    def afterwards(self, call: Callable[[], None]) -> None:
        """Run ``call`` when the calling thread leaves the region it is in."""
        self._late.append(call)

    def __enter__(self) -> None:
        if self.mine:
            raise Error(
                "a finalizer or a signal handler called the memory pool while the pool was at work "
                "in the same thread; there it can only allocate and free arrays"
            )
        if not self._lock.acquire(False) and not self._lock.acquire(timeout=DEADLINE):
            raise Error(f"the memory pool was busy in another thread for {DEADLINE:.0f} s")
        self._holder = threading.get_ident()

    def __exit__(self, *exception: object) -> None:
        self._holder = 0  # from here on nothing of this thread comes to wait
        late: list[Callable[[], None]] = []
        if self._late:  # taken before others are inside, who may have some of their own
            late, self._late = self._late, late
        self._lock.release()
        for call in late:
            call()
