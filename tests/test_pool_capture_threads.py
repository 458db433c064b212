"""Streams that capture the next graph while memory of the last one is taken back."""

from __future__ import annotations

import gc
import sys
import threading
import time

import pytest
from probes import wait_for_release
from test_pool_captures import wait_until_settled

from cupy_zc.errors import DriverError

MiB = 1 << 20


def test_captures_come_and_go_in_one_thread_while_another_one_asks_for_memory(pool, driver):
    """Ends: an event recorded on a stream in whose thread the next capture had begun meanwhile."""
    ended, failures = threading.Event(), []
    device = driver.current_device()

    def other():
        try:
            with driver.use_device(device), driver.make_stream(non_blocking=True):
                held = []
                while not ended.is_set():
                    held.append(pool.malloc(1 << 20))  # none free: looks at what graphs have left
                    if len(held) == 4:
                        held.clear()
                        pool.free_all_blocks()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=other)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        with driver.make_stream(non_blocking=True) as stream:
            for _ in range(500):
                stream.begin_capture()
                pointer = pool.malloc(1000)
                del pointer
                assert stream.end_capture() is not None
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join(30)
    assert not failures


@pytest.mark.parametrize("question", [1, 2, 3])
def test_a_capture_that_begins_while_the_last_graph_is_looked_at_is_left_alone(
    pool, driver, monkeypatch, question
):
    """Ends: the same, with the other thread's step in between."""
    with driver.make_stream(non_blocking=True) as stream:
        stream.begin_capture()
        pool.malloc(1000)
        graph = stream.end_capture()
    asked, questions = driver.is_capturing, 0

    def begin_behind_the_question(pointer):
        nonlocal questions
        answer = asked(pointer)
        questions += pointer == stream.ptr
        if pointer == stream.ptr and questions == question:
            with stream:
                stream.begin_capture()
        return answer

    monkeypatch.setattr(driver, "is_capturing", begin_behind_the_question)
    del graph
    held = []
    for _ in range(50):  # CUDA tells of the end of a graph a moment later
        held.append(pool.malloc(4 * MiB))
        time.sleep(0.001)
    monkeypatch.setattr(driver, "is_capturing", asked)
    with stream:
        if not driver.is_capturing(stream.ptr):
            stream.begin_capture()
        held.append(pool.malloc(1000))
        assert stream.end_capture() is not None
    held.append(pool.malloc(1000))


@pytest.mark.parametrize("known", [True, False])
def test_memory_of_a_gone_graph_comes_back_while_its_stream_captures_the_next(
    pool, driver, known, monkeypatch
):
    """A stream that was not asked for its key before cannot be asked while it captures."""

    def refuse(stream):  # as CUDA does
        if driver.is_capturing(stream.ptr):
            raise DriverError("cuStreamGetId", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 900)
        return stream.ptr

    stream = driver.make_stream(non_blocking=True)
    with stream:
        if known:
            pool.malloc(1000)
            pool.free_all_blocks()
        elif driver.name == "host":
            del stream._cupy_zc_key
            monkeypatch.setattr(driver, "stream_key", refuse)
        stream.begin_capture()
        pool.malloc(1000)
        graph = stream.end_capture()
        stream.begin_capture()
        del graph
        wait_until_settled(pool)
        pool.malloc(1000)
        assert len(pool.segments()) == 2  # nothing says that the stream is done with the first
        del stream
        driver.current_stream().end_capture()
    gc.collect()
    wait_for_release(pool, lambda: pool.total_bytes() == 0)


def test_a_stream_that_cannot_be_asked_for_another_reason_is_told_of_and_nothing_is_lost(
    host_pool, monkeypatch
):
    driver = host_pool.driver

    def refuse(stream):
        raise DriverError("cuStreamGetId", "CUDA_ERROR_INVALID_HANDLE", 400)

    with driver.make_stream(non_blocking=True) as stream:
        stream.begin_capture()
        host_pool.malloc(1000)
        graph = stream.end_capture()
    del graph
    monkeypatch.setattr(driver, "stream_key", refuse)
    with pytest.raises(DriverError, match="INVALID_HANDLE"):
        host_pool.free_all_blocks()
    monkeypatch.undo()
    wait_for_release(host_pool, lambda: host_pool.total_bytes() == 0)
