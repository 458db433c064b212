"""Captures that go wrong on one rank: every rank is told, and nothing stays."""

from __future__ import annotations

import gc
from typing import Any

import collective_workers as work
import cupy
import pytest
from faults import FaultyDriver
from graph_workers import array_of, capturing, clean, pool_of, state

import cupy_zc
from cupy_zc import (
    AgreementError,
    Communicator,
    DriverError,
    Error,
    NotZeroCopyError,
)
from cupy_zc.driver.host import HostDriver

UNKNOWN = ("CUDA_ERROR_UNKNOWN", 999)


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


def test_a_graph_that_cannot_be_instantiated_releases_what_was_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError("no executable")

    with work.communicators(2) as comms:

        def capture(comm: Communicator) -> None:
            array, stream = array_of(pool_of(comm)), comm._driver.make_stream()
            segment = array.data.mem.segment
            stream.begin_capture()
            comm.all_reduce(array, array, stream=stream)
            assert segment.pins == 1
            with pytest.raises(MemoryError, match="no executable"):
                stream.end_capture()
            work.collected(lambda: not comm.leases())
            assert segment.pins == 0

        with monkeypatch.context() as patch:
            patch.setattr("cupy_zc.driver.host_stream.HostGraph", refuse)
            work.run(comms, capture)
        work.run(comms, clean)
