"""send, recv and send_recv of the device engine on GPUs, with ranks in threads."""

from __future__ import annotations

import collective_workers as work
import cupy
import numpy as np
import pytest
from collective_memory import filled, got, put
from collective_workers import meet
from gpu_ranks import ranks

from cupy_zc import Communicator, MismatchError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("count", [0, 3, 5000, 1 << 20])
def test_a_ring_of_sends_before_any_receive_does_not_dead_lock(n: int, count: int) -> None:
    with ranks(n) as comms:

        def body(comm: Communicator) -> None:
            right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
            sent = [filled(comm, np.full(count, 10 * comm.rank + i, "f4")) for i in range(20)]
            taken = [comm.empty(count, "f4") for _ in sent]
            meet(comm)
            for array in sent:
                comm.send(array, right)
                array.data.memset_async(0, array.nbytes, cupy.cuda.get_current_stream())
            for array in taken:
                comm.recv(array, left)
            meet(comm)
            for i, array in enumerate(taken):
                np.testing.assert_array_equal(got(array), np.full(count, 10 * left + i, "f4"))

        work.run(comms, body)


@pytest.mark.parametrize("count", [0, 1, 2047, 2049, 300_001, 9 << 20])
def test_send_recv_exchanges_arrays_and_meets_a_send_and_a_recv(count: int) -> None:
    with ranks(2) as comms:

        def body(comm: Communicator) -> None:
            source = filled(comm, np.arange(count, dtype="f4") + comm.rank)
            target = comm.empty(count, "f4")
            meet(comm)
            comm.send_recv(source, target, 1 - comm.rank)
            meet(comm)
            np.testing.assert_array_equal(got(target), np.arange(count, dtype="f4") + 1 - comm.rank)
            if comm.rank:
                comm.send_recv(source, target, 0)
            else:
                comm.send(source, 1)
                comm.recv(target, 1)
            meet(comm)
            np.testing.assert_array_equal(got(target), np.arange(count, dtype="f4") + 1 - comm.rank)

        work.run(comms, body)


@pytest.mark.parametrize("count", [100, 3 << 20])
def test_what_goes_to_one_peer_keeps_its_order_whatever_calls_it_goes_by(count: int) -> None:
    """A send is pushed by itself; a send_recv right behind it must not overtake it."""
    with ranks(2) as comms:

        def body(comm: Communicator) -> None:
            peer = 1 - comm.rank
            sent = [filled(comm, np.full(count, 10 * comm.rank + i, "f4")) for i in range(6)]
            taken = [comm.empty(count, "f4") for _ in sent]
            meet(comm)
            for i in (0, 2, 4):
                comm.send(sent[i], peer)
                if i:  # the peer's half of it comes later than its sends
                    comm.recv(taken[i - 2], peer)
                    comm.recv(taken[i - 1], peer)
                comm.send(sent[i + 1], peer)
            comm.recv(taken[4], peer)
            comm.recv(taken[5], peer)
            comm.send(sent[0], peer)
            comm.recv(taken[0], peer)
            comm.send_recv(sent[1], taken[1], peer)
            meet(comm)
            for i, array in enumerate(taken):
                np.testing.assert_array_equal(got(array), np.full(count, 10 * peer + i, "f4"))

        work.run(comms, body)


def test_a_rank_sends_to_itself() -> None:
    with ranks(2) as comms:

        def body(comm: Communicator) -> None:
            one, other = filled(comm, np.arange(9)), comm.zeros(9, "i8")
            comm.send(one, comm.rank)
            put(one, np.zeros(9, "i8"))
            comm.recv(other, comm.rank)
            np.testing.assert_array_equal(got(other), np.arange(9))
            comm.send(one, comm.rank)
            with pytest.raises(MismatchError, match="8 elements of int64"):
                comm.recv(other[:8], comm.rank)
            with pytest.raises(MismatchError, match="has sent nothing"):
                comm.recv(other, comm.rank)

        work.run(comms, body)


def test_a_receiver_that_expects_another_array_is_told_and_nothing_is_written() -> None:
    with ranks(2) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.full(50, comm.rank, "f4"))
            meet(comm)
            if comm.rank:
                comm.recv(array[:40], 0)
                with pytest.raises(MismatchError, match="rank 0 has 50 elements of float32"):
                    comm.synchronize()
                np.testing.assert_array_equal(got(array), np.ones(50, "f4"))
            else:
                comm.send(array, 1)

        work.attempt(comms, body)
