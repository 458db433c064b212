"""Every rank does a step, or every rank undoes it.

:func:`vote` ends a step that may fail; :class:`Transaction` strings such steps together and undoes
them in reverse when one fails anywhere; :func:`agree_equal` checks what all ranks must share.

All of them work on anything that can gather bytes: a :class:`~cupy_zc.group.Channel` for the ranks
of a node, a :class:`~cupy_zc.group.Bootstrap` for all ranks.

What it promises: when a step fails on a rank, every rank raises one and the same
:class:`~cupy_zc.errors.AgreementError`. What nothing can promise: when a rank *dies* between giving
its vote and the next call, the others learn of it at that next call.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..errors import (
    AgreementError,
    ClosedError,
    Error,
    InvalidTypeError,
    MismatchError,
    PeerTimeoutError,
)
from .naming import shorten, sides

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Group", "Transaction", "agree_equal", "vote"]

_log = logging.getLogger("cupy_zc")

_T = TypeVar("_T")

#: Characters of an error's text that travel.
_LONGEST_TEXT = 2000
#: Errors that all ranks raise anyway, or after which the ranks cannot talk: nobody need be told.
_SHARED = (AgreementError, MismatchError, PeerTimeoutError, ClosedError)


class Group(Protocol):
    """Ranks that can gather bytes."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who takes part, in the order of the gathered list."""
        ...

    def all_gather(
        self, payload: bytes, *, tag: str = "", timeout: float | None = None
    ) -> list[bytes]:
        """Give a payload, get everyone's. A different ``tag`` is a MismatchError on all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class _Ballot:
    step: str
    #: Type and text of the failure; empty for success.
    failure: str
    #: Whether the failure is that another rank did not come, so that the reason is elsewhere.
    echo: bool

    @classmethod
    def of(cls, step: str, error: BaseException | None) -> _Ballot:
        if error is None:
            return cls(step, "", False)
        text = shorten(f"{type(error).__name__}: {error}", _LONGEST_TEXT)
        return cls(step, text, isinstance(error, PeerTimeoutError))

    def to_bytes(self) -> bytes:
        return json.dumps([self.step, self.failure, self.echo]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> _Ballot:
        return cls(*json.loads(data))


def vote(
    group: Group, step: str, error: BaseException | None = None, *, timeout: float | None = None
) -> None:
    """Tell the others whether a step worked here, and learn whether it did everywhere. Collective.

    Args:
        group: The ranks that vote.
        step: What was done, as it reads in "create segment failed on rank 1".
        error: Why it did not work here; None when it did.
        timeout: Seconds; None for ``settings().setup_timeout``.

    Raises:
        AgreementError: it failed somewhere; the same text on every rank. ``rank`` is the first that
            failed, before those that only missed another rank, and ``__cause__`` the local error
            where there is one.
        MismatchError: it worked, but ranks did different steps.
        PeerTimeoutError: a rank did not vote; ``__cause__`` as above.
    """
    own = _Ballot.of(step, error).to_bytes()
    try:
        gathered = group.all_gather(own, tag="vote", timeout=timeout)
    except Error as trouble:
        if error is not None:
            raise trouble from error
        raise
    if error is None and set(gathered) == {own}:
        return
    ballots = dict(zip(group.ranks, map(_Ballot.from_bytes, gathered), strict=True))
    failed = [rank for rank in group.ranks if ballots[rank].failure]
    if failed:
        culprit = min(failed, key=lambda rank: (ballots[rank].echo, rank))
        first = ballots[culprit]
        raise AgreementError(
            f"{first.step} failed on rank {culprit}: {first.failure} "
            f"({len(failed)} of {len(ballots)} ranks failed; no rank keeps the step)",
            culprit,
        ) from error
    steps = {rank: repr(ballot.step) for rank, ballot in ballots.items()}
    if len(set(steps.values())) > 1:
        raise MismatchError(f"the ranks did different steps: {sides(steps, 'is at')}")


def agree_equal(
    group: Group,
    what: str,
    value: bytes | str | float | bool | tuple[object, ...] | None,
    *,
    timeout: float | None = None,
) -> None:
    """Check that every rank holds the same value. Collective.

    Args:
        group: The ranks to compare.
        what: Name of the value, as it reads in "count must be equal on all ranks".
        value: Plain Python data; its ``repr`` is what is compared, so ``1`` and ``1.0`` differ.
        timeout: Seconds; None for ``settings().setup_timeout``.

    Raises:
        MismatchError: the values differ; on every rank, naming both sides.
        InvalidTypeError: a value whose ``repr`` says nothing on another rank.
    """
    _check_plain(what, value)
    gathered = group.all_gather(repr(value).encode(), tag=f"agree on {what}", timeout=timeout)
    if len(set(gathered)) > 1:
        values = {rank: item.decode() for rank, item in zip(group.ranks, gathered, strict=True)}
        raise MismatchError(f"{what} must be equal on all ranks: {sides(values)}")


def _check_plain(what: str, value: object) -> None:
    if type(value) is tuple:
        for item in value:
            _check_plain(what, item)
    elif value is not None and type(value) not in (bytes, str, int, float, bool):
        raise InvalidTypeError(
            "agree_equal", what, value, "bytes, str, int, float, bool, None or a tuple of these"
        )


class Transaction:
    """Steps that all ranks take together, undone on all of them when one fails on any.

    ::

        with Transaction(channel) as transaction:
            handle = transaction.step(
                "create segment", lambda: driver.create(device, size), driver.release
            )
            ...
            transaction.commit()

    Every rank takes the same steps. Without :meth:`commit`, leaving the block undoes them. When the
    block is left by an error of one rank alone, the others raise an
    :class:`~cupy_zc.errors.AgreementError` at their next step or at their commit.

    Args:
        group: The ranks that take part.
        timeout: Seconds each vote may take; None for ``settings().setup_timeout``.
    """

    def __init__(self, group: Group, *, timeout: float | None = None) -> None:
        self._group = group
        self._timeout = timeout
        self._undo = contextlib.ExitStack()
        self._failures: list[tuple[str, Exception]] = []
        self._last = "the first step"
        self._over = False

    def __enter__(self) -> Self:
        return self

    def step(
        self, name: str, do: Callable[[], _T], undo: Callable[[_T], object] | None = None
    ) -> _T:
        """Do something here, and go on only if it worked on every rank. Collective.

        Args:
            name: What it is, as it reads in "create segment failed on rank 1".
            do: The step. It must not talk to the group.
            undo: Takes what ``do`` returned and reverses it; local. None where there is nothing to
                undo. A step that failed is not undone, so ``do`` must not half-succeed.

        Returns:
            What ``do`` returned.

        Raises:
            AgreementError: it failed somewhere; this and all former steps are undone by then.
            MismatchError, PeerTimeoutError: see :func:`vote`; the steps are undone as well.
            ClosedError: the transaction is over.
        """
        self._check_open(name)
        failure: BaseException | None = None
        try:
            result = do()
        except BaseException as error:  # noqa: BLE001 - it is told to all ranks and raised below
            failure = error
        else:
            if undo is not None:
                self._undo.callback(self._undo_step, name, undo, result)
        self._vote(name, failure)
        return result

    def commit(self) -> None:
        """Keep everything, if every rank got here. Collective.

        Raises:
            AgreementError: a rank left the block by an error; all steps are undone by then.
        """
        self._check_open("commit")
        self._vote("commit", None)
        self._over = True
        self._undo.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._over:
            return
        if error is not None and not isinstance(error, _SHARED):
            try:
                vote(self._group, f"what follows {self._last!r}", error, timeout=self._timeout)
            except Error as answer:  # the error itself goes on; this only says the others know
                _log.debug("a transaction is left by %r; the group: %s", error, answer)
        self._roll_back(error)

    def _check_open(self, name: str) -> None:
        if self._over:
            raise ClosedError(f"Transaction: {name!r} comes after its end; begin a new one")

    def _vote(self, name: str, failure: BaseException | None) -> None:
        self._last = name
        try:
            vote(self._group, name, failure, timeout=self._timeout)
        except BaseException as trouble:
            if failure is not None and not isinstance(failure, Exception):
                # KeyboardInterrupt and its like: the others know now, and it goes on as itself.
                self._roll_back(failure)
                raise failure from None
            self._roll_back(trouble)
            raise

    def _roll_back(self, error: BaseException | None) -> None:
        """Undo all steps, last first, each whatever became of the one before."""
        self._over = True
        self._undo.close()
        if self._failures and error is None:
            name, first = self._failures[0]
            raise Error(f"undoing {name!r} failed: {first}") from first
        if self._failures and error is not None:
            # What add_note() of Python 3.11 does, in a way that 3.10 stores as well.
            notes = error.__dict__.setdefault("__notes__", [])
            notes += [f"undoing {name!r} failed as well: {e!r}" for name, e in self._failures]

    def _undo_step(self, name: str, undo: Callable[[_T], object], result: _T) -> None:
        try:
            undo(result)
        except Exception as error:  # noqa: BLE001 - logged, and attached by _roll_back
            _log.exception("undoing %r failed; what it holds may be lost", name)
            self._failures.append((name, error))
