"""What a record of the device says, as an exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ..errors import Error, MismatchError, PeerTimeoutError
from .device_args import MISMATCH, Record, described

__all__ = ["Describe", "failure_in_words"]

Describe: TypeAlias = Callable[[int], str]


def failure_in_words(
    record: Record, call: object, rank: int, budget: float, describe: Describe | None
) -> Error:
    """The error of a call that failed on the device.

    Args:
        record: What the kernel left.
        call: Where the host found it, which is a later call.
        rank: This one.
        budget: Seconds that the kernel waited at most.
        describe: Of a message, where it was a point-to-point call: what a fingerprint stands for.
    """
    peer, where = record.rank, f"{call} (rank {rank})"
    if record.code != MISMATCH and record.abort == peer + 1:
        what = f"call {record.epoch} of lane {record.lane}" if describe is None else "a message"
        return PeerTimeoutError(
            f"{where}: rank {peer} ended and cannot come any more; rank {rank} had waited "
            f"{record.detail / 1e9:.3g} s in {what}",
            [peer],
        )
    if describe is not None:
        what = f"message {record.epoch} between rank {rank} and rank {peer}"
    else:
        what = f"call {record.epoch} of lane {record.lane}"
    if record.code == MISMATCH and describe is not None:
        return MismatchError(
            f"{where}: in {what} rank {peer} has {describe(record.detail)}, and rank {rank} "
            f"has {describe(record.mine)}; ranks must receive in the order in which arrays "
            "were sent; nothing was written"
        )
    if record.code == MISMATCH:
        return MismatchError(
            f"{where}: the ranks do not make the same call: in {what} rank {peer} is at "
            f"{described(record.detail)}, and rank {rank} is at {described(record.mine)}; nothing "
            "was written"
        )
    return PeerTimeoutError(
        f"{where}: rank {peer} did not come to {what} within {budget:g} s; it may have died, or "
        "make other calls than this rank; CUPY_ZC_TIMEOUT or timeout= give it more time",
        [peer],
    )
