"""send, recv and send_recv of the device engine without a GPU."""

from __future__ import annotations

import collective_workers as work
import numpy as np
import pytest
from collective_memory import filled, got, put
from collective_workers import meet
from device_ranks import device, ranks
from emulated_driver import EmulatedDriver

from cupy_zc import Communicator, MismatchError
from cupy_zc.collectives import device_mail
from cupy_zc.collectives.device_mail import MailSizes

__all__ = ["device"]  # a fixture

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("count", [0, 3, 1000, 40_000])
def test_a_ring_of_sends_before_any_receive_does_not_dead_lock(
    device: EmulatedDriver, n: int, count: int
) -> None:
    """More of them than a channel has letters, and slots."""
    with ranks(n, device) as comms:

        def body(comm: Communicator) -> None:
            right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
            sent = [filled(comm, np.full(count, 20 * comm.rank + i, "f4")) for i in range(12)]
            taken = [comm.empty(count, "f4") for _ in sent]
            meet(comm)
            stream = device.current_stream()
            for array in sent:
                comm.send(array, right)
                device.fill(array.data.ptr, 0, array.nbytes, stream)
            assert not count or not (got(sent[0])).any()
            for array in taken:
                comm.recv(array, left)
            meet(comm)
            for i, array in enumerate(taken):
                np.testing.assert_array_equal(got(array), np.full(count, 20 * left + i, "f4"))

        work.run(comms, body)


@pytest.mark.parametrize("count", [0, 1, 2047, 2049, 100_001])
def test_send_recv_exchanges_arrays_and_meets_a_send_and_a_recv(
    device: EmulatedDriver, count: int
) -> None:
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            source = filled(comm, np.arange(count, dtype="f4") + comm.rank)
            target = comm.empty(count, "f4")
            wanted = np.arange(count, dtype="f4") + 1 - comm.rank
            meet(comm)
            for _ in range(3):  # the later ones are repeats
                comm.send_recv(source, target, 1 - comm.rank)
            meet(comm)
            np.testing.assert_array_equal(got(target), wanted)
            put(target, np.zeros(count, "f4"))
            if comm.rank:
                comm.send_recv(source, target, 0)
            else:
                comm.send(source, 1)
                comm.recv(target, 1)
            meet(comm)
            np.testing.assert_array_equal(got(target), wanted)

        work.run(comms, body)


@pytest.mark.parametrize("nbytes", [0, 511, 512, 513, 5000, 8191, 8192, 8193, 30_001])
def test_a_message_that_many_blocks_pass_arrives_whole(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """Up to 8 KiB as a letter, by one to three blocks, and by two where a send may wait."""
    monkeypatch.setattr(device_mail, "LEAST_SHEET", 480)
    monkeypatch.setattr(device_mail, "KEPT_FREE", 2)
    monkeypatch.setattr(MailSizes, "of", lambda *_, **__: MailSizes(8192, 4, 2048, 2, 3))
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            given = np.random.default_rng(comm.rank).integers(0, 256, nbytes).astype("u1")
            wanted = np.random.default_rng(1 - comm.rank).integers(0, 256, nbytes).astype("u1")
            source, target = filled(comm, given), comm.empty(nbytes, "u1")
            meet(comm)
            for _ in range(3):
                put(target, np.zeros(nbytes, "u1"))
                comm.send_recv(source, target, 1 - comm.rank)
                meet(comm)
                np.testing.assert_array_equal(got(target), wanted)
            put(target, np.zeros(nbytes, "u1"))
            comm.send(source, 1 - comm.rank)
            comm.recv(target, 1 - comm.rank)
            meet(comm)
            np.testing.assert_array_equal(got(target), wanted)

        work.run(comms, body)


@pytest.mark.parametrize("count", [100, 70_000])
def test_what_goes_to_one_peer_keeps_its_order_whatever_calls_it_goes_by(
    device: EmulatedDriver, count: int
) -> None:
    """A send is pushed by itself; a send_recv right behind it must not overtake it."""
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            peer = 1 - comm.rank
            sent = [filled(comm, np.full(count, 10 * comm.rank + i, "f4")) for i in range(4)]
            taken = [comm.empty(count, "f4") for _ in sent]
            meet(comm)
            for turn in range(3):
                for i in range(3):
                    comm.send(sent[i], peer)
                for i in range(2):
                    comm.recv(taken[i], peer)
                if comm.rank:
                    comm.recv(taken[2], peer)
                    comm.send_recv(sent[3], taken[3], peer)
                else:
                    comm.send_recv(sent[3], taken[2], peer)
                    comm.recv(taken[3], peer)
                meet(comm)
                for i, array in enumerate(taken):
                    np.testing.assert_array_equal(
                        got(array), np.full(count, 10 * peer + i, "f4"), f"turn {turn}"
                    )

        work.run(comms, body)


def test_a_rank_sends_to_itself(device: EmulatedDriver) -> None:
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            one, other = filled(comm, np.arange(9)), comm.zeros(9, "i8")
            comm.send(one, comm.rank)
            put(one, np.zeros(9, "i8"))
            comm.recv(other, comm.rank)
            np.testing.assert_array_equal(got(other), np.arange(9))
            comm.send_recv(other, one, comm.rank)
            np.testing.assert_array_equal(got(one), np.arange(9))
            comm.send(one, comm.rank)
            with pytest.raises(MismatchError, match="8 elements of int64"):
                comm.recv(other[:8], comm.rank)
            with pytest.raises(MismatchError, match="has sent nothing"):
                comm.recv(other, comm.rank)

        work.run(comms, body)


def test_a_receiver_that_expects_another_array_is_told_and_nothing_is_written(
    device: EmulatedDriver,
) -> None:
    with ranks(2, device) as comms:

        def body(comm: Communicator) -> None:
            array = filled(comm, np.full(50, comm.rank, "f4"))
            meet(comm)
            if comm.rank:
                comm.recv(array[:40], 0)
                with pytest.raises(
                    MismatchError,
                    match="rank 0 has 50 elements of float32, and rank 1 has 40 elements",
                ):
                    comm.synchronize()
                np.testing.assert_array_equal(got(array), np.ones(50, "f4"))
            else:
                comm.send(array, 1)

        assert work.attempt(comms, body) == [None, None]


def test_mail_and_collectives_take_turns_on_a_stream(device: EmulatedDriver) -> None:
    with ranks(3, device) as comms:

        def body(comm: Communicator) -> None:
            right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
            array = filled(comm, np.full(500, comm.rank + 1, "f4"))
            given = comm.zeros(500, "f4")
            meet(comm)
            for _ in range(3):
                comm.send(array, right)
                comm.recv(given, left)
                comm.all_reduce(given, array)
            meet(comm)
            np.testing.assert_array_equal(got(array), np.full(500, 6 * 3 * 3, "f4"))

        work.run(comms, body)
