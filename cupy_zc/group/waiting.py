"""One way to wait for other ranks: with a deadline, a warning on the way, and names at the end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection

from ..config import settings
from ..errors import InvalidValueError, PeerTimeoutError
from .naming import name_ranks

__all__ = ["WARN_AFTER", "Wait", "gone"]

_log = logging.getLogger("cupy_zc")

#: Seconds after which a wait says whom it waits for.
WARN_AFTER = 10.0

_REMEDY = (
    "check that every rank was started, is still alive and makes the same calls in the same order; "
    "if the rank is only slow, pass a longer timeout, or set CUPY_ZC_SETUP_TIMEOUT (for set-up) or "
    "CUPY_ZC_TIMEOUT (for the rest)"
)


class Wait:
    """A wait that has begun. The waiting code blocks for :meth:`slice` and calls :meth:`check`.

    Args:
        what: What is waited for, with the own rank: ``"rank 0: barrier"``.
        timeout: Seconds in all; None for ``settings().setup_timeout``.

    Raises:
        InvalidValueError: ``timeout`` is not a positive, finite number.
    """

    __slots__ = ("_began", "_warned", "timeout", "what")

    def __init__(self, what: str, timeout: float | None) -> None:
        if timeout is None:
            timeout = settings().setup_timeout
        if not 0 < timeout < math.inf:
            raise InvalidValueError(what, "timeout", timeout, "a positive number of seconds")
        self.what = what
        self.timeout = timeout
        self._began = time.monotonic()
        self._warned = False

    def remaining(self) -> float:
        """Seconds until the deadline, never below zero."""
        return max(0.0, self._began + self.timeout - time.monotonic())

    def slice(self, longest: float = 1.0) -> float:
        """Seconds the caller may block before it must call :meth:`check` again."""
        if self._warned:
            return min(longest, self.remaining())
        until_warning = max(0.0, self._began + WARN_AFTER - time.monotonic())
        return min(longest, self.remaining(), until_warning)

    def check(self, missing: Collection[int], detail: str = "") -> None:
        """Say whom the wait is for when it lasts long; end it when the deadline has passed.

        Args:
            missing: The ranks that have not arrived; empty where they are not known.
            detail: What else is known about the reason.

        Raises:
            PeerTimeoutError: the deadline has passed.
        """
        if self.remaining() == 0:
            raise self.expired(missing, detail)
        if not self._warned and time.monotonic() - self._began >= WARN_AFTER:
            self._warned = True
            _log.warning(
                "%s: has waited %g s for %s, and will for another %.0f s",
                self.what, WARN_AFTER, self._whom(missing, detail), self.remaining(),
            )  # fmt: skip

    def expired(self, missing: Collection[int], detail: str = "") -> PeerTimeoutError:
        """The error for a wait that is over. Arguments as for :meth:`check`."""
        whom = self._whom(missing, detail)
        return PeerTimeoutError(
            f"{self.what}: waited {self.timeout:g} s for {whom}; {_REMEDY}", sorted(missing)
        )

    @staticmethod
    def _whom(missing: Collection[int], detail: str) -> str:
        names = name_ranks(missing) if missing else "a rank that cannot be told from here"
        return f"{names} ({detail})" if detail else names


def gone(what: str, ranks: Collection[int], detail: str = "") -> PeerTimeoutError:
    """The error for ranks that will never arrive. It is raised at once, not at the deadline.

    It is a :class:`~cupy_zc.errors.PeerTimeoutError` too, so that code has one thing to catch for
    "a peer did not come"; the message tells the two apart.
    """
    verb = "has" if len(ranks) == 1 else "have"
    reason = detail or "closed, exited or killed"
    return PeerTimeoutError(
        f"{what}: {name_ranks(ranks)} {verb} gone ({reason}); "
        "look at the output of that rank for the first error, and make the group anew",
        sorted(ranks),
    )
