"""How ranks, and what they hold, are named in messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice

from ..errors import AgreementError, Error, MismatchError, PeerTimeoutError

__all__ = ["name_ranks", "numbered", "shorten", "sides"]

_MOST_NAMED = 16
_LONGEST = 200


def _rest(count: int) -> str:
    """Behind the first ones of a list."""
    return f", ... ({count:,} in all)" if count > _MOST_NAMED else ""


def name_ranks(ranks: Iterable[int]) -> str:
    """``"rank 3"``, ``"ranks 0, 3"``, or for many the first ones and how many there are."""
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    return f"ranks {', '.join(map(str, ordered[:_MOST_NAMED]))}{_rest(len(ordered))}"


def shorten(text: str, longest: int = _LONGEST) -> str:
    """The text, or its beginning and its length where it is longer than ``longest`` characters."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}... ({len(text):,} characters)"


def sides(values: Mapping[int, str], verb: str = "has") -> str:
    """Who holds what: ``"rank 0 has 3; ranks 1, 2 have 4"``, in the order of the first ranks.

    Args:
        values: What each rank holds, already as text.
        verb: ``"has"``, ``"is at"`` or ``"got"``; the plural follows.
    """
    holders: dict[str, list[int]] = {}
    for rank in sorted(values):
        holders.setdefault(values[rank], []).append(rank)
    plural = {"has": "have", "is at": "are at", "got": "got"}[verb]
    told = [
        f"{name_ranks(ranks)} {verb if len(ranks) == 1 else plural} {shorten(value)}"
        for value, ranks in islice(holders.items(), _MOST_NAMED)
    ]
    return "; ".join(told) + _rest(len(holders))


def _concerned(error: Error) -> Sequence[int]:
    """The ranks that an error is about, as far as it says so."""
    if isinstance(error, PeerTimeoutError):
        return error.ranks
    return (error.rank,) if isinstance(error, AgreementError) else ()


@contextmanager
def numbered(group: str, ranks: Sequence[int]) -> Iterator[None]:
    """A block in which errors number the ranks of a group; outside they say what ranks those are.

    Args:
        group: What it is, such as ``"node 1"``.
        ranks: The numbers that its ranks have in the communicator.
    """
    try:
        yield
    except (AgreementError, MismatchError, PeerTimeoutError) as error:
        if ranks != tuple(range(len(ranks))) and not hasattr(error, "group"):
            error.__dict__["group"] = group
            first = _concerned(error) if len(ranks) > _MOST_NAMED else ()
            numbers = islice(dict.fromkeys((*first, *range(len(ranks)))), _MOST_NAMED)
            named = ", ".join(f"{local} is {ranks[local]}" for local in numbers)
            named += _rest(len(ranks))
            error.args = (
                f"{error} (numbers of {group}; in the communicator {named})",
                *error.args[1:],
            )
            if isinstance(error, PeerTimeoutError):
                error.ranks = tuple(ranks[rank] for rank in error.ranks)
            elif isinstance(error, AgreementError):
                error.rank = ranks[error.rank]
        raise
