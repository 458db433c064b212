"""What is registered with NCCL, until when, and what calls say of it; ranks are threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from collective_memory import filled, put
from device_ranks import device
from emulated_driver import EmulatedDriver
from fake_nccl import FakeNccl
from fake_nccl_data import Span
from graph_workers import array_of, captured, pool_of
from nccl_engines import PLACES, careless, engines_of, eventually, nccl, within
from several_nodes import pretend

from cupy_zc import AgreementError, ClosedError, Communicator, PeerTimeoutError
from cupy_zc.collectives.nccl_library import WINDOWS_FROM
from cupy_zc.registration import Rule

__all__ = ["careless", "device", "nccl"]  # fixtures

pytestmark = pytest.mark.timeout(60)

places = pytest.mark.parametrize(
    ("backend", "node_of"), PLACES.values(), ids=[name.replace(" ", "-") for name in PLACES]
)


def ranks(
    device: EmulatedDriver, node_of: tuple[int, ...] = (0, 1), backend: str = "nccl",
    **options: Any,
) -> Any:  # fmt: skip
    options.setdefault("timeout", 10)
    return pretend(node_of, driver=device, backend=backend, register="manual", **options)


def span_of(array: cupy.ndarray) -> Span:
    """Of its segment."""
    segment = array.data.mem.segment
    return Span(segment.address, segment.size)


def held(comm: Communicator) -> list[set[Span]]:
    """What is registered, of each engine."""
    found = []
    for each in engines_of(comm):
        spans = [*each._comm.registered.values(), *each._comm.windows.values()]
        assert len(set(spans)) == len(spans)
        found.append(set(spans))
    return found


def has(comm: Communicator, array: cupy.ndarray) -> bool:
    """Whether the segment of an array is registered; with all engines or with none."""
    said = {span_of(array) in each for each in held(comm)}
    assert len(said) == 1
    return said.pop()


def call(comm: Communicator, array: cupy.ndarray) -> str:
    """A call that ended, and how its array was registered."""
    comm.all_reduce(array, array)
    comm.synchronize()
    assert comm.last_transfer is not None
    return comm.last_transfer.registration


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


# Windows


@pytest.mark.parametrize(
    ("equal", "null", "mode"),
    [(True, None, "window"), (False, None, "local"), (True, 1, "local"), (True, 0, "local")],
)
def test_windows_are_made_where_all_ranks_can(
    device: EmulatedDriver, nccl: FakeNccl, equal: bool, null: int | None, mode: str
) -> None:
    nccl.version = WINDOWS_FROM
    with ranks(device, (0, 0, 1)) as comms:
        if null is not None:
            nccl.world.no_window.add(null)

        def body(comm: Communicator) -> None:
            sizes = 1 << 16 << (0 if equal else comm.rank)
            pools = [pool_of(comm, sizes) for _ in range(2)]
            arrays = [array_of(each) for each in pools]
            registration = comm.register(arrays[0]), comm.register(pools[1])
            (engine,) = engines_of(comm)
            assert len(engine._comm.windows) == (2 if mode == "window" else 0)
            assert len(engine._comm.registered) == (0 if mode == "window" else 2)
            for array in arrays:
                assert call(comm, array) == mode
            for each in registration:
                each.deregister()
            assert call(comm, arrays[0]) == "none"
            assert held(comm) == [set()]

        work.run(comms, body)


def test_before_windows_can_be_trusted_there_are_none(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    nccl.version = WINDOWS_FROM - 1
    with ranks(device) as comms:

        def body(comm: Communicator) -> None:
            array = array_of(pool_of(comm))
            with comm.register(array):
                assert call(comm, array) == "local"

        work.run(comms, body)


def test_a_rank_that_cannot_make_its_window_ends_what_the_others_wait_for(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, careless: FakeNccl
) -> None:
    careless.version = WINDOWS_FROM
    with ranks(device, timeout=1) as comms:
        careless.world.failures["register_window", 1] = ["SystemError"]

        def body(comm: Communicator) -> None:
            array = array_of(pool_of(comm))
            with within(6), pytest.raises((AgreementError, PeerTimeoutError)) as caught:
                comm.register(array)
            if comm.rank:
                assert "register with NCCL failed on rank" in str(caught.value)
            with within(4), pytest.raises((ClosedError, PeerTimeoutError)):
                for _ in range(100):
                    call(comm, array)

        work.run(comms, body)


# The symmetric heap, and other memory


@places
def test_the_symmetric_heap_is_registered_as_it_grows(
    device: EmulatedDriver, nccl: FakeNccl, backend: str, node_of: tuple[int, ...]
) -> None:
    with ranks(device, node_of, backend) as comms:

        def body(comm: Communicator) -> None:
            first = comm.empty(100, "f4")
            assert has(comm, first)
            before = [len(each) for each in held(comm)]
            assert has(comm, comm.empty(10, "f4"))
            assert [len(each) for each in held(comm)] == before  # of the same segment
            arrays = [first]
            while span_of(arrays[-1]) == span_of(first):
                arrays.append(comm.empty(8 << 20, "u1"))
            assert has(comm, arrays[-1])
            del arrays
            comm.collect()
            assert has(comm, first)
            comm.empty(0, "f4")

        work.run(comms, body)


def test_memory_of_the_heap_that_cannot_be_registered_is_an_error_on_all_nodes(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    with ranks(device, (0, 0, 1, 1), "hierarchical") as comms:
        nccl.world.failures["register", 1] = ["SystemError"]

        def body(comm: Communicator) -> None:
            with within(8), pytest.raises(AgreementError):
                comm.empty(100, "f4")
            array = comm.empty(100, "f4")
            assert has(comm, array)
            comm.barrier()

        work.run(comms, body)


def rule_of(rules: tuple[Rule, ...], name: str) -> Rule:
    return next(rule for rule in rules if rule.name == name)


def test_explain_and_last_transfer_say_why_memory_is_not_registered(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl
) -> None:
    eager, in_graph = "registered with NCCL", "registered with NCCL when captured"
    with ranks(device) as comms:

        def body(comm: Communicator) -> None:
            apart = device.plain_memory(64)
            stranger = cupy.ndarray(4, "i4", cupy.cuda.MemoryPointer(apart, 0))
            array, symmetric = array_of(pool_of(comm)), comm.empty(4, "i4")
            assert call(comm, stranger) == "none"
            transfer = comm.last_transfer
            assert transfer is not None
            assert not transfer.zero_copy
            assert "its memory is a HostPlainMemory" in transfer.reason
            rules = comm.explain(stranger)
            assert [rule_of(rules, name).passed for name in (eager, in_graph)] == [False, False]
            assert "pool" in rule_of(rules, in_graph).remedy

            assert call(comm, array) == "none"
            assert comm.last_transfer is not None
            assert "call register(array) on every rank" in comm.last_transfer.reason
            rules = comm.explain(array)
            assert [rule_of(rules, name).passed for name in (eager, in_graph)] == [False, True]
            with comm.register(array):
                assert call(comm, array) == "local"
                assert comm.last_transfer is not None
                assert comm.last_transfer.zero_copy
                assert comm.last_transfer.reason == ""
                rules = comm.explain(array)
                assert [rule_of(rules, name).passed for name in (eager, in_graph)] == [True, True]
                assert "'local'" in rule_of(rules, eager).detail
            assert call(comm, symmetric) == "local"
            comm.all_reduce(array[:4], symmetric)
            comm.synchronize()
            assert comm.last_transfer.registration == "none"  # one of the two is not
            comm.all_to_all(symmetric, symmetric)
            comm.synchronize()
            assert comm.last_transfer.reason == "all_to_all in place copies the input"

        work.run(comms, body)


@pytest.mark.parametrize("switched_off", [False, True])
def test_a_captured_call_is_registered_by_nccl_unless_that_is_switched_off(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl, switched_off: bool
) -> None:
    if switched_off:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    with ranks(device) as comms:

        def body(comm: Communicator) -> None:
            array, symmetric = array_of(pool_of(comm)), comm.empty(4, "i4")
            graph, _ = captured(comm, array)
            transfer = comm.last_transfer
            assert transfer is not None
            assert transfer.registration == ("none" if switched_off else "graph")
            assert ("NCCL_GRAPH_REGISTER=0" in transfer.reason) == switched_off
            rule = rule_of(comm.explain(array), "registered with NCCL when captured")
            assert rule.passed is not switched_off
            more, _ = captured(comm, symmetric)
            assert comm.last_transfer is not None
            assert comm.last_transfer.registration == "local"
            del graph, more
            work.collected(lambda: not comm.leases())

        work.run(comms, body)


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
    device: EmulatedDriver, nccl: FakeNccl
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
            comm.close()
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
