"""The double of NCCL does what the tests that use it take for NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import group_workers as workers
import numpy as np
import pytest
from emulated_driver import EmulatedDriver
from fake_nccl import FakeNccl, FakeWorld, fake_nccl
from nccl_ranks import BYTES, FLOAT, SUM, Rank, each_rank, rank_of

from cupy_zc.collectives.nccl_library import Nccl
from cupy_zc.errors import DriverError

pytestmark = pytest.mark.timeout(60)

#: ``ncclInt32`` and ``ncclAvg``.
INT, AVG = 2, 4


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDriver:
    return EmulatedDriver(tmp_path_factory.mktemp("kernels"), devices=2)


@pytest.fixture
def nccl(driver: EmulatedDriver) -> Iterator[FakeNccl]:
    """With which no mistake is made."""
    with fake_nccl(driver) as made:
        yield made


@pytest.fixture
def careless(driver: EmulatedDriver) -> Iterator[FakeNccl]:
    """With which mistakes are made, that a test looks for."""
    world = FakeWorld(driver, deadline=10)
    yield FakeNccl(world)
    world.stop()


def mistaken(nccl: FakeNccl, text: str) -> bool:
    return any(text in mistake for mistake in nccl.world.mistakes)


def test_it_is_what_the_engine_asks_for(nccl: FakeNccl) -> None:
    asked: Nccl = nccl
    assert asked.version == 22809


# Order


def test_calls_meet_in_the_order_of_each_rank(nccl: FakeNccl) -> None:
    def body(rank: Rank) -> Any:
        for _ in range(3):
            rank.add_all()
        return rank.got(5)

    for number, found in enumerate(each_rank(nccl, 3, body)):
        np.testing.assert_array_equal(found, [54, 54, 54, 54, number + 1])


def test_a_call_returns_before_the_others_come(nccl: FakeNccl) -> None:
    returned = threading.Event()

    def body(rank: Rank) -> Any:
        if rank.number:
            assert returned.wait(10)
        rank.add_all()
        returned.set()
        return rank.got(1)[0]

    assert each_rank(nccl, 2, body) == [3, 3]


def test_work_of_two_streams_runs_as_it_was_enqueued(nccl: FakeNccl) -> None:
    def body(rank: Rank) -> Any:
        other = rank.driver.make_stream(non_blocking=True)
        with rank.stream.hold():
            rank.add_all(4)
            rank.nccl.broadcast(rank.at, rank.at, 4, FLOAT, 1, rank.comm, other.ptr)
            assert not other.done
        other.synchronize()
        return rank.got(1)[0]

    assert each_rank(nccl, 2, body) == [3, 3]


def test_work_runs_in_the_order_of_its_stream(nccl: FakeNccl) -> None:
    def body(rank: Rank) -> Any:
        rank.driver.fill(rank.at, 0, 16, rank.stream)
        rank.add_all()
        return rank.got(1)[0]

    assert each_rank(nccl, 2, body) == [0, 0]


def test_empty_collectives_do_not_meet(nccl: FakeNccl) -> None:
    def body(rank: Rank) -> None:
        if rank.number:
            rank.add_all(0)
        rank.add_all()

    each_rank(nccl, 2, body)


# Groups


@pytest.mark.parametrize("size", [1, 3])
def test_sends_and_receives_of_a_group_are_one_operation(nccl: FakeNccl, size: int) -> None:
    def body(rank: Rank) -> Any:
        after, before = (rank.number + 1) % size, (rank.number - 1) % size
        where = (rank.comm, rank.stream.ptr)
        nccl.group_start()
        nccl.recv(rank.at + 64, 4, FLOAT, before, *where)
        nccl.group_start()
        nccl.send(rank.at, 4, FLOAT, after, *where)
        nccl.group_end()
        nccl.group_end()
        return rank.got(1, offset=64)[0]

    assert each_rank(nccl, size, body) == [(number - 1) % size + 1 for number in range(size)]


def test_pairs_do_not_wait_for_other_ranks(nccl: FakeNccl) -> None:
    def body(rank: Rank) -> Any:
        where = (rank.comm, rank.stream.ptr)
        if rank.number == 0:
            nccl.send(rank.at, 4, FLOAT, 1, *where)
        elif rank.number == 1:
            nccl.recv(rank.at, 4, FLOAT, 0, *where)
        rank.add_all()
        return rank.got(1)[0]

    assert each_rank(nccl, 3, body) == [5, 5, 5]


# Graphs


def captured(rank: Rank) -> Any:
    rank.stream.begin_capture()
    rank.add_all()
    return rank.stream.end_capture()


def test_each_replay_meets_again(nccl: FakeNccl) -> None:
    def body(rank: Rank) -> Any:
        graph = captured(rank)
        before = rank.got(1)[0]
        for _ in range(3):
            graph.launch(rank.stream)
        return before, rank.got(1)[0]

    assert each_rank(nccl, 2, body) == [(1, 12), (2, 12)]


def test_replays_have_their_turn_when_they_are_launched(nccl: FakeNccl) -> None:
    def body(rank: Rank) -> Any:
        graph = captured(rank)
        other = rank.driver.make_stream(non_blocking=True)
        held = (rank.stream if rank.number else other).hold()
        graph.launch(rank.stream)
        rank.nccl.broadcast(rank.at, rank.at, 4, FLOAT, 1, rank.comm, other.ptr)
        graph.launch(rank.stream)
        held.release()
        other.synchronize()
        return rank.got(1)[0]

    assert each_rank(nccl, 2, body) == [6, 6]


def test_graphs_in_graphs_are_replayed(nccl: FakeNccl) -> None:
    def body(rank: Rank) -> Any:
        inner = captured(rank)
        rank.stream.begin_capture()
        inner.launch(rank.stream)
        inner.launch(rank.stream)
        outer = rank.stream.end_capture()
        outer.launch(rank.stream)
        return rank.got(1)[0]

    assert each_rank(nccl, 2, body) == [6, 6]


@pytest.mark.parametrize("way", ["destroy", "abort"])
def test_communicators_are_not_given_back_while_graphs_live(nccl: FakeNccl, way: str) -> None:
    rank = rank_of(nccl, 1, 0, nccl.unique_id())
    graphs = [captured(rank)]
    threading.Timer(0.1, graphs.clear).start()
    getattr(nccl, way)(rank.comm)
    assert not graphs
    assert not nccl.world.alive


@pytest.mark.parametrize("way", ["destroy", "abort"])
def test_a_test_can_say_that_a_graph_lives(nccl: FakeNccl, way: str) -> None:
    rank = rank_of(nccl, 1, 0, nccl.unique_id())
    nccl.world.graphs_hold.add(0)
    thread = threading.Thread(target=getattr(nccl, way), args=(rank.comm,), daemon=True)
    thread.start()
    thread.join(0.1)
    assert nccl.world.alive
    nccl.world.release(nccl.world.graphs_hold)
    thread.join(10)
    assert not nccl.world.alive


# Aborts


def test_abort_ends_work_that_waits_and_writes_nothing(nccl: FakeNccl) -> None:
    def body(rank: Rank) -> Any:
        if rank.number:
            nccl.abort(rank.comm)
            return 2
        rank.add_all()
        rank.add_all()
        rank.driver.fill(rank.at + 16, 0, 16, rank.stream)
        assert not rank.stream.done
        nccl.abort(rank.comm)
        return rank.got(1)[0] + rank.got(1, offset=16)[0]

    assert each_rank(nccl, 2, body) == [1, 2]


def test_a_rank_that_was_aborted_lets_the_others_wait(nccl: FakeNccl) -> None:
    aborted = threading.Event()

    def body(rank: Rank) -> Any:
        if rank.number == 0:
            rank.add_all()
            nccl.abort(rank.comm)
            aborted.set()
        else:
            assert aborted.wait(10)
            rank.add_all()
            time.sleep(0.05)
            assert not rank.stream.done
            nccl.abort(rank.comm)
        return rank.got(1)[0]

    assert each_rank(nccl, 2, body) == [1, 2]


def test_work_that_nobody_meets_ends_as_a_mistake(careless: FakeNccl) -> None:
    def body(rank: Rank) -> None:
        careless.world.deadline = 0.3
        if rank.number == 0:
            rank.add_all()
            rank.stream.synchronize()

    each_rank(careless, 2, body)
    assert mistaken(careless, "all_reduce of rank 0: waited for 0.3 s")


# Communicators


def test_ranks_wait_for_each_other_before_they_go_on(nccl: FakeNccl) -> None:
    nccl.world.slow[1] = 0.1
    began = time.monotonic()
    each_rank(nccl, 2, lambda rank: None)
    assert time.monotonic() - began >= 0.1


def test_a_rank_that_hangs_lets_all_hang(nccl: FakeNccl) -> None:
    nccl.world.hanging.add(1)
    threading.Timer(0.1, nccl.world.release, (nccl.world.hanging,)).start()
    assert each_rank(nccl, 2, lambda rank: bool(nccl.world.hanging)) == [False, False]


def test_ranks_that_wait_for_one_that_failed_can_be_let_go(nccl: FakeNccl) -> None:
    nccl.world.failures["init", 1] = ["SystemError"]
    identity = nccl.unique_id()
    threading.Timer(0.1, nccl.world.stop).start()
    outcomes = workers.in_threads(2, lambda number: rank_of(nccl, 2, number, identity))
    assert [(error.call, error.result, error.code) for error in outcomes] == [
        ("ncclCommInitRankConfig", "RemoteError", 6),
        ("ncclCommInitRankConfig", "SystemError", 2),
    ]
    assert "[1] did not come" in str(outcomes[0])


def test_who_comes_when_the_others_gave_up_does_not_join(careless: FakeNccl) -> None:
    identity = careless.unique_id()
    careless.world.deadline = 0.1
    for number in (0, 1):
        with pytest.raises(DriverError, match=rf"ranks \[{1 - number}\] did not come"):
            rank_of(careless, 2, number, identity)
    careless.world.hanging.add(0)
    with pytest.raises(DriverError, match="the test let it hang"):
        rank_of(careless, 1, 0, careless.unique_id())
    assert not careless.world.made


@pytest.mark.parametrize("apart", [False, True])
def test_ranks_can_have_to_have_devices_of_their_own(driver: EmulatedDriver, apart: bool) -> None:
    with fake_nccl(driver, distinct_devices=True) as nccl:
        identity = nccl.unique_id()

        def join(number: int) -> None:
            with driver.use_device(number if apart else 0):
                nccl.destroy(rank_of(nccl, 2, number, identity).comm)

        for outcome in workers.in_threads(2, join):
            if apart:
                assert outcome is None
            else:
                assert isinstance(outcome, DriverError)
                assert "Duplicate GPU detected: rank 0 and rank 1" in str(outcome)


def test_errors_of_the_background_are_those_of_the_test(nccl: FakeNccl) -> None:
    nccl.world.async_errors[1] = "a cable was cut"
    found = each_rank(nccl, 2, lambda rank: nccl.async_error(rank.comm))
    assert found == ["", "a cable was cut"]


def test_what_was_not_given_back_is_told(careless: FakeNccl) -> None:
    rank = rank_of(careless, 1, 0, careless.unique_id())
    assert careless.world.alive == [rank.comm]
    careless.destroy(rank.comm)
    assert not careless.world.alive


# Registration


def test_registrations_and_windows_are_counted(nccl: FakeNccl) -> None:
    nccl.world.no_window.add(1)
    nccl.world.failures["register", 1] = [None, "InternalError"]

    def body(rank: Rank) -> int:
        handle = nccl.register(rank.comm, rank.at, BYTES)
        refused = False
        try:
            nccl.deregister(rank.comm, nccl.register(rank.comm, rank.at, 64))
        except DriverError as error:
            refused = error.call == "ncclCommRegister"
        assert refused == (rank.number == 1)
        window = nccl.register_window(rank.comm, rank.at, BYTES)
        assert (window is None) == (rank.number == 1)
        held = len(rank.comm.registered) + len(rank.comm.windows)
        nccl.deregister(rank.comm, handle)
        if window is not None:
            nccl.deregister_window(rank.comm, window)
        return held

    assert each_rank(nccl, 2, body) == [2, 1]
    assert sorted((rank, span.size) for rank, span in nccl.world.registrations) == [
        (0, 64), (0, BYTES), (1, 64), (1, BYTES),
    ]  # fmt: skip


def test_a_window_waits_for_all_ranks(careless: FakeNccl) -> None:
    careless.world.failures["register_window", 1] = ["SystemError"]

    def body(rank: Rank) -> str:
        careless.world.deadline = 0.3
        with pytest.raises(DriverError) as caught:
            careless.register_window(rank.comm, rank.at, BYTES)
        return caught.value.result

    assert each_rank(careless, 2, body) == ["RemoteError", "SystemError"]


# Mistakes


def test_ranks_that_differ_are_a_mistake(careless: FakeNccl) -> None:
    def body(rank: Rank) -> Any:
        rank.add_all(4 + rank.number)
        rank.add_all()
        return rank.got(1)[0]

    assert each_rank(careless, 2, body) == [3, 3]
    assert mistaken(careless, "ranks called different things")


WRONG: dict[str, Callable[[Rank], object]] = {
    "overlap": lambda r: r.nccl.all_reduce(
        r.at, r.at + 4, 4, FLOAT, SUM, r.comm, r.stream.ptr
    ),
    "averages integers": lambda r: r.nccl.all_reduce(
        r.at, r.at, 4, INT, AVG, r.comm, r.stream.ptr
    ),
    "not mapped": lambda r: r.nccl.broadcast(64, 64, 4, FLOAT, 0, r.comm, r.stream.ptr),
    "input and its output": lambda r: r.nccl.all_to_all(
        r.at, r.at, 4, FLOAT, r.comm, r.stream.ptr
    ),
    "there is no rank": lambda r: r.nccl.send(r.at, 4, FLOAT, 7, r.comm, r.stream.ptr),
    "0xabc": lambda r: r.nccl.broadcast(r.at, r.at, 4, FLOAT, 0, r.comm, 0xABC),
    "while it has work": lambda r: _deregister_early(r),
    "which it does not have": lambda r: r.nccl.deregister(r.comm, 7),
    "has memory registered": lambda r: r.nccl.register(r.comm, r.at, 4),
    "destroy on": lambda r: _destroy_late(r),
    "after its communicator was destroyed": lambda r: _replay_late(r),
    "memory of a group overlaps": lambda r: _exchange(r, r.at + 4, r.stream),
    "on several streams": lambda r: _exchange(r, r.at + 64, r.driver.make_stream()),
}  # fmt: skip


def _deregister_early(rank: Rank) -> None:
    handle = rank.nccl.register(rank.comm, rank.at, BYTES)
    with rank.stream.hold():
        rank.add_all()
        rank.nccl.deregister(rank.comm, handle)


def _destroy_late(rank: Rank) -> None:
    rank.nccl.abort(rank.comm)
    rank.nccl.destroy(rank.comm)


def _replay_late(rank: Rank) -> None:
    graph = captured(rank)
    rank.nccl.world.deadline = 0.3
    rank.nccl.destroy(rank.comm)
    graph.launch(rank.stream)
    rank.stream.synchronize()


def _exchange(rank: Rank, target: int, stream: Any) -> None:
    rank.nccl.group_start()
    rank.nccl.send(rank.at, 4, FLOAT, 0, rank.comm, rank.stream.ptr)
    rank.nccl.recv(target, 4, FLOAT, 0, rank.comm, stream.ptr)
    rank.nccl.group_end()


@pytest.mark.parametrize("text", WRONG)
def test_what_nccl_would_not_stand_is_a_mistake(careless: FakeNccl, text: str) -> None:
    def body(rank: Rank) -> None:
        try:
            WRONG[text](rank)
        except DriverError as error:
            assert error.call.startswith("nccl")

    each_rank(careless, 1, body)
    assert mistaken(careless, text), careless.world.mistakes


def test_an_average_by_sharp_is_a_mistake(careless: FakeNccl) -> None:
    def body(rank: Rank) -> None:
        careless.all_reduce(rank.at, rank.at, 4, FLOAT, AVG, rank.comm, rank.stream.ptr)

    each_rank(careless, 1, body, sharp=True)
    assert mistaken(careless, "SHARP has no average")
