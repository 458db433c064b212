"""Memory that a graph uses is nobody else's while the graph lives."""

from __future__ import annotations

import gc
from typing import Any

import collective_workers as work
import pytest
from faults import FaultyDriver
from graph_workers import GRANULE, array_of, captured, fill, pool_of, run

import cupy_zc
from cupy_zc import Communicator
from cupy_zc.driver.host import HostDriver


def test_a_temporary_of_a_capture_is_nobody_elses_while_the_graph_lives() -> None:
    """Ends: 7s read back as 2s, because a replay wrote to a temporary that had a new owner."""

    def body(comm: Communicator) -> None:
        pool, stream = pool_of(comm), comm._driver.make_stream()
        source = comm.empty(100, "i4")
        fill(source, 1)
        with stream:
            stream.begin_capture()
            temporary = array_of(pool)
            address = temporary.data.ptr
            comm.all_reduce(source, temporary)
            comm.all_reduce(temporary, temporary)
            del temporary
            graph = stream.end_capture()
            fresh = [array_of(pool) for _ in range(50)]
        fresh += [array_of(pool) for _ in range(50)]
        assert address not in {array.data.ptr for array in fresh}
        for array in fresh:
            fill(array, 7)
        comm.barrier()
        for _ in range(1000):
            graph.launch(stream)
        assert all((cupy_zc.view(array) == 7).all() for array in fresh)
        comm.barrier()

    run(2, body)


def test_a_temporary_is_reused_inside_its_capture_also_after_a_collective() -> None:
    def body(comm: Communicator) -> None:
        pool, stream = pool_of(comm), comm._driver.make_stream()
        with stream:
            stream.begin_capture()
            seen = set()
            for _ in range(20):
                temporary = array_of(pool)
                seen.add(temporary.data.ptr)
                comm.all_reduce(temporary, temporary)
                del temporary
            graph = stream.end_capture()
        assert len(seen) == 1
        assert comm.leases()[0].calls == 20
        comm.barrier()
        del graph

    run(2, body)


def test_an_array_dropped_after_the_capture_is_not_handed_on_while_the_graph_lives() -> None:
    """Ends: capture, drop the output, allocate the same size, replay: the new array is gone."""

    def body(comm: Communicator) -> None:
        pool, stream = pool_of(comm), comm._driver.make_stream()
        given, taken = array_of(pool), array_of(pool)
        fill(given, 2)
        address = taken.data.ptr
        stream.begin_capture()
        comm.all_reduce(given, taken, stream=stream)
        graph = stream.end_capture()
        del taken
        fresh = [array_of(pool) for _ in range(20)]
        for array in fresh:
            fill(array, 7)
        comm.barrier()
        graph.launch(stream)
        assert all((cupy_zc.view(array) == 7).all() for array in fresh)
        comm.barrier()
        del graph
        assert comm.leases() == ()
        held = [array_of(pool) for _ in range(200)]
        assert address in {array.data.ptr for array in held}

    run(2, body)


def test_a_symmetric_array_dropped_after_the_capture_is_kept_on_all_ranks() -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(100, "i4")
        address = array.data.ptr
        graph, _ = captured(comm, array)
        del array
        assert comm.empty(100, "i4").data.ptr != address
        if comm.rank:
            del graph  # on one rank first
            assert comm.leases() == ()
        comm.barrier()
        assert comm.empty(100, "i4").data.ptr != address
        graph = None
        assert comm.leases() == ()
        comm.barrier()
        comm.empty(1)  # tells of what was dropped
        assert address in {each.data.ptr for each in [comm.empty(100, "i4") for _ in range(5)]}

    run(2, body)


def test_growth_and_the_limit_of_a_pool_in_a_capture() -> None:
    def body(comm: Communicator) -> None:
        pool, stream = pool_of(comm), comm._driver.make_stream()
        source = comm.empty(1000, "i4")
        fill(source, 1)
        with stream:
            stream.begin_capture()
            held = [array_of(pool, 1000) for _ in range(5)]  # grows more than once
            for array in held:
                comm.all_reduce(source, array)
            pool.set_limit(size=pool.total_bytes())
            calls = comm.leases()[0].calls
            with pytest.raises(cupy_zc.OutOfMemoryError):
                array_of(pool, 1 << 16)
            assert comm.leases()[0].calls == calls
            pool.free_all_blocks()
            graph = stream.end_capture()
        comm.barrier()
        graph.launch(stream)
        assert all((cupy_zc.view(array) == 2).all() for array in held)
        comm.barrier()

    run(2, body)


def test_garbage_collection_in_a_capture_makes_no_driver_call() -> None:
    """Ends: a finalizer that calls CUDA, which invalidates a capture."""
    driver = FaultyDriver(HostDriver(granularity=GRANULE, memory=1 << 30))
    sockets: list[Any] = []
    with work.communicators(2, driver=driver) as comms:

        def make(comm: Communicator) -> list[Any]:
            array = array_of(pool_of(comm))
            graph, _ = captured(comm, array)
            part = comm.split(0)
            assert part is not None
            sockets.extend([part._talk, part._node.letters, part._bootstrap])
            other, _ = captured(part, array)
            litter = [graph, other, array, array_of(pool_of(comm)), comm.empty(3), part]
            litter.append(litter)  # which only the collector can drop
            return litter

        litter = work.run(comms, make)
        stream = comms[0]._driver.make_stream()
        stream.begin_capture()
        litter.clear()
        before = driver.calls.copy()
        gc.collect()
        assert driver.calls == before
        stream.end_capture()
        work.run(comms, lambda comm: comm.collect())
        assert [comm.leases() for comm in comms] == [(), ()]
        for each in sockets:  # which want to be closed
            each.close()
