"""What a record of the device says, as an exception."""

from __future__ import annotations

from ..errors import Error, MismatchError, PeerTimeoutError
from .device_args import MISMATCH, Record, described
from .device_mail import DeviceMail

__all__ = ["failure_in_words"]


def failure_in_words(
    record: Record, call: object, rank: int, budget: float, mail: DeviceMail | None
) -> Error:
    """The error of a call that failed on the device.

    Args:
        record: What the kernel left.
        call: Where the host found it, which is a later call.
        rank: This one.
        budget: Seconds that the kernel waited at most.
        mail: The point-to-point calls, where it was one of them.
    """
    peer, where = record.rank, f"{call} (rank {rank})"
    if record.code != MISMATCH and record.abort == peer + 1:
        what = f"call {record.epoch} of lane {record.lane}" if mail is None else "a message"
        return PeerTimeoutError(
            f"{where}: rank {peer} ended and cannot come any more; rank {rank} had waited "
            f"{record.detail / 1e9:.3g} s in {what}",
            [peer],
        )
    if mail is not None:
        what = f"message {record.epoch} between rank {rank} and rank {peer}"
    else:
        what = f"call {record.epoch} of lane {record.lane}"
    if record.code == MISMATCH and mail is not None:
        return MismatchError(
            f"{where}: in {what} rank {peer} has {mail.describe(record.detail)}, and rank {rank} "
            f"has {mail.describe(record.mine)}; ranks must receive in the order in which arrays "
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
