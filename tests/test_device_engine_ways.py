"""Options and ends of the device engine without a GPU: registration, strict, lost work, graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from collective_memory import filled, got, put
from collective_workers import meet
from device_ranks import KERNELS, device, engine_of, ranks, zero_copy
from emulated_driver import EmulatedDriver

import cupy_zc
from cupy_zc import (
    ClosedError,
    Communicator,
    DriverError,
    MemoryPool,
    NotZeroCopyError,
    PeerTimeoutError,
)
from cupy_zc.driver.api import KernelName
from cupy_zc.memory.pool import reap

__all__ = ["device"]  # a fixture

pytestmark = pytest.mark.timeout(120)

#: Elements of an all_reduce that goes through the arrays of the peers.
LARGE = 40_000


def of_pool(driver: EmulatedDriver, count: int, value: float) -> cupy.ndarray:
    pool = MemoryPool(driver=driver, segment_size=1 << 20)
    array = cupy.ndarray(count, "f4", pool.malloc(4 * count))
    put(array, np.full(count, value, "f4"))
    return array


def test_arrays_of_a_loop_are_registered_on_their_own(device: EmulatedDriver) -> None:
    with ranks(2, device, register="auto") as comms:

        def body(comm: Communicator) -> int:
            array = of_pool(device, LARGE, 0.0)
            for number in range(1, 200):
                put(array, np.full(LARGE, comm.rank + number, "f4"))
                meet(comm)
                comm.all_reduce(array, array)
                meet(comm)
                assert (got(array) == 2 * number + 1).all()
                if zero_copy(comm):
                    return number
            return 0

        first, second = work.run(comms, body)
        assert first == second > 0


def test_a_strict_communicator_refuses_what_would_be_copied(device: EmulatedDriver) -> None:
    with ranks(2, device, strict=True) as comms:

        def body(comm: Communicator) -> None:
            array = of_pool(device, LARGE, 1.0)
            with pytest.raises(NotZeroCopyError, match="staged"):
                comm.all_reduce(array, array)
            small = array[:100]  # goes through the lane: nobody touches it
            meet(comm)
            comm.all_reduce(small, small)
            with comm.register(array):
                comm.all_reduce(array, array)
                meet(comm)
            assert (got(array)[:100] == 4).all()
            assert (got(array)[100:] == 2).all()

        work.run(comms, body)


def test_a_launch_that_is_refused_ends_the_call_on_every_rank(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks(2, device, timeout=60) as comms:

        def refuse(*_: Any) -> None:
            raise DriverError("cuLaunchKernel", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", 701)

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            meet(comm)
            engine = engine_of(comm)
            comm.all_reduce(array, array)
            comm.synchronize()
            meet(comm)
            if comm.rank:
                shapes = engine._shapes
                shapes.update((key, shape._replace(launch=refuse)) for key, shape in shapes.items())
                engine._repeat = None
                comm._line._repeats.clear()
                with pytest.raises(DriverError, match="OUT_OF_RESOURCES"):
                    comm.all_reduce(array, array)
                with pytest.raises(ClosedError, match="OUT_OF_RESOURCES"):
                    comm.all_reduce(array, array)
                return
            begin = time.monotonic()
            comm.all_reduce(array, array)
            with pytest.raises(PeerTimeoutError, match="rank 1"):
                comm.synchronize()
            assert time.monotonic() - begin < 15

        work.run(comms, body)
        for comm in comms:
            comm.close()


@pytest.mark.parametrize("count", [10, 100_000])
def test_messages_that_nobody_takes_do_not_keep_a_communicator_open(
    device: EmulatedDriver, count: int
) -> None:
    with ranks(2, device, timeout=1) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(count, "f4"))
            meet(comm)
            for _ in range(12):
                comm.send(array, 1 - comm.rank)
            assert (got(array) == 1).all()
            begin = time.monotonic()
            comm.close()
            assert time.monotonic() - begin < 8

        work.run(comms, body)


def test_a_rank_that_closes_is_not_waited_for_by_a_message(device: EmulatedDriver) -> None:
    with ranks(2, device, timeout=60) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            meet(comm)
            if comm.rank:
                comm.close()
                return
            begin = time.monotonic()
            comm.recv(array, 1)
            with pytest.raises(PeerTimeoutError, match=r"rank 1 ended .* in a message"):
                comm.synchronize()
            assert time.monotonic() - begin < 15

        work.run(comms, body)


def test_a_closed_communicator_holds_no_memory_though_it_is_referred_to(
    device: EmulatedDriver,
) -> None:
    """It ends waits for the device in the middle of calls of another communicator.

    The pool of a heap whose memory came back late was released by whichever pool was at work.
    """
    free = device.memory_info(0).free
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            for _ in range(3):
                comm.all_reduce(array, array)
                comm.send(array, 1 - comm.rank)
                comm.recv(array, 1 - comm.rank)
            meet(comm)

        work.run(comms, body)
        assert device.memory_info(0).free < free
        for comm in comms:
            comm.close()
        reap()
        assert device.memory_info(0).free >= free


# Graphs


def captured(comm: Communicator, stream: Any, *arrays: cupy.ndarray) -> Any:
    """A graph that sums arrays in place. Collective."""
    stream.begin_capture()
    for array in arrays:
        comm.all_reduce(array, array, stream=stream)
    return stream.end_capture()


def test_a_replay_that_a_rank_does_not_make_is_told_by_the_next_call(
    device: EmulatedDriver,
) -> None:
    with ranks(2, device, timeout=1) as comms:

        def body(comm: Communicator) -> None:
            stream = device.make_stream(non_blocking=True)
            array = filled(comm, np.ones(100, "f4"))
            graph = captured(comm, stream, array)
            graph.launch(stream)
            stream.synchronize()
            meet(comm)
            assert (got(array) == 2).all()
            if comm.rank:
                return
            graph.launch(stream)
            stream.synchronize()
            with pytest.raises(PeerTimeoutError, match=r"rank 1 did not come to call 2 of lane 1"):
                comm.check()
            graph.launch(stream)  # returns at once, and changes nothing
            stream.synchronize()
            assert (got(array) == 2).all()

        work.run(comms, body)
        for comm in comms:
            comm.close()  # without force: what failed is over


def test_calls_of_a_loop_release_what_a_graph_held_that_is_gone(device: EmulatedDriver) -> None:
    """It ends leases that lived on beside a loop, whose calls take the short way."""
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            stream = device.make_stream(non_blocking=True)
            array = filled(comm, np.ones(100, "f4"))
            graph = captured(comm, stream, array)
            for _ in range(3):
                comm.all_reduce(array, array, "max")
            comm.synchronize()
            leases = comm._registry.leases
            assert leases._live
            del graph
            work.collected(lambda: all(lease.released for lease in leases._live.values()))
            comm.all_reduce(array, array, "max")
            assert not leases._live
            meet(comm)

        work.run(comms, body)


def test_the_null_stream_that_a_call_names_is_waited_for_whichever_is_current(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks(2, device) as comms:
        null = device.current_stream()
        assert null.ptr == 0
        recorded: list[Any] = []
        record = device.record_event
        monkeypatch.setattr(device, "record_event", lambda s: recorded.append(s) or record(s))

        def body(comm: Communicator) -> None:
            array = filled(comm, np.ones(100, "f4"))
            comm.all_reduce(array, array, stream=null)
            comm.synchronize()
            assert (got(array) == 2).all()

        work.run(comms, body)
        assert recorded.count(null) == 2


def test_a_graph_reads_its_table_of_windows_after_it_grew(device: EmulatedDriver) -> None:
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            stream = device.make_stream(non_blocking=True)
            array = filled(comm, np.ones(LARGE, "f4"))
            graph = captured(comm, stream, array)
            table = engine_of(comm)._windows
            before = table.address
            kept = [of_pool(device, 10, 0.0) for _ in range(table.arenas + 1)]
            for each in kept:
                comm.register(each)
            comm.all_reduce(kept[-1], kept[-1])
            meet(comm)
            assert table.address != before
            for turn in range(3):
                graph.launch(stream)
                stream.synchronize()
                assert (got(array) == 2 ** (turn + 1)).all()
            meet(comm)
            del graph

        work.run(comms, body)


def test_after_a_forced_close_a_replay_does_nothing(device: EmulatedDriver) -> None:
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            stream = device.make_stream(non_blocking=True)
            array = of_pool(device, LARGE, 1.0)
            graph = captured(comm, stream, array)
            assert [lease.lane for lease in comm.leases()] == [1]
            with pytest.raises(cupy_zc.LiveGraphsError):
                comm.close()
            graph.launch(stream)
            stream.synchronize()
            assert (got(array) == 2).all()
            meet(comm)
            comm.close(force=True)
            for _ in range(2):
                with contextlib.suppress(ClosedError):
                    graph.launch(stream)
                stream.synchronize()
            assert (got(array) == 2).all()

        work.run(comms, body)


def test_to_preload_asks_for_each_kernel_once_and_tells_of_an_error(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks(2, device) as comms:
        loaded: list[KernelName] = []

        def note(number: int, name: KernelName) -> int:
            loaded.append(name)
            return 0

        monkeypatch.setattr(device, "load", note)
        comms[0].preload("float32", "sum")
        pair = dataclasses.replace(KERNELS[0], source="ll128_pair.cu")
        assert {pair} <= {dataclasses.replace(each, function="") for each in loaded}
        assert len(loaded) == len(set(loaded)) > 8

        def refuse(number: int, name: KernelName) -> int:
            raise DriverError("cupy.RawModule", "CompileException", 0, cause=name.source)

        monkeypatch.setattr(device, "load", refuse)
        with pytest.raises(DriverError, match="CompileException"):
            comms[1].preload("int8", "max")


def test_the_lane_of_a_graph_has_scratch_once_a_call_needs_some(device: EmulatedDriver) -> None:
    """Ends: forty megabytes for each graph of small calls."""
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            engine = engine_of(comm)
            small, large = comm.empty(100, "f4"), comm.empty(1 << 18, "f4")
            other = comm.empty(1 << 18, "f4")
            cupy_zc.copyto(small, comm.rank + 1)
            cupy_zc.copyto(large, comm.rank + 1)
            stream, sizes = device.make_stream(non_blocking=True), []
            meet(comm)
            with stream:
                stream.begin_capture()
                for source, target in ((small, small), (large, other), (small, small)):
                    comm.all_reduce(source, target)
                    (lease,) = comm.leases()
                    sizes.append(lease.lane_bytes)
                graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
            meet(comm)
            np.testing.assert_array_equal(got(small), np.full(100, 6, "f4"))
            np.testing.assert_array_equal(got(other), np.full(1 << 18, 3, "f4"))
            scratch = engine._machine.sizes.scratch_bytes
            assert sizes == [sizes[0], sizes[0] + scratch, sizes[0] + scratch]
            assert sizes[-1] == engine.lane_bytes(0)
            del graph

        work.run(comms, body)
