"""What a record of the device says in words: every kind of failure, of collectives and messages."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cupy_zc.collectives.call import Call
from cupy_zc.collectives.device_args import MISMATCH, TIMEOUT, Record, fingerprint, mix
from cupy_zc.collectives.device_failures import Describe, failure_in_words
from cupy_zc.collectives.device_lane import Records
from cupy_zc.collectives.device_mail import DeviceMail
from cupy_zc.collectives.plan import Operation
from cupy_zc.errors import MismatchError, PeerTimeoutError

FLOAT32, INT8 = 11, 1
#: It describes messages, for which it needs nothing of what makes it.
MAIL = object.__new__(DeviceMail)


def word(operation: Operation, columns: int, root: int = 0) -> int:
    return fingerprint(
        Call(operation, np.dtype("f4"), FLOAT32, 0, root, columns, 0, None, None, False, "")
    )


def message(elements: int, code: int) -> int:
    return mix(elements << 5 | code << 1)


def test_ranks_that_call_different_things_are_both_told_what_each_of_them_called() -> None:
    theirs, mine = word(Operation.REDUCE, 99, 1), word(Operation.ALL_REDUCE, 100)
    record = Record(MISMATCH, 2, 3, 7, theirs, mine)
    error = failure_in_words(record, "barrier()", 0, 60.0, None)
    assert isinstance(error, MismatchError)
    assert str(error) == (
        "barrier() (rank 0): the ranks do not make the same call: in call 7 of lane 3 rank 2 is at "
        "reduce(count=99, dtype=float32, op='sum', root=1), and rank 0 is at "
        "all_reduce(count=100, dtype=float32, op='sum'); nothing was written"
    )


def test_ranks_whose_messages_do_not_fit_are_both_told_what_each_of_them_has() -> None:
    record = Record(MISMATCH, 1, 1023, 4, message(5, FLOAT32), message(6, INT8))
    error = failure_in_words(record, "recv()", 0, 60.0, MAIL.describe)
    assert isinstance(error, MismatchError)
    text = "in message 4 between rank 0 and rank 1 rank 1 has 5 elements of float32, and rank 0 has"
    assert f"{text} 6 elements of int8; ranks must receive in the order" in str(error)


@pytest.mark.parametrize("mail", [None, MAIL.describe])
@pytest.mark.parametrize("abort", [0, 4])
def test_a_rank_that_did_not_come_in_time_is_named(mail: Describe | None, abort: int) -> None:
    """Whatever the host said of another one."""
    what = "call 7 of lane 3" if mail is None else "message 7 between rank 0 and rank 1"
    record = Record(TIMEOUT, 1, 3, 7, 2 * 10**9, 0, abort)
    error = failure_in_words(record, "barrier()", 0, 2.0, mail)
    assert isinstance(error, PeerTimeoutError)
    assert error.ranks == (1,)
    assert f"barrier() (rank 0): rank 1 did not come to {what} within 2 s" in str(error)


@pytest.mark.parametrize("mail", [None, MAIL.describe])
def test_a_rank_that_the_host_gave_up_is_named_with_the_time_it_was_waited_for(
    mail: Describe | None,
) -> None:
    what = "call 7 of lane 3" if mail is None else "a message"
    record = Record(TIMEOUT, 2, 3, 7, 1_500_000, 0, 3)
    error = failure_in_words(record, "barrier()", 0, 60.0, mail)
    assert isinstance(error, PeerTimeoutError)
    assert error.ranks == (2,)
    assert str(error) == (
        "barrier() (rank 0): rank 2 ended and cannot come any more; rank 0 had waited 0.0015 s in "
        + what
    )


def test_a_record_fits_its_place_among_the_records() -> None:
    assert ctypes.sizeof(Record) <= Records.BYTES
