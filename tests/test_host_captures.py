"""What the host driver refuses in captures, as CUDA does, and what forks do."""

from __future__ import annotations

import threading
import weakref

import pytest
from probes import Work, refused

from cupy_zc import DriverError
from cupy_zc.driver.host_result import Result


@pytest.fixture
def stream(host):
    return host.make_stream()


@pytest.fixture
def other(host):
    return host.make_stream()


# Forks


def test_a_fork_records_into_the_same_graph_in_order(host, stream, other):
    ran: list[str] = []
    stream.begin_capture()
    stream.enqueue(Work(ran, "a"))
    other.wait_event(stream.record())
    trunk, fork = host.capture_info(stream), host.capture_info(other)
    assert (fork.id, fork.graph) == (trunk.id, trunk.graph)
    other.enqueue(Work(ran, "b"))
    stream.enqueue(Work(ran, "c"))
    stream.wait_event(other.record())
    stream.enqueue(Work(ran, "d"))
    graph = stream.end_capture()
    assert host.capture_info(other) is None
    graph.launch(stream)
    assert ran == list("abcd")


@pytest.mark.parametrize("late", [False, True])
def test_a_fork_with_work_that_was_not_joined_is_an_error(stream, other, late):
    ran: list[str] = []
    stream.begin_capture()
    other.wait_event(stream.record())
    other.enqueue(Work(ran, "fork"))
    if late:
        stream.wait_event(other.record())
        other.enqueue(Work(ran, "after the join"))
    with refused("cuStreamEndCapture", Result.STREAM_CAPTURE_UNJOINED) as error:
        stream.end_capture()
    assert hex(other.ptr) in str(error.value)
    assert not stream.is_capturing()
    assert not other.is_capturing()
    other.enqueue(Work(ran, "at once"))
    assert ran == ["at once"]


def test_a_fork_joined_through_a_third_stream_is_joined(host, stream, other):
    third = host.make_stream()
    ran: list[str] = []
    stream.begin_capture()
    event = stream.record()
    other.wait_event(event)
    third.wait_event(event)
    other.enqueue(Work(ran, "other"))
    third.wait_event(other.record())
    third.enqueue(Work(ran, "third"))
    stream.wait_event(third.record())
    stream.end_capture().launch(stream)
    assert ran == ["other", "third"]


def test_a_fork_without_work_needs_no_join(stream, other):
    stream.begin_capture()
    other.wait_event(stream.record())
    stream.end_capture()
    assert not other.is_capturing()


# What CUDA refuses


def test_begin_is_refused_on_the_null_stream_twice_and_with_an_unknown_mode(host, stream):
    with refused("cuStreamBeginCapture", Result.STREAM_CAPTURE_UNSUPPORTED):
        host.current_stream().begin_capture()
    with refused("cuStreamBeginCapture", Result.INVALID_VALUE):
        stream.begin_capture(3)
    stream.begin_capture()
    with refused("cuStreamBeginCapture", Result.ILLEGAL_STATE):
        stream.begin_capture()
    stream.end_capture()


def test_end_is_refused_without_a_begin_and_on_another_stream(stream, other):
    with refused("cuStreamEndCapture", Result.ILLEGAL_STATE):
        stream.end_capture()
    stream.begin_capture()
    other.wait_event(stream.record())
    with refused("cuStreamEndCapture", Result.STREAM_CAPTURE_UNMATCHED):
        other.end_capture()
    stream.end_capture()


@pytest.mark.parametrize("mode", [0, 1, 2, None])
def test_only_a_relaxed_capture_may_end_in_another_thread(stream, mode):
    thread = threading.Thread(target=stream.begin_capture, args=(mode,))
    thread.start()
    thread.join(timeout=30)
    if mode in (2, None):
        stream.end_capture()
        return
    with refused("cuStreamEndCapture", Result.STREAM_CAPTURE_WRONG_THREAD):
        stream.end_capture()
    assert stream.is_capturing()


PROHIBITED = {
    "cuStreamSynchronize": lambda host, stream: stream.synchronize(),
    "cuStreamQuery": lambda host, stream: stream.done,
    "HostStream.hold": lambda host, stream: stream.hold(),
}


@pytest.mark.parametrize("call", PROHIBITED)
def test_what_cannot_be_recorded_invalidates_the_capture(host, stream, other, call):
    kept = Work([])
    watch = weakref.ref(kept)
    stream.begin_capture()
    event = stream.record()
    other.wait_event(event)
    stream.enqueue(kept)
    lease = host.lease_graph(host.capture_info(stream).graph)
    del kept
    with refused(call, Result.STREAM_CAPTURE_UNSUPPORTED):
        PROHIBITED[call](host, other)
    for name, use in (
        ("cuLaunchKernel", lambda: stream.enqueue(print)),
        ("cuLaunchHostFunc", lambda: stream.launch_host_func(print, 1)),
        ("cuStreamIsCapturing", other.is_capturing),
        ("cuStreamGetCaptureInfo", lambda: host.capture_info(stream)),
        ("cuEventRecord", stream.record),
        ("cuStreamWaitEvent", lambda: stream.wait_event(event)),
        ("cuStreamWaitEvent", lambda: host.make_stream().wait_event(event)),
        ("cuStreamSynchronize", stream.synchronize),
    ):
        with refused(name, Result.STREAM_CAPTURE_INVALIDATED):
            use()
    assert host.is_capturing(stream.ptr)
    assert not lease.released
    with refused("cuStreamEndCapture", Result.STREAM_CAPTURE_INVALIDATED) as error:
        stream.end_capture()
    # Even while the error, with its traceback, is still around:
    assert lease.released
    assert watch() is None
    assert error.value.__traceback__ is not None
    assert not host.is_capturing(stream.ptr)
    assert stream.done


def test_an_unjoined_capture_drops_its_work_at_once(host, stream, other):
    stream.begin_capture()
    other.wait_event(stream.record())
    other.enqueue(Work([]))
    lease = host.lease_graph(host.capture_info(stream).graph)
    with pytest.raises(DriverError) as error:
        stream.end_capture()
    assert lease.released
    assert error.value.code == Result.STREAM_CAPTURE_UNJOINED


def test_events_from_outside_do_not_come_into_a_capture(stream, other):
    outside = other.record()
    stream.begin_capture()
    with refused("cuStreamWaitEvent", Result.STREAM_CAPTURE_ISOLATION):
        stream.wait_event(outside)
    with refused("cuStreamEndCapture", Result.STREAM_CAPTURE_INVALIDATED):
        stream.end_capture()


def test_an_event_that_was_never_recorded_may_be_waited_for_anywhere(stream):
    event = type(stream.record())(stream.streams)
    stream.wait_event(event)
    stream.begin_capture()
    stream.wait_event(event)
    stream.end_capture()


def test_captured_events_cannot_be_waited_for_outside(stream, other):
    stream.begin_capture()
    event = stream.record()
    for call, use in (
        ("cuEventQuery", lambda: event.done),
        ("cuEventSynchronize", event.synchronize),
    ):
        with refused(call, Result.CAPTURED_EVENT):
            use()
    stream.end_capture()
    with refused("cuStreamWaitEvent", Result.CAPTURED_EVENT):
        other.wait_event(event)
    other.begin_capture()
    with refused("cuStreamWaitEvent", Result.STREAM_CAPTURE_ISOLATION):
        other.wait_event(event)
    with refused("cuStreamEndCapture", Result.STREAM_CAPTURE_INVALIDATED):
        other.end_capture()


def test_two_captures_cannot_be_merged(stream, other):
    stream.begin_capture()
    other.begin_capture()
    with refused("cuStreamWaitEvent", Result.STREAM_CAPTURE_MERGE):
        stream.wait_event(other.record())
    for each in (stream, other):
        with refused("cuStreamEndCapture", Result.STREAM_CAPTURE_INVALIDATED):
            each.end_capture()


def test_the_null_stream_cannot_be_drawn_into_a_capture(host, stream):
    stream.begin_capture()
    with refused("cuStreamWaitEvent", Result.STREAM_CAPTURE_IMPLICIT):
        host.current_stream().wait_event(stream.record())
    with refused("cuStreamEndCapture", Result.STREAM_CAPTURE_INVALIDATED):
        stream.end_capture()


def test_record_event_is_refused_and_leaves_the_capture_valid(host, stream):
    stream.begin_capture()
    with refused("cuEventRecord", Result.STREAM_CAPTURE_UNSUPPORTED):
        host.record_event(stream)
    stream.end_capture()


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_waiting_for_the_device_harms_no_capture(host, stream, mode):
    """As on CUDA, where the driver waits in a way that leaves captures alone."""
    stream.begin_capture(mode)
    host.synchronize(0)
    host.synchronize(1)
    stream.end_capture()


def test_reading_memory_is_no_part_of_a_capture(host, stream):
    stream.begin_capture()
    with stream, refused("cuStreamSynchronize", Result.STREAM_CAPTURE_UNSUPPORTED):
        host.read(0, 1)
    with refused("cuStreamEndCapture", Result.STREAM_CAPTURE_INVALIDATED):
        stream.end_capture()
