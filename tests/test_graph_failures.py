"""Captures that go wrong: every rank is told, nothing is recorded, and nothing stays."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from faults import FaultyDriver

import cupy_zc
from cupy_zc import (
    AgreementError,
    ClosedError,
    Communicator,
    DriverError,
    Error,
    MismatchError,
    NotZeroCopyError,
    PeerTimeoutError,
)
from cupy_zc.driver.host import HostDriver

UNKNOWN = ("CUDA_ERROR_UNKNOWN", 999)


def pool_of(comm: Communicator) -> cupy_zc.MemoryPool:
    return cupy_zc.MemoryPool(driver=comm._driver, segment_size=1 << 16)


def array_of(pool: cupy_zc.MemoryPool, count: int = 100, dtype: str = "i4") -> cupy.ndarray:
    kind = np.dtype(dtype)
    return cupy.ndarray(count, kind, pool.malloc(count * kind.itemsize))


@contextmanager
def capturing(comm: Communicator) -> Iterator[Any]:
    """A stream that is capturing; the graph is thrown away."""
    stream = comm._driver.make_stream()
    stream.begin_capture()
    try:
        yield stream
    finally:
        stream.end_capture()


def state(comm: Communicator) -> tuple[Any, ...]:
    """What a capture that failed must leave as it was."""
    registry = comm._registry
    segments = [
        (entry.name, segment.pins, len(entry.holders))
        for segment, entry in registry._published.items()
        if entry.wanted
    ]
    windows = {key: dict(window._mapped) for key, window in comm._registry.windows._windows.items()}
    return segments, windows, registry.lanes.held


def clean(comm: Communicator) -> None:
    """No lease is left, and the next capture works on all ranks."""
    assert comm.leases() == ()
    comm.collect()
    assert comm._registry.lanes.held == ()
    array, stream = comm.zeros(10, "i4"), comm._driver.make_stream()
    stream.begin_capture()
    comm.all_reduce(array, array, stream=stream)
    graph = stream.end_capture()
    cupy_zc.copyto(array, comm.rank + 1)
    comm.barrier()
    graph.launch(stream)
    stream.synchronize()
    assert (cupy_zc.view(array) == sum(range(1, comm.size + 1))).all()
    comm.barrier()


# Ranks that differ


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
@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_that_captures_while_others_call_eagerly_is_a_mismatch_soon(
    capturer: int, n: int
) -> None:
    """Ends: ranks that wait for each other until the deadline, one in a capture, one in a call."""
    with work.communicators(n) as comms:

        def body(comm: Communicator) -> None:
            array = comm.zeros(10, "i4")
            for _ in range(2):
                comm.all_reduce(array, array)  # the third one is no agreed call
            for _ in range(3):
                began = time.monotonic()
                stream = comm._driver.make_stream()
                if comm.rank == capturer:
                    stream.begin_capture()
                with pytest.raises(MismatchError) as caught:
                    comm.broadcast(array, 1, stream=stream)
                if comm.rank == capturer:
                    stream.end_capture()
                assert time.monotonic() - began < 5
                text = str(caught.value)
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


# Ranks that cannot


@pytest.mark.parametrize("step", ["export_segment", "import_segment", "map", "set_access"])
def test_a_registration_that_fails_in_a_capture_fails_on_all_and_leaves_nothing(step: str) -> None:
    drivers = [FaultyDriver(HostDriver(granularity=1 << 12, memory=1 << 30)) for _ in range(2)]
    with work.communicators(2, driver=drivers[0]) as comms:

        def body(comm: Communicator) -> None:
            array = array_of(pool_of(comm))
            before = state(comm)
            comm._talk.all_gather(b"")
            if comm.rank:
                drivers[0].fail[step] = [UNKNOWN]
            comm._talk.all_gather(b"")
            with capturing(comm) as stream:
                with pytest.raises(AgreementError):
                    comm.all_reduce(array, array, stream=stream)
                assert comm.leases() == ()
                assert state(comm) == before
                assert array.data.mem.segment.pins == 0
                comm.all_reduce(array, array, stream=stream)  # the capture goes on
                assert len(comm.leases()) == 1
            clean(comm)

        work.run(comms, body)


def test_a_second_call_that_fails_leaves_the_first_one_leased() -> None:
    driver = FaultyDriver(HostDriver(granularity=1 << 12, memory=1 << 30))
    with work.communicators(2, driver=driver) as comms:

        def body(comm: Communicator) -> None:
            first, second = array_of(pool_of(comm)), array_of(pool_of(comm))
            stream = comm._driver.make_stream()
            stream.begin_capture()
            comm.all_reduce(first, first, stream=stream)
            leases, before = comm.leases(), state(comm)
            comm._talk.all_gather(b"")
            driver.fail["export_segment"] = [UNKNOWN]
            comm._talk.all_gather(b"")
            with pytest.raises(AgreementError):
                comm.all_reduce(second, second, stream=stream)
            assert comm.leases() == leases
            assert state(comm) == before
            graph = stream.end_capture()
            cupy_zc.copyto(first, 1)
            comm.barrier()
            graph.launch(stream)
            assert (cupy_zc.view(first) == 2).all()
            comm.barrier()

        work.run(comms, body)


def test_a_lane_without_memory_fails_on_all_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with work.communicators(2) as comms:

        def refuse(*_: Any) -> None:
            raise cupy_zc.OutOfMemoryError(1, 2)

        def body(comm: Communicator) -> None:
            array = array_of(pool_of(comm))
            with capturing(comm) as stream:
                with pytest.raises(AgreementError, match="rank 1"):
                    comm.all_reduce(array, array, stream=stream)
                assert comm.leases() == ()
                assert array.data.mem.segment.pins == 0

        with monkeypatch.context() as patch:
            patch.setattr(comms[1]._heap._pool, "allocate", refuse)
            for comm in comms:  # so that the heap must grow
                patch.setattr(comm._heap._allocator, "allocate", lambda _: None)
            work.run(comms, body)
        work.run(comms, clean)


def test_a_capture_that_is_invalid_on_one_rank_is_an_error_on_all() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            array, stream = comm.zeros(10, "i4"), comm._driver.make_stream()
            stream.begin_capture()
            if comm.rank:
                with pytest.raises(DriverError):
                    stream.synchronize()
            with pytest.raises(AgreementError, match=r"rank 1.*INVALIDATED"):
                comm.all_reduce(array, array, stream=stream)
            if comm.rank:
                with pytest.raises(DriverError):
                    stream.end_capture()
            else:
                stream.end_capture()
            clean(comm)

        work.run(comms, body)


def test_a_strict_rank_that_would_copy_is_an_error_on_all() -> None:
    with work.communicators(2, strict=True) as comms:

        def body(comm: Communicator) -> None:
            array = array_of(pool_of(comm))
            memory = comm._driver.plain_memory(400)
            foreign = cupy.ndarray(100, "i4", cupy.cuda.MemoryPointer(memory, 0))
            with capturing(comm) as stream:
                wanted: type[Error] = NotZeroCopyError if comm.rank else AgreementError
                with pytest.raises(wanted, match=r"in a capture.*nothing was recorded") as caught:
                    comm.all_reduce(foreign if comm.rank else array, array, stream=stream)
                assert comm.rank or getattr(caught.value, "rank", None) == 1
                with pytest.raises(NotZeroCopyError, match="overlaps"):
                    comm.send_recv(array[1:], array[:-1], 1 - comm.rank, stream=stream)
                assert comm.leases() == ()
                comm.all_reduce(array, array, stream=stream)  # is registered by the capture
            clean(comm)

        work.run(comms, body)


def test_foreign_memory_is_staged_and_kept_by_the_graph() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            memory = comm._driver.plain_memory(400)
            array = cupy.ndarray(100, "i4", cupy.cuda.MemoryPointer(memory, 0))
            taken, stream = comm.empty(100, "i4"), comm._driver.make_stream()
            cupy_zc.copyto(array, comm.rank + 1)
            stream.begin_capture()
            comm.all_reduce(array, taken, stream=stream)
            graph = stream.end_capture()
            del array, memory
            gc.collect()
            (lease,) = comm.leases()
            assert [each.arena for each in lease.arrays] == [-1, 0]
            comm.barrier()
            graph.launch(stream)
            assert (cupy_zc.view(taken) == 3).all()
            transfer = comm.last_transfer
            assert transfer is not None
            assert not transfer.zero_copy
            comm.barrier()

        work.run(comms, body)


# Captures that are not finished


def test_captures_that_fail_or_are_never_ended_release_what_they_held() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            array = array_of(pool_of(comm))
            segment = array.data.mem.segment

            def begin() -> Any:
                stream = comm._driver.make_stream()
                stream.begin_capture()
                comm.all_reduce(array, array, stream=stream)
                assert segment.pins == 1
                return stream

            stream = begin()  # a fork that is not joined
            other = comm._driver.make_stream()
            other.wait_event(stream.record())
            comm.all_reduce(array, array, stream=other)
            assert len(comm.leases()) == 1
            with pytest.raises(DriverError, match="UNJOINED"):
                stream.end_capture()
            assert comm.leases() == ()
            assert segment.pins == 0

            stream = begin()  # user code that raises half way
            with pytest.raises(ZeroDivisionError):
                try:
                    1 / 0  # noqa: B018
                finally:
                    stream.end_capture()
            assert comm.leases() == ()

            stream = begin()  # invalidated
            with pytest.raises(DriverError):
                stream.synchronize()
            (lease,) = comm.leases()
            assert lease.capturing
            with pytest.raises(DriverError):
                stream.end_capture()
            assert comm.leases() == ()

            stream = begin()  # never ended
            assert comm.leases()[0].capturing
            del stream
            work.collected(lambda: not comm.leases())
            assert segment.pins == 0
            clean(comm)

        work.run(comms, body)


def test_a_capture_that_another_thread_ended_in_the_middle_of_a_call_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            array, stream = comm.zeros(10, "i4"), comm._driver.make_stream()
            stream.begin_capture()
            if comm.rank:
                monkeypatch.setattr(comm._line._recorder, "_driver", _Ending(comm._driver, stream))
            with pytest.raises(AgreementError, match="ended by another thread"):
                comm.all_reduce(array, array, stream=stream)
            if not comm.rank:
                stream.end_capture()

        work.run(comms, body)
        monkeypatch.undo()
        work.run(comms, clean)


class _Ending:
    """A driver on which a capture ends before it is asked for."""

    def __init__(self, driver: Any, stream: Any) -> None:
        self._driver, self._stream = driver, stream

    def capture_info(self, stream: Any) -> Any:
        self._stream.end_capture()
        return self._driver.capture_info(stream)


def test_errors_of_captures_are_of_the_tree() -> None:
    assert issubclass(cupy_zc.LiveGraphsError, Error)
    error = cupy_zc.LiveGraphsError("Communicator.close (rank 0 of 2)", (3, 5))
    assert "2 graphs live that call this communicator, of capture 3, 5" in str(error)
    assert error.graphs == (3, 5)
