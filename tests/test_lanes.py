"""Lanes: which graph has which, and that calls of different ones do not disturb each other."""

from __future__ import annotations

import threading
from typing import Any

import collective_workers as work
import cupy
import group_workers
import pytest

import cupy_zc
from cupy_zc import ClosedError, Communicator, Error, MismatchError
from cupy_zc.collectives.engine import Agreed
from cupy_zc.registration.lanes import Lanes


def _tell(lanes: list[Lanes]) -> None:
    """An agreed point."""
    said = {rank: each.dropped for rank, each in enumerate(lanes)}
    for each in lanes:
        for rank, numbers in said.items():
            each.heard(rank, numbers)


def test_a_lane_is_given_again_when_every_rank_has_said_that_it_dropped_it() -> None:
    lanes = [Lanes(rank, range(3)) for rank in range(3)]
    assert [each.take() for each in lanes] == [1] * 3
    assert [each.take() for each in lanes] == [2] * 3
    lanes[0].drop(1)
    lanes[2].drop(1)
    _tell(lanes)
    assert [each.take() for each in lanes] == [3] * 3
    lanes[1].drop(1)
    assert [each.take() for each in lanes] == [4] * 3  # nobody knows yet
    _tell(lanes)
    assert [each.dropped for each in lanes] == [()] * 3
    assert [each.take() for each in lanes] == [1] * 3
    for each in lanes:
        each.give_up(1)
    assert [each.held for each in lanes] == [(2, 3, 4)] * 3
    assert [each.take() for each in lanes] == [1] * 3


def test_what_is_dropped_while_the_ranks_talk_is_told_the_next_time() -> None:
    lanes = Lanes(0, range(1))
    first, second = lanes.take(), lanes.take()
    lanes.drop(first)
    said = lanes.dropped
    lanes.drop(second)
    lanes.heard(0, said)
    assert lanes.dropped == (second,)
    assert lanes.held == (second,)


def _captured(comm: Communicator, array: cupy.ndarray, op: str) -> tuple[int, Any, Any]:
    """A graph of one all_reduce in place: lane, stream, graph. Collective."""
    engine, stream = comm._engine, comm._driver.make_stream()
    lane = engine.open_lane()
    call = comm._checker.all_reduce(array, array, op)
    staged = any(place.reason for place in engine.places(call))
    engine.fit_lane(lane, call, None if staged else Agreed({}, lambda: None))
    stream.begin_capture()
    engine.enqueue(call, stream, lane)
    return lane, stream, stream.end_capture()


def test_lanes_are_replayed_in_another_order_on_each_rank_beside_eager_calls() -> None:
    """Ends: ranks that wait for each other in two calls, each for the one the other is not at."""
    with work.communicators(2, register="manual") as comms:

        def body(comm: Communicator) -> list[int]:
            pool = cupy_zc.MemoryPool(driver=comm._driver)
            one, two = comm.zeros(10, "i4"), cupy.ndarray(10, "i4", pool.malloc(40))
            eager = comm.zeros(10, "i4")
            for array in (one, two, eager):
                cupy_zc.copyto(array, 1)
            _, first, graph = _captured(comm, one, "sum")
            _, second, other = _captured(comm, two, "sum")
            comm.barrier()

            def replay(which: int) -> None:
                for _ in range(10):
                    (graph if which == 0 else other).launch(first if which == 0 else second)

            threads = [threading.Thread(target=replay, args=(which,)) for which in range(2)]
            for thread in threads if comm.rank else reversed(threads):
                thread.start()
            for _ in range(10):
                comm.all_reduce(eager, eager)
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
            return [int(cupy_zc.view(array)[9]) for array in (one, two, eager)]

        assert work.run(comms, body) == [[1024] * 3] * 2


def test_a_mismatch_on_one_lane_is_none_on_another() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            array = comm.zeros(10, "i4")
            lanes, streams, graphs = zip(
                *[_captured(comm, array, op) for op in ("sum", ("max", "min")[comm.rank])],
                strict=True,
            )
            assert lanes == (1, 2)
            comm.barrier()
            cupy_zc.copyto(array, comm.rank)
            with pytest.raises(MismatchError, match="op='min'"):
                graphs[1].launch(streams[1])
            graphs[0].launch(streams[0])
            assert (cupy_zc.view(array) == 1).all()
            comm.all_reduce(array, array)
            assert (cupy_zc.view(array) == 2).all()

        work.run(comms, body)


def test_a_lane_that_is_used_again_takes_no_new_memory() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            array = comm.zeros(10, "i4")
            sizes = []
            for _ in range(5):
                lane, stream, graph = _captured(comm, array, "sum")
                assert lane == 1
                comm.barrier()
                graph.launch(stream)
                del graph
                comm._engine.close_lane(lane)
                comm.collect()
                sizes.append(comm._heap.used_bytes())
            assert len(set(sizes)) == 1

        work.run(comms, body)


@pytest.mark.parametrize("count", [10, 3000, 1 << 21])
def test_scratch_follows_what_is_staged(count: int) -> None:
    with work.communicators(2, register="manual") as comms:

        def body(comm: Communicator) -> int:
            pool = cupy_zc.MemoryPool(driver=comm._driver)
            array = cupy.ndarray(count, "i4", pool.malloc(4 * count))
            cupy_zc.copyto(array, comm.rank + 1)
            lane, stream, graph = _captured(comm, array, "sum")
            comm.barrier()
            graph.launch(stream)
            assert (cupy_zc.view(array) == 3).all()
            comm.barrier()
            return comm._engine.lane_bytes(lane)

        room = {10: 4096, 3000: 16384, 1 << 21: 4 << 20}[count]
        area = 64 * 2 + 128
        assert work.run(comms, body) == [2 * room + area] * 2


def test_an_invalidated_lane_does_nothing_and_says_so() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            array = comm.zeros(10, "i4")
            _, stream, graph = _captured(comm, array, "sum")
            comm.barrier()
            comm._engine.invalidate()
            cupy_zc.copyto(array, 5)
            with pytest.raises(ClosedError, match=r"all_reduce \(rank \d\): .* did nothing"):
                graph.launch(stream)
            assert (cupy_zc.view(array) == 5).all()

        work.run(comms, body)


def wait_inside(inside: threading.Event, go: threading.Event) -> None:
    inside.set()
    go.wait(0.3)


def test_to_invalidate_waits_for_a_replay_that_is_under_way() -> None:
    with work.communicators(1) as (comm,):
        engine, stream = comm._engine, comm._driver.make_stream()
        array = comm.zeros(10, "i4")
        lane, call = engine.open_lane(), comm._checker.all_reduce(array, array, "sum")
        inside, go = threading.Event(), threading.Event()
        stream.begin_capture()
        engine.enqueue(call, stream, lane)
        stream.enqueue(lambda: wait_inside(inside, go))
        engine.enqueue(call, stream, lane)
        graph = stream.end_capture()

        def replay(rank: int) -> None:
            if rank == 0:
                graph.launch(stream)
            else:
                assert inside.wait(10)
                engine.invalidate()

        group_workers.all_fine(group_workers.in_threads(2, replay))
        with pytest.raises(ClosedError):
            graph.launch(stream)


def test_every_lane_is_invalidated_though_a_call_of_one_does_not_end() -> None:
    """Ends: graphs that still ran after a close, because a lane before theirs was busy."""
    with work.communicators(1, timeout=0.05) as (comm,):
        lanes = [comm._engine._lanes[comm._engine.open_lane()] for _ in range(3)]
        with (
            lanes[1].entered("a call that does not end"),
            pytest.raises(Error, match=r"Communicator\.close .*another thread was inside"),
        ):
            comm._engine.invalidate()
        assert all(lane._closed for lane in lanes)


def test_a_lane_that_no_rank_gets_memory_for_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with work.communicators(2) as comms:
        heap = comms[1]._heap
        reserve = heap._pool.allocate

        def body(comm: Communicator) -> None:
            with pytest.raises(cupy_zc.AgreementError, match="rank 1"):
                comm._engine.open_lane()
            assert comm._registry.lanes.held == ()

        def refuse(*_: Any) -> None:
            raise cupy_zc.OutOfMemoryError(1, 2)

        monkeypatch.setattr(heap._pool, "allocate", refuse)
        for comm in comms:  # so that the heap must grow
            monkeypatch.setattr(comm._heap._allocator, "allocate", lambda _: None)
        work.run(comms, body)
        monkeypatch.undo()
        assert heap._pool.allocate == reserve
        assert work.run(comms, lambda comm: comm._engine.open_lane()) == [1, 1]
