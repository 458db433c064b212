"""Ranks that capture different things: all are told, nothing is recorded, nothing stays."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import collective_workers as work
import pytest
from graph_workers import array_of, capturing, clean, pool_of, state

import cupy_zc
from cupy_zc import (
    ClosedError,
    Communicator,
    MismatchError,
    PeerTimeoutError,
)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda comm, a, b, s: comm.all_reduce(a[:7], b, stream=s), "count=7"),
        (lambda comm, a, b, s: comm.all_reduce(a, b, "max", stream=s), "op='max'"),
        (lambda comm, a, b, s: comm.broadcast(a, 1, stream=s), r"broadcast\(.*root=1"),
        (
            lambda comm, a, b, s: comm.all_reduce(a.view("f4"), b.view("f4"), stream=s),
            "dtype=float32",
        ),
    ],
)
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_different_call_on_one_rank_is_a_mismatch_on_all(
    other: Callable[..., None], text: str, culprit: int
) -> None:
    with work.communicators(3) as comms:

        def body(comm: Communicator) -> None:
            pool = pool_of(comm)
            given, taken = array_of(pool), array_of(pool)
            before = state(comm)
            with capturing(comm) as stream:
                with pytest.raises(MismatchError, match=text) as caught:
                    if comm.rank == culprit:
                        other(comm, given, taken, stream)
                    else:
                        comm.all_reduce(given, taken, stream=stream)
                message = str(caught.value)
                assert f"rank {culprit} is at" in message
                assert "all_reduce(count=100, dtype=int32, op='sum')" in message
                assert "nothing was recorded" in message
                assert state(comm) == before
            clean(comm)

        work.run(comms, body)


def test_a_rank_that_is_one_call_behind_in_its_capture_is_a_mismatch() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            array = comm.zeros(10, "i4")
            first, second = comm._driver.make_stream(), comm._driver.make_stream()
            first.begin_capture()
            second.begin_capture()
            comm.all_reduce(array, array, stream=first)
            with pytest.raises(MismatchError, match=r"call 2 of its graph.*call 1 of its graph"):
                comm.all_reduce(array, array, stream=(first, second)[comm.rank])
            assert [(lease.calls, lease.lane) for lease in comm.leases()] == [(1, 1)]
            comm.all_reduce(array, array, stream=first)
            graph = first.end_capture()
            second.end_capture()
            cupy_zc.copyto(array, 1)
            comm.barrier()
            graph.launch(first)
            assert (cupy_zc.view(array) == 4).all()
            del graph
            comm.barrier()
            clean(comm)

        work.run(comms, body)


@pytest.mark.parametrize("point", ["register", "collect", "agreed", "empty"])
def test_a_rank_that_is_at_another_agreed_point_is_a_mismatch_on_both(point: str) -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            array, unregistered = comm.zeros(10, "i4"), array_of(pool_of(comm))
            with capturing(comm) as stream, pytest.raises(MismatchError) as caught:
                if comm.rank:
                    comm.all_reduce(array, array, stream=stream)
                elif point == "register":
                    comm.register(unregistered)
                elif point == "collect":
                    comm.collect()
                elif point == "empty":
                    comm.empty(3)
                else:
                    comm.all_reduce(unregistered, unregistered)  # call 1
            assert "'a call in a capture'" in str(caught.value)
            wanted = {"agreed": "collective call 1"}.get(point, f"Communicator.{point}")
            assert f"'{wanted}'" in str(caught.value)
            clean(comm)
            assert comm._line.counts.numbered == 0

        work.run(comms, body)


@pytest.mark.parametrize("capturer", [0, 1])
@pytest.mark.parametrize(("n", "registered"), [(2, True), (3, True), (2, False)])
def test_a_rank_that_captures_while_others_call_eagerly_is_a_mismatch_soon(
    capturer: int, n: int, registered: bool
) -> None:
    """Ends: ranks that wait for each other until the deadline, one in a capture, one in a call."""
    with work.communicators(n) as comms:

        def body(comm: Communicator) -> None:
            # One pool for all: to drop one waits for the device, and so for the other ranks.
            array, pool = comm.zeros(10, "i4"), pool_of(comm)
            for _ in range(2):
                comm.all_reduce(array, array)  # the third one is no agreed call
            for _ in range(3):
                began = time.monotonic()
                stream = comm._driver.make_stream()
                if comm.rank == capturer:
                    stream.begin_capture()
                called = array if registered else array_of(pool, 10)
                with pytest.raises(MismatchError) as caught:
                    comm.broadcast(called, 1, stream=stream)
                if comm.rank == capturer:
                    stream.end_capture()
                assert time.monotonic() - began < 5
                text = str(caught.value)
                if comm.rank == capturer:
                    assert "which it does not capture" in text
                else:
                    assert f"rank {capturer} is at a call in a capture" in text
                assert "broadcast(count=10, dtype=int32, root=1)" in text
                cupy_zc.copyto(array, 1)
                comm.reduce(array, array, 0)
                assert comm.rank or (cupy_zc.view(array) == n).all()
                comm._line.counts.numbered = 2  # the next one is no agreed call either
            clean(comm)

        work.run(comms, body)


def test_an_eager_call_that_is_queued_behind_others_is_waited_for_by_a_capture() -> None:
    """The capture comes after the call on both ranks, whenever the call runs."""
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            array = comm.zeros(10, "i4")
            for _ in range(2):
                comm.all_reduce(array, array)
            cupy_zc.copyto(array, 1)
            stream = comm._driver.make_stream()
            if comm.rank:
                hold = stream.hold()
                threading.Timer(0.7, hold.release).start()
            comm.all_reduce(array, array, stream=stream)
            with capturing(comm) as other:
                comm.all_reduce(array, array, stream=other)
            stream.synchronize()
            assert (cupy_zc.view(array) == 2).all()
            gc.collect()
            clean(comm)

        work.run(comms, body)


def test_a_rank_that_never_comes_is_named_at_the_deadline_and_no_lease_stays() -> None:
    with work.communicators(2, timeout=0.5) as comms:
        comm = comms[1]
        array, stream = array_of(pool_of(comm)), comm._driver.make_stream()
        stream.begin_capture()
        with pytest.raises(PeerTimeoutError, match="a call in a capture") as caught:
            comm.all_reduce(array, array, stream=stream)
        assert caught.value.ranks == (0,)
        stream.end_capture()
        assert comm._registry.leases.live() == ()
        assert array.data.mem.segment.pins == 0
        with pytest.raises(ClosedError):
            comm.leases()
        comm.close()
