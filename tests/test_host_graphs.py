"""Graphs of the host driver: recording, replay, and when a lease ends."""

from __future__ import annotations

import gc
import threading

import pytest
from probes import Work, refused

from cupy_zc.driver.host_result import Result


@pytest.fixture
def stream(host):
    return host.make_stream()


@pytest.fixture
def other(host):
    return host.make_stream()


# Recording and replay


def test_captured_work_runs_at_launch_as_often_as_launched(host, stream, other):
    ran: list[str] = []
    stream.begin_capture()
    for name in "abc":
        stream.enqueue(Work(ran, name))
    stream.launch_host_func(ran.append, "d")
    assert stream.is_capturing()
    assert host.is_capturing(stream.ptr)
    assert not other.is_capturing()
    graph = stream.end_capture()
    assert not stream.is_capturing()
    assert ran == []
    graph.launch(stream)
    graph.launch(other)
    with other:
        graph.launch()
    assert ran == list("abcd") * 3


def test_launches_respect_the_order_of_the_stream(stream):
    ran: list[str] = []
    stream.begin_capture()
    stream.enqueue(Work(ran, "graph"))
    graph = stream.end_capture()
    with stream.hold():
        stream.enqueue(Work(ran, "before"))
        graph.launch(stream)
        stream.enqueue(Work(ran, "after"))
        assert ran == []
    assert ran == ["before", "graph", "after"]


def test_work_queued_before_a_capture_still_runs(stream):
    ran: list[str] = []
    hold = stream.hold()
    stream.enqueue(Work(ran, "before"))
    stream.begin_capture()
    stream.enqueue(Work(ran, "captured"))
    hold.release()
    assert ran == ["before"]
    stream.end_capture()
    assert ran == ["before"]


def test_a_graph_launched_in_a_capture_becomes_a_node(stream):
    ran: list[str] = []
    stream.begin_capture()
    stream.enqueue(Work(ran, "child"))
    child = stream.end_capture()
    stream.begin_capture()
    stream.enqueue(Work(ran, "parent"))
    child.launch(stream)
    parent = stream.end_capture()
    assert ran == []
    parent.launch(stream)
    assert ran == ["parent", "child"]


def test_an_error_of_a_replay_ends_the_replay(stream):
    ran: list[str] = []

    def fail() -> None:
        raise ArithmeticError("in the graph")

    stream.begin_capture()
    stream.enqueue(fail)
    stream.enqueue(Work(ran))
    graph = stream.end_capture()
    with pytest.raises(ArithmeticError, match="in the graph"):
        graph.launch(stream)
    with stream.hold():
        graph.launch(stream)
    with pytest.raises(ArithmeticError, match="in the graph"):
        stream.synchronize()
    assert ran == []


# Leases


def test_a_lease_lasts_as_long_as_any_executable_parent_or_queued_replay(host, stream):
    ran: list[str] = []
    stream.begin_capture()
    stream.enqueue(Work(ran))
    lease = host.lease_graph(host.capture_info(stream).graph)
    graph = stream.end_capture()
    executable = graph.instantiate()
    del graph
    assert not lease.released
    executable.launch(stream)
    stream.begin_capture()
    executable.launch(stream)
    parent = stream.end_capture()
    del executable
    assert not lease.released
    hold = stream.hold()
    parent.launch(stream)
    del parent
    assert not lease.released
    hold.release()
    assert lease.released
    assert ran == ["x", "x"]


def test_a_capture_info_keeps_no_graph(host, stream):
    stream.begin_capture()
    info = host.capture_info(stream)
    stream.end_capture()
    with refused("cuGraphRetainUserObject", Result.INVALID_VALUE):
        host.lease_graph(info.graph)


def test_a_capture_whose_streams_were_dropped_is_gone(host):
    stream = host.make_stream()
    stream.begin_capture()
    lease = host.lease_graph(host.capture_info(stream).graph)
    del stream
    gc.collect()
    assert lease.released
    host.synchronize(0)


def test_captures_in_many_threads_stay_apart(host):
    failures: list[str] = []

    def capture(name: str) -> None:
        stream, ran = host.make_stream(), []
        for _ in range(50):
            stream.begin_capture()
            identity = host.capture_info(stream).id
            for _ in range(5):
                stream.enqueue(Work(ran, name))
            if host.capture_info(stream).id != identity:
                failures.append(name)
            graph = stream.end_capture()
            graph.launch(stream)
        if ran != [name] * 250:
            failures.append(name)

    threads = [threading.Thread(target=capture, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert failures == []
