"""What is registered with NCCL, until when, and what calls say of it; ranks are threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import collective_workers as work
import numpy as np
import pytest
from collective_memory import filled, put
from device_ranks import device
from emulated_driver import EmulatedDriver
from fake_nccl import FakeNccl
from fake_nccl_data import Span
from graph_workers import array_of, captured, pool_of
from nccl_engines import careless, engines_of, eventually, nccl, within
from nccl_registered import call, has, held, places, ranks, span_of

from cupy_zc import AgreementError, Communicator, PeerTimeoutError

__all__ = ["careless", "device", "nccl"]  # fixtures

pytestmark = pytest.mark.timeout(60)


@places
def test_a_segment_is_registered_once_and_until_nobody_holds_it(
    device: EmulatedDriver, nccl: FakeNccl, backend: str, node_of: tuple[int, ...]
) -> None:
    with ranks(device, node_of, backend) as comms:

        def body(comm: Communicator) -> None:
            pool, apart = pool_of(comm), pool_of(comm)
            one, two, other = array_of(pool), array_of(pool), array_of(apart)
            assert span_of(one) == span_of(two)
            first, second = comm.register(one), comm.register(two)
            third = comm.register(apart)
            for array in (one, two, other):
                assert has(comm, array)
                call(comm, array)
            segment, more = one.data.mem.segment, other.data.mem.segment
            assert segment.pins >= 1
            first.deregister()
            call(comm, one)
            assert has(comm, two)
            second.deregister()
            second.deregister()
            assert has(comm, two)  # until the next call
            call(comm, two)
            assert not has(comm, two)
            comm.collect()
            assert segment.pins == 0
            third.deregister()
            comm.collect()
            assert not has(comm, other)
            assert more.pins == 0

        work.run(comms, body)
        asked = [span for _, span in nccl.world.registrations]
        assert max(asked.count(span) for span in asked) <= (2 if backend == "hierarchical" else 1)


def test_what_calls_under_way_may_use_stays_registered_and_pinned(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    with ranks(device) as comms:

        def body(comm: Communicator) -> None:
            pool = pool_of(comm)
            array, other = array_of(pool), filled(comm, np.ones(4, "i4"))
            segment = array.data.mem.segment
            registration = comm.register(array)
            stream = comm._driver.current_stream()
            assert call(comm, array) == "local"
            with stream.hold():
                comm.all_reduce(array, array)
                registration.deregister()
                del array
                pool.free_all_blocks()
                for _ in range(3):  # the same call again, and one that was made before
                    comm.all_reduce(other, other)
                assert Span(segment.address, segment.size) in held(comm)[0]
                assert segment.pins == 1
                assert pool.total_bytes() == segment.size
            comm.synchronize()
            assert Span(segment.address, segment.size) in held(comm)[0]
            call(comm, other)
            assert Span(segment.address, segment.size) not in held(comm)[0]
            assert segment.pins == 0
            pool.free_all_blocks()
            assert pool.total_bytes() == 0

        work.run(comms, body)


def test_a_segment_is_pinned_while_it_is_deregistered(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl
) -> None:
    segments: dict[int, Any] = {}
    pins: list[int] = []
    real = nccl.deregister

    def deregister(comm: Any, handle: int) -> None:
        pins.append(segments[comm.registered[handle].address].pins)
        real(comm, handle)

    with ranks(device) as comms:

        def body(comm: Communicator) -> None:
            array, other = array_of(pool_of(comm)), array_of(pool_of(comm))
            segments[span_of(array).address] = array.data.mem.segment
            registration = comm.register(array)
            assert call(comm, array) == "local"
            registration.deregister()
            comm.synchronize()
            call(comm, other)
            assert call(comm, array) == "none"  # made again, and another transfer than before

        monkeypatch.setattr(nccl, "deregister", deregister)
        work.run(comms, body)
        monkeypatch.setattr(nccl, "deregister", real)
    assert pins == [1, 1]


@places
def test_registering_that_fails_on_one_rank_is_taken_back_on_all(
    device: EmulatedDriver, nccl: FakeNccl, backend: str, node_of: tuple[int, ...]
) -> None:
    with ranks(device, node_of, backend) as comms:
        real, turns = nccl.register, threading.Lock()
        broken: list[int] = []

        def register(comm: Any, address: int, size: int) -> int:
            handle = real(comm, address, size)
            with turns:
                if broken and comm.rank == broken[0]:
                    broken.clear()
                    nccl.deregister(comm, handle)
                    raise AgreementError("no more memory to be pinned", 1)
            return handle

        nccl.register = register  # type: ignore[method-assign]

        def body(comm: Communicator) -> None:
            pool, apart = pool_of(comm), pool_of(comm)
            arrays = array_of(pool), array_of(apart)
            kept = comm.register(arrays[1])
            comm.barrier()
            comm._bootstrap.all_gather(b"")
            if comm.rank == 0:
                broken.append(1)
            comm._bootstrap.all_gather(b"")
            with within(5), pytest.raises(AgreementError, match="no more memory"):
                comm.register(arrays[0])
            call(comm, arrays[0])
            assert not has(comm, arrays[0])
            assert has(comm, arrays[1])
            comm.collect()
            assert arrays[0].data.mem.segment.pins == 0
            with comm.register(arrays[0]):
                assert has(comm, arrays[0])
            kept.deregister()
            comm.barrier()

        work.run(comms, body)


def test_a_registration_may_end_in_any_thread(device: EmulatedDriver, nccl: FakeNccl) -> None:
    with ranks(device) as comms:

        def body(comm: Communicator) -> None:
            array, pool = filled(comm, np.ones(4, "i4")), pool_of(comm)
            taken = [array_of(pool_of(comm)) for _ in range(3)] + [array_of(pool)]
            registrations = [comm.register(each) for each in taken]
            threads = [threading.Thread(target=each.deregister) for each in registrations]
            for thread in threads:
                thread.start()
                call(comm, array)
            for thread in threads:
                thread.join(10)
            call(comm, array)
            assert held(comm) == [{span_of(array)}]

        work.run(comms, body)


def test_deregistering_that_fails_is_logged_and_no_error_of_the_call(
    device: EmulatedDriver, careless: FakeNccl, caplog: pytest.LogCaptureFixture
) -> None:
    with ranks(device) as comms, caplog.at_level(logging.WARNING, "cupy_zc"):
        careless.world.failures["deregister", 0] = ["SystemError"]

        def body(comm: Communicator) -> None:
            array, other = array_of(pool_of(comm)), filled(comm, np.ones(4, "i4"))
            comm.register(array).deregister()
            call(comm, other)
            call(comm, other)
            comm.collect()
            assert array.data.mem.segment.pins == 0

        work.run(comms, body)
    assert "a segment stays registered with NCCL" in caplog.text


# The end


@places
def test_closing_deregisters_what_is_registered(
    device: EmulatedDriver, nccl: FakeNccl, backend: str, node_of: tuple[int, ...]
) -> None:
    """The double puts down a mistake where a communicator is destroyed that has memory."""
    with ranks(device, node_of, backend) as comms:

        def body(comm: Communicator) -> Any:
            array = array_of(pool_of(comm))
            comm.empty(10, "i4")
            registration = comm.register(array)
            call(comm, array)
            comm.close()
            registration.deregister()
            assert array.data.mem.segment.pins == 0
            return None

        work.run(comms, body)
        for comm in nccl.world.made:
            assert comm.state == "destroyed"


@contextmanager
def no_deregistering(nccl: FakeNccl) -> Iterator[None]:
    def deregister(*_: Any) -> None:
        raise AssertionError

    real, nccl.deregister = nccl.deregister, deregister  # type: ignore[method-assign]
    yield
    nccl.deregister = real  # type: ignore[method-assign]


def test_after_an_abort_nothing_is_deregistered_but_all_is_unpinned(
    device: EmulatedDriver, nccl: FakeNccl, caplog: pytest.LogCaptureFixture
) -> None:
    with ranks(device) as comms:

        def body(comm: Communicator) -> None:
            array, other = array_of(pool_of(comm)), array_of(pool_of(comm))
            first, second = comm.register(array), comm.register(other)
            call(comm, array)
            comm._bootstrap.all_gather(b"")
            comm._engine.fail(PeerTimeoutError("a test wants it", ()))
            eventually(lambda: {each.state for each in nccl.world.made} == {"aborted"})
            first.deregister()
            engines_of(comm)[0].collect()
            caplog.clear()
            comm.close()
            assert "stays registered" not in caplog.text
            second.deregister()
            assert array.data.mem.segment.pins == other.data.mem.segment.pins == 0

        with no_deregistering(nccl):
            work.run(comms, body)


def test_a_graph_keeps_what_is_registered_until_it_is_gone(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    with ranks(device) as comms:

        def body(comm: Communicator) -> None:
            array, mailed, other = (array_of(pool_of(comm)) for _ in range(3))
            registrations = [comm.register(each) for each in (array, mailed, other)]
            put(array, np.full(100, comm.rank + 1, "i4"))
            graph, stream = captured(comm, array)
            stream.begin_capture()
            (comm.recv if comm.rank else comm.send)(mailed, 1 - comm.rank, stream=stream)
            letters = stream.end_capture()
            for each in registrations:
                each.deregister()
            call(comm, other)
            assert [has(comm, each) for each in (array, mailed, other)] == [True, True, False]
            graph.launch(stream)
            stream.synchronize()
            comm.barrier()
            comm.register(other).deregister()
            comm.barrier()
            del graph
            work.collected(lambda: len(comm.leases()) == 1)
            call(comm, other)
            assert [has(comm, each) for each in (array, mailed, other)] == [False, True, False]
            del letters
            work.collected(lambda: not comm.leases())
            eventually(lambda: engines_of(comm)[0].registrations.stale)
            call(comm, other)
            assert not has(comm, mailed)

        work.run(comms, body)
