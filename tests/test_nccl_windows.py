"""Windows, the symmetric heap, and what is said of memory that NCCL has or has not."""

from __future__ import annotations

import collective_workers as work
import cupy
import pytest
from device_ranks import device
from emulated_driver import EmulatedDriver
from fake_nccl import FakeNccl
from graph_workers import array_of, captured, pool_of
from nccl_engines import careless, engines_of, nccl, within
from nccl_registered import call, has, held, places, ranks, span_of

from cupy_zc import AgreementError, ClosedError, Communicator, PeerTimeoutError
from cupy_zc.collectives.nccl_library import WINDOWS_FROM
from cupy_zc.registration import Rule

__all__ = ["careless", "device", "nccl"]  # fixtures

pytestmark = pytest.mark.timeout(60)


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
                assert "register with NCCL failed on rank 1: DriverError" in str(caught.value)
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
