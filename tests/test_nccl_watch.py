"""Calls of NCCL that only look as if they did not go well, and its end; ranks are threads."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import collective_workers as work
import numpy as np
import pytest
from collective_memory import filled, got
from device_ranks import device
from emulated_driver import EmulatedDriver
from fake_nccl import FakeNccl
from graph_workers import captured
from nccl_engines import (
    SHORT,
    careless,
    engines_of,
    eventually,
    nccl,
    opened,
    ranks,
    watchers,
    within,
)

from cupy_zc import Communicator
from cupy_zc.collectives import nccl_health

__all__ = ["careless", "device", "nccl"]  # fixtures

pytestmark = pytest.mark.timeout(60)


# What only looks as if it went wrong


def test_many_calls_under_way_may_take_longer_than_the_timeout_together(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    with ranks(device, timeout=SHORT) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.zeros(100, "f4"))
            stream = comm._driver.current_stream()
            began = time.monotonic()
            for _ in range(35):
                stream.submit("a kernel", lambda: time.sleep(0.1))
                comm.all_reduce(array, array)
            comm.synchronize()
            assert time.monotonic() - began > 3 * SHORT
            comm.barrier()

        work.run(comms, body)


def test_a_communicator_may_idle_and_then_be_used(device: EmulatedDriver, nccl: FakeNccl) -> None:
    with ranks(device, timeout=SHORT) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            graph, stream = captured(comm, array)
            for _ in range(2):
                comm.all_reduce(array, array)
                comm.synchronize()
                graph.launch(stream)
                stream.synchronize()
                time.sleep(2 * SHORT)
                comm.check()
            comm.barrier()
            del graph

        work.run(comms, body)


def test_a_look_at_any_moment_of_a_call_after_an_idle_time_finds_nothing(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl
) -> None:
    monkeypatch.setattr(nccl_health, "LOOK", 1000.0)  # only this thread looks
    with ranks(device, timeout=SHORT) as comms:
        health = engines_of(comms[0])[0].health
        stream = device.make_stream(non_blocking=True)
        event_type = type(device.record_event(stream))
        real = event_type.record

        def record(event: Any, on: Any) -> Any:
            made = real(event, on)
            looker = threading.Thread(target=health.look)  # while the event is there already
            looker.start()
            looker.join(0.1)
            lookers.append(looker)
            return made

        lookers: list[threading.Thread] = []
        health.made(stream)
        assert health.idle
        health.look()
        time.sleep(1.5 * SHORT)
        with stream.hold():
            stream.submit("a kernel", lambda: None)
            monkeypatch.setattr(event_type, "record", record)
            health.made(stream)
            monkeypatch.setattr(event_type, "record", real)
            assert not health.idle
            for each in lookers:
                each.join(5)
            health.look()
        assert lookers
        assert health.failure is None


def test_a_call_that_ends_while_it_is_looked_at_is_not_late(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    with ranks(device, timeout=SHORT) as comms:
        health = engines_of(comms[0])[0].health
        kind = type(health)
        turns: list[float] = []

        class Flickering(kind):  # type: ignore[misc, valid-type]
            @property
            def inside(self) -> float:
                turns.append(time.monotonic() if len(turns) % 2 == 0 else 0.0)
                return turns[-1]

            @inside.setter
            def inside(self, _: float) -> None:
                pass

        health.__class__ = Flickering
        for _ in range(5):
            health.look()
            assert health.failure is None
            turns.clear()
        health.__class__ = kind


def test_what_else_is_waited_for_may_take_longer_than_the_timeout(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    with ranks(device, timeout=SHORT) as comms:

        def body(comm: Communicator) -> None:
            comm.barrier()
            comm._driver.current_stream().submit("a kernel", lambda: time.sleep(2 * SHORT))
            comm.synchronize()
            comm.barrier()

        work.run(comms, body)


def test_peers_that_close_after_the_last_call_are_no_failure(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    with ranks(device, (0, 0), timeout=SHORT) as comms:

        def body(comm: Communicator) -> float:
            array = filled(comm, np.ones(100, "f4"))
            comm.all_reduce(array, array)
            comm.synchronize()
            if comm.rank:
                comm.close()
            else:
                time.sleep(3 * nccl_health.SETTLE)
                comm.check()
            return float(got(array)[0])

        assert work.run(comms, body) == [2, 2]


def test_a_call_that_a_peer_has_left_may_still_end(device: EmulatedDriver, nccl: FakeNccl) -> None:
    with ranks(device, (0, 0), timeout=10) as comms:

        def body(comm: Communicator) -> float:
            array = filled(comm, np.ones(100, "f4"))
            comm.barrier()
            stream = comm._driver.current_stream()
            stream.submit("a kernel", lambda: time.sleep(0.5 * nccl_health.SETTLE))
            comm.all_reduce(array, array)
            if comm.rank:
                comm._node.part()
            stream.synchronize()
            comm.check()
            return float(got(array)[0])

        assert work.run(comms, body) == [2, 2]


# The end


def test_a_destroy_that_hangs_is_left_behind(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(nccl_health, "CLOSING", 0.3)
    comms = opened(device, (0, 1), "nccl")
    nccl.world.graphs_hold.add(0)
    with within(5), caplog.at_level(logging.WARNING, "cupy_zc"):
        for comm in comms:
            comm.close()
    assert "ncclCommDestroy did not end within 0.3 s" in caplog.text
    assert {comm.rank for comm in nccl.world.alive} == {0}
    nccl.world.release(nccl.world.graphs_hold)
    eventually(lambda: not nccl.world.alive)
    eventually(lambda: not watchers())


def test_a_destroy_that_fails_is_logged_and_the_others_are_given_back(
    device: EmulatedDriver, nccl: FakeNccl, caplog: pytest.LogCaptureFixture
) -> None:
    comms = opened(device, (0, 1), "nccl")
    nccl.world.failures["destroy", 0] = [None, "SystemError"]
    with caplog.at_level(logging.WARNING, "cupy_zc"):
        for comm in comms:
            comm.close()
    assert "SystemError" in caplog.text
    (left,) = nccl.world.alive
    nccl.destroy(left)


def test_the_watching_thread_ends_with_the_communicator_also_if_that_is_dropped(
    device: EmulatedDriver, careless: FakeNccl
) -> None:
    comms = opened(device, (0, 1), "nccl")
    assert len(watchers()) == 2
    comms[0].close()
    eventually(lambda: len(watchers()) == 1)
    seen: list[Callable[[], Any]] = [weakref.ref(engines_of(comms[1])[0].health)]
    comms.clear()

    def gone() -> bool:
        gc.collect()
        return seen[0]() is None

    eventually(gone)
    eventually(lambda: not watchers())


def test_what_cannot_have_a_thread_any_more_is_left_to_the_end_of_the_process(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, careless: FakeNccl
) -> None:
    comms = opened(device, (0, 1), "nccl")

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    for comm in comms:
        comm.close()
    assert len(careless.world.alive) == 6
