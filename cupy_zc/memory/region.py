"""The critical region of a device pool: a lock that a finalizer cannot dead-lock on.

Inside the region only Python lists and dicts change; no driver call, no hook, no user code. But the
garbage collector may run anywhere, and with it a user's ``__del__`` that allocates an array, on the
very thread that holds the lock. So collection waits until the region is left. (Giving an array
*back* is no problem: that is one ``list.append``.)
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

from ..errors import Error

__all__ = ["Region"]

#: Seconds to wait for a region that is never held for longer than some microseconds.
DEADLINE = 60.0


class _Collector:
    """Keeps automatic collection off while any region is entered; on again after the last one."""

    def __init__(self) -> None:
        self._regions: list[None] = []
        self._resume = False

    def hold(self) -> None:
        self._regions.append(None)
        if gc.isenabled():
            self._resume = True
            gc.disable()

    def let_go(self) -> None:
        self._regions.pop()
        if self._resume and not self._regions:
            self._resume = False
            gc.enable()
            if self._regions and gc.isenabled():  # another thread entered since the look
                self._resume = True
                gc.disable()


_collector = _Collector()


class Region:
    """``with region:`` for the bookkeeping of one device pool."""

    __slots__ = ("_holder", "_late", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
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
        me = threading.get_ident()
        if self._holder == me:  # a signal handler: collection is off
            raise Error(
                "a signal handler asked the memory pool for memory while the pool was at work in "
                "the same thread; allocate outside of signal handlers"
            )
        _collector.hold()
        try:
            if not self._lock.acquire(False) and not self._lock.acquire(timeout=DEADLINE):
                raise Error(f"the memory pool was busy in another thread for {DEADLINE:.0f} s")
        except BaseException:  # KeyboardInterrupt while waiting, too
            _collector.let_go()
            raise
        self._holder = me

    def __exit__(self, *exception: object) -> None:
        late = self._late
        if late:
            self._late = []
        self._holder = 0
        self._lock.release()
        _collector.let_go()
        for call in late:
            call()
