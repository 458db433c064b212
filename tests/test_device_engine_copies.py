"""What the device engine copies before a call, without a GPU: overlapping arrays, and sends."""

from __future__ import annotations

from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from collective_memory import filled, got, put
from collective_workers import meet
from device_ranks import device, ranks
from emulated_driver import EmulatedDriver

from cupy_zc import Communicator

__all__ = ["device"]  # a fixture

pytestmark = pytest.mark.timeout(120)


def foreign(size: int) -> Any:
    """What stands for an allocator that knows nothing of captures."""
    raise AssertionError(f"{size} bytes were taken from the allocator of the caller")


@pytest.fixture(autouse=True)
def _allocator() -> Any:
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(foreign)
    yield
    cupy.cuda.set_allocator(before)


@pytest.mark.parametrize("count", [500, 40_000])
def test_arrays_that_overlap_are_copied_in_a_capture_as_well(
    device: EmulatedDriver, count: int
) -> None:
    """It ends copies that a graph reads and the caller's allocator hands on."""
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            stream = device.make_stream(non_blocking=True)
            numbers = np.arange(count + 7, dtype="f4") % 100 + comm.rank
            array = filled(comm, numbers)
            wanted = 2 * numbers[:count] + 1 - 2 * comm.rank
            meet(comm)
            comm.all_reduce(array[:count], array[7:])
            meet(comm)
            np.testing.assert_array_equal(got(array)[7:], wanted)
            assert comm.last_transfer is not None
            assert "overlaps" in comm.last_transfer.reason
            stream.begin_capture()
            comm.all_reduce(array[:count], array[7:], stream=stream)
            graph = stream.end_capture()
            for _ in range(3):
                put(array, numbers)
                meet(comm)
                graph.launch(stream)
                stream.synchronize()
                np.testing.assert_array_equal(got(array)[7:], wanted)
            meet(comm)
            del graph

        work.run(comms, body)


@pytest.mark.parametrize("count", [500, 40_000])
def test_arrays_of_a_send_recv_may_overlap(device: EmulatedDriver, count: int) -> None:
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            peer = 1 - comm.rank
            stream = device.make_stream(non_blocking=True)
            numbers = np.arange(count + 7, dtype="f4") + comm.rank
            array = filled(comm, numbers)
            stream.begin_capture()
            comm.send_recv(array[:count], array[7:], peer, stream=stream)
            graph = stream.end_capture()
            for replayed in (False, True, True):
                put(array, numbers)
                meet(comm)
                if replayed:
                    graph.launch(stream)
                else:
                    comm.send_recv(array[:count], array[7:], peer, stream=stream)
                stream.synchronize()
                np.testing.assert_array_equal(got(array)[7:], numbers[:count] + peer - comm.rank)
            meet(comm)

        work.run(comms, body)


def test_a_send_recv_is_captured_while_a_send_to_the_peer_is_under_way(
    device: EmulatedDriver,
) -> None:
    """It ends an event of a capturing stream, which CUDA refuses."""
    count = 200_000
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            peer = 1 - comm.rank
            stream = device.make_stream(non_blocking=True)
            large, taken = filled(comm, np.full(count, comm.rank, "f4")), comm.zeros(count, "f4")
            given, target = filled(comm, np.full(9, comm.rank, "f4")), comm.zeros(9, "f4")
            meet(comm)
            comm.send(large, peer)
            stream.begin_capture()
            comm.send_recv(given, target, peer, stream=stream)
            graph = stream.end_capture()
            comm.recv(taken, peer)
            meet(comm)
            assert (got(taken) == peer).all()
            graph.launch(stream)
            stream.synchronize()
            assert (got(target) == peer).all()
            meet(comm)
            del graph

        work.run(comms, body)


def test_a_rank_that_exchanges_overlapping_arrays_with_itself_says_that_it_copied(
    device: EmulatedDriver,
) -> None:
    """It ends a transfer that called a copy zero-copy, where the way to a peer did not."""
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.arange(20, dtype="f4"))
            comm.send_recv(array[:15], array[5:], comm.rank)
            meet(comm)
            np.testing.assert_array_equal(got(array)[5:], np.arange(15, dtype="f4"))
            transfer = comm.last_transfer
            assert transfer is not None
            assert not transfer.zero_copy
            assert "overlaps" in transfer.reason

        work.run(comms, body)
