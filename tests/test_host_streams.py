"""Streams and events of the host driver: when work runs, and in which order."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from types import SimpleNamespace

import cupy
import pytest

from cupy_zc import DriverError, InvalidTypeError
from cupy_zc.driver import host_event, host_queue, host_stream
from cupy_zc.driver.host import HostDriver
from cupy_zc.driver.host_result import Result


@pytest.fixture
def impatient(monkeypatch):
    """Waits end after 50 ms."""
    soon = SimpleNamespace(timeout=0.05)
    for module in (host_event, host_queue, host_stream):
        monkeypatch.setattr(module, "settings", lambda: soon)


@pytest.fixture
def stream(host):
    return host.make_stream()


def in_thread(work) -> None:
    """Run ``work`` in another thread, and raise here what it raises."""
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


# Order


def test_work_runs_at_once_where_nothing_is_ahead(stream):
    ran: list[int] = []
    for number in range(3):
        stream.enqueue(lambda number=number: ran.append(number))
        assert ran == list(range(number + 1))
        assert stream.done
    stream.launch_host_func(ran.append, 3)
    assert ran == [0, 1, 2, 3]


def test_a_hold_keeps_later_work_in_order(stream):
    ran: list[str] = []
    stream.enqueue(lambda: ran.append("before"))
    with stream.hold():
        stream.enqueue(lambda: ran.append("first"))
        stream.enqueue(lambda: ran.append("second"))
        assert ran == ["before"]
        assert not stream.done
    assert ran == ["before", "first", "second"]
    assert stream.done


def test_two_holds_must_both_be_released(stream):
    ran: list[int] = []
    first, second = stream.hold(), stream.hold()
    stream.enqueue(lambda: ran.append(1))
    second.release()
    assert ran == []
    first.release()
    first.release()
    assert ran == [1]


def test_work_between_two_holds_runs_when_the_first_is_released(stream):
    ran: list[str] = []
    first = stream.hold()
    stream.enqueue(lambda: ran.append("between"))
    second = stream.hold()
    stream.enqueue(lambda: ran.append("behind"))
    first.release()
    assert ran == ["between"]
    second.release()
    assert ran == ["between", "behind"]


def test_work_enqueued_by_work_runs_after_it(stream):
    ran: list[str] = []

    def work() -> None:
        stream.enqueue(lambda: ran.append("inner"))
        ran.append("outer")

    stream.enqueue(work)
    assert ran == ["outer", "inner"]


def test_threads_never_run_work_of_a_stream_side_by_side(stream):
    running, overlaps, ran = threading.Semaphore(1), [], []

    def work() -> None:
        if not running.acquire(blocking=False):
            overlaps.append(1)
            return
        ran.append(1)
        running.release()

    def many() -> None:
        for _ in range(500):
            stream.enqueue(work)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    stream.synchronize()
    assert (overlaps, len(ran)) == ([], 2000)


# Events


def test_an_event_is_done_before_it_is_recorded_and_when_it_is_passed(stream):
    event = stream.record()
    assert event.done
    with stream.hold():
        stream.enqueue(lambda: None)
        assert stream.record(event) is event
        assert not event.done
    assert event.done
    event.synchronize()
    assert type(event)(event.streams).done


def test_an_event_records_the_current_stream_unless_told(host, stream):
    event = host.record_event(host.current_stream())
    with stream.hold(), stream:
        event.record()
        assert not event.done
        event.record(host.make_stream())
        assert event.done


def test_streams_wait_for_events_in_chains(host):
    ran: list[int] = []
    streams = [host.make_stream() for _ in range(400)]
    hold = streams[0].hold()
    for number, (stream, after) in enumerate(itertools.pairwise(streams)):
        stream.enqueue(lambda number=number: ran.append(number))
        after.wait_event(stream.record())
    streams[-1].enqueue(lambda: ran.append(399))
    assert ran == []
    hold.release()
    assert ran == list(range(400))


def test_waiting_uses_the_last_record_before_the_wait(host, stream):
    ran: list[int] = []
    event = stream.record()
    other = host.make_stream()
    other.wait_event(event)
    with stream.hold():
        stream.record(event)
        other.enqueue(lambda: ran.append(1))
        assert ran == [1]


def test_an_event_of_a_dropped_stream_still_comes(host):
    ran: list[int] = []
    stream, other = host.make_stream(), host.make_stream()
    hold = stream.hold()
    stream.enqueue(lambda: ran.append(0))
    other.wait_event(stream.record())
    other.enqueue(lambda: ran.append(1))
    del stream, other
    gc.collect()
    hold.release()
    assert ran == [0, 1]


def test_what_is_no_event_of_the_driver_is_refused(host, stream):
    with pytest.raises(InvalidTypeError, match="an event of the host driver"):
        stream.wait_event(None)
    with HostDriver() as other, pytest.raises(DriverError, match="another driver") as error:
        stream.wait_event(other.make_stream().record())
    assert error.value.code == Result.INVALID_HANDLE


# Errors and waits


def test_work_that_runs_at_once_raises_to_its_caller(stream):
    def fail() -> None:
        raise ArithmeticError("at once")

    with pytest.raises(ArithmeticError, match="at once"):
        stream.enqueue(fail)
    stream.synchronize()
    assert stream.done


def test_errors_of_queued_work_come_at_synchronize_and_stop_nothing(stream, caplog):
    ran: list[int] = []

    def fail(text: str) -> None:
        raise ArithmeticError(text)

    with stream.hold():
        stream.launch_host_func(fail, "first")
        stream.launch_host_func(fail, "second")
        stream.enqueue(lambda: ran.append(1))
    assert ran == [1]
    with pytest.raises(ArithmeticError, match="first"):
        stream.synchronize()
    assert "more queued work failed" in caplog.text
    assert "second" in caplog.text
    stream.synchronize()


def test_an_interrupt_in_queued_work_loses_only_that_work(stream):
    ran: list[int] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    hold = stream.hold()
    stream.enqueue(interrupt)
    stream.enqueue(lambda: ran.append(1))
    with pytest.raises(KeyboardInterrupt):
        hold.release()
    assert ran == []
    stream.enqueue(lambda: ran.append(2))
    assert ran == [1, 2]


def test_synchronize_waits_for_another_thread(host, stream):
    hold = stream.hold()
    ran: list[int] = []
    stream.enqueue(lambda: ran.append(1))
    event = stream.record()
    for wait in (stream.synchronize, event.synchronize, lambda: host.synchronize(0)):
        timer = threading.Timer(0.02, hold.release)
        timer.start()
        wait()
        timer.join(timeout=30)
        assert ran == [1]
        ran.clear()
        hold = stream.hold()
        stream.enqueue(lambda: ran.append(1))
        stream.record(event)
    hold.release()


def test_no_wait_is_for_ever(host, stream, impatient):
    with stream.hold():
        event = stream.record()
        for call, wait in (
            ("cuStreamSynchronize", stream.synchronize),
            ("cuEventSynchronize", event.synchronize),
            ("cuCtxSynchronize", lambda: host.synchronize(0)),
        ):
            with pytest.raises(DriverError, match="CUPY_ZC_TIMEOUT") as error:
                wait()
            assert (error.value.call, error.value.code) == (call, Result.TIMEOUT)
        host.synchronize(1)
    stream.synchronize()


def test_a_device_waits_for_streams_that_were_dropped(host, impatient):
    hold = host.make_stream().hold()
    gc.collect()
    with pytest.raises(DriverError, match="cuCtxSynchronize"):
        host.synchronize(0)
    hold.release()
    host.synchronize(0)


def test_errors_of_a_stream_are_not_told_to_who_waits_for_the_device(host, stream):
    hold = stream.hold()
    stream.enqueue(lambda: 1 / 0)
    hold.release()
    host.synchronize(0)
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()


def test_work_cannot_wait_for_its_own_stream(stream):
    with pytest.raises(DriverError, match="wait for itself") as error:
        stream.enqueue(stream.synchronize)
    assert error.value.code == Result.NOT_PERMITTED


def test_reading_and_writing_wait_for_the_current_stream(host, stream, impatient):
    address = host.reserve(1 << 16, 0)
    host.map(address, host.create(0, 1 << 16))
    host.set_access(address, 1 << 16, 0)
    with stream.hold(), stream:
        for call in (lambda: host.read(address, 1), lambda: host.write(address, b"x")):
            with pytest.raises(DriverError, match="cuStreamSynchronize"):
                call()
    assert host.read(address, 1) == b"\0"


# Which stream, which device


def test_the_null_stream_is_one_for_each_device(host):
    first = host.current_stream()
    assert (first.ptr, host.stream_key(first)) == (0, 0)
    with host.use_device(1):
        second = host.current_stream()
        assert (second.ptr, second.device_id, host.current_device()) == (0, 1, 1)
        assert second is not first
    assert (host.current_stream(), host.current_device()) == (first, 0)


def test_any_null_stream_stands_for_that_of_the_current_device(host):
    assert host.stream_key(cupy.cuda.Stream.null) == 0
    assert host.capture_info(cupy.cuda.Stream.null) is None
    with host.current_stream().hold():
        assert not host.record_event(cupy.cuda.Stream.null).done


def test_a_stream_of_another_driver_or_kind_is_refused(host):
    with HostDriver() as other, pytest.raises(DriverError, match="another driver") as error:
        host.record_event(other.make_stream())
    assert error.value.code == Result.INVALID_HANDLE
    with pytest.raises(InvalidTypeError, match="a stream of the host driver"):
        host.stream_key(object())


def test_threads_have_current_streams_of_their_own(host, stream):
    seen: list[tuple[int, int]] = []
    with stream, host.use_device(1):
        in_thread(lambda: seen.append((host.current_stream().ptr, host.current_device())))
    assert seen == [(0, 0)]


def test_each_device_keeps_its_current_stream(host, stream):
    assert stream.use() is stream
    with host.use_device(1):
        assert host.current_stream().ptr == 0
        with host.make_stream() as other:
            assert host.current_stream() is other
            assert other.device_id == 1
    assert host.current_stream() is stream
    with stream.streams.null[0]:
        assert host.current_stream().ptr == 0


def test_a_stream_cannot_be_current_on_another_device(host, stream):
    with host.use_device(1), pytest.raises(DriverError, match="belongs to device 0") as error:
        stream.use()
    assert error.value.code == Result.INVALID_CONTEXT
    with pytest.raises(DriverError, match="there are 2 devices"):
        host.use_device(2)


def test_streams_of_all_drivers_differ(host):
    with HostDriver() as other:
        streams = [driver.make_stream(non_blocking=True) for driver in (host, other) for _ in "12"]
    assert len({stream.ptr for stream in streams} | {0}) == 5
    assert all(stream.is_non_blocking for stream in streams)
    assert repr(streams[0]) == f"<HostStream {streams[0].ptr:#x} on device 0>"


def test_a_dropped_stream_is_gone(host):
    gone = weakref.ref(host.make_stream())
    gc.collect()
    assert gone() is None


def test_a_with_block_forgets_what_use_chose_as_in_cupy(host, stream):
    null, inner = host.current_stream(), host.make_stream()
    stream.use()
    with inner:
        stream.use()
        with inner:
            assert host.current_stream() is inner
        assert host.current_stream() is inner
    assert host.current_stream() is null
