"""Ranks on several nodes, with the host engine in place of node and rail, against NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from collective_workers import Buffers
from graph_workers import array_of, captured, clean, fill, meet, pool_of
from several_nodes import LARGE, SMALL, pretend

import cupy_zc
from cupy_zc import (
    AgreementError,
    ClosedError,
    Communicator,
    DriverError,
    Error,
    MismatchError,
    PeerTimeoutError,
    view,
)
from cupy_zc.collectives import opening
from cupy_zc.collectives.acts import Sizes
from cupy_zc.driver.host import HostDriver
from cupy_zc.group import Topology

#: By name: the node of each rank.
PLACEMENTS = {
    "2 x 1": (0, 1),
    "1 x 2": (0, 0),
    "3 x 1": (0, 1, 2),
    "2 x 2": (0, 0, 1, 1),
    "2 x 3": (0, 0, 0, 1, 1, 1),
    "2 x 2, ranks in turns": (0, 1, 0, 1),
    "4 x 2": (0, 0, 1, 1, 2, 2, 3, 3),
}


#: Where algorithms change over, by name; ``None`` is where they do by default.
SIZES = {"small": SMALL, "large": LARGE, "default": None}


def _matrix() -> Iterator[Any]:
    """All placements with all sizes, of which every run has those that differ most.

    By default, arrays as small as these take the ways of ``SMALL``.
    """
    for (placement, node_of), (name, sizes) in itertools.product(PLACEMENTS.items(), SIZES.items()):
        often = placement == "2 x 2" or (sizes is not None and len(node_of) < 8)
        marks = [] if often or (len(node_of) == 8 and sizes is LARGE) else [pytest.mark.slow]
        yield pytest.param(node_of, sizes, marks=marks, id=f"{placement}-{name}")


@pytest.mark.parametrize(("node_of", "sizes"), [*_matrix()])
def test_every_collective_does_what_numpy_says(
    node_of: tuple[int, ...], sizes: Sizes | None
) -> None:
    with pretend(node_of, sizes, register="manual", backend="hierarchical") as comms:
        assert {comm.backend for comm in comms} == {"hierarchical"}

        def body(comm: Communicator) -> int:
            buffers = Buffers.of(comm)
            cases = work.cases(comm.size)
            for case in cases:
                work.check(comm, case, buffers)
            return len(cases)

        assert min(work.run(comms, body)) > 300


def test_what_calls_touch_is_registered_on_node_and_rail_at_agreed_numbers() -> None:
    with pretend((0, 0, 1, 1), LARGE) as comms:

        def body(comm: Communicator) -> list[bool]:
            pool = pool_of(comm)
            array = array_of(pool, 96, "f4")
            said = []
            for _ in range(9):
                comm.all_reduce(array, array)
                transfer = comm.last_transfer
                assert transfer is not None
                assert transfer.algorithm == "hierarchical"
                said.append(transfer.zero_copy)
            return said

        for said in work.run(comms, body):
            assert not said[0]
            assert all(said[4:])


def test_registering_lets_all_tiers_know_and_ends_everywhere() -> None:
    with pretend((0, 0, 1, 1), LARGE, register="manual") as comms:

        def body(comm: Communicator) -> None:
            pool = pool_of(comm)
            array = array_of(pool, 96, "f4")
            engine = comm._engine
            registries = [comm._registry, engine._rail._registry, engine._whole._registry]
            with comm.register(array):
                assert all(each.locate(array).registered for each in registries)
                comm.all_reduce(array, array)
                assert comm.last_transfer.zero_copy
                comm.reduce(array, array)
                assert comm.last_transfer.zero_copy
            assert not any(each.locate(array).registered for each in registries)
            comm.collect()
            windows = [each.windows._windows.values() for each in registries]
            assert array.data.mem.segment.pins == 0
            for each in windows:
                mapped = [name for window in each for name in window._mapped]
                assert len(mapped) == sum(len(window._mapped) for window in each)

        work.run(comms, body)


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("node_of", [(0, 0, 1, 1), (0, 1)], ids=["2 x 2", "2 x 1"])
def test_captured_calls_are_replayed_with_fresh_data(
    node_of: tuple[int, ...], sizes: Sizes
) -> None:
    with pretend(node_of, sizes) as comms:

        def body(comm: Communicator) -> None:
            n, pool = comm.size, pool_of(comm)
            one, rows = array_of(pool, 120, "f8"), array_of(pool, 120 * n, "f8")
            summed, mine = array_of(pool, 120, "f8"), array_of(pool, 120, "f8")
            gathered, swapped = array_of(pool, 120 * n, "f8"), array_of(pool, 120 * n, "f8")
            spread, rooted = array_of(pool, 120, "f8"), array_of(pool, 120, "f8")
            stream = comm._driver.make_stream()
            stream.begin_capture()
            comm.all_reduce(one, summed, "avg", stream=stream)
            comm.reduce_scatter(rows, mine, 120, stream=stream)
            comm.all_gather(one, gathered, 120, stream=stream)
            comm.all_to_all(rows, swapped, stream=stream)
            comm.broadcast(spread, n - 1, stream=stream)
            comm.reduce(one, rooted, 1, stream=stream)
            graph = stream.end_capture()
            (lease,) = comm.leases()
            assert lease.calls == 6
            eager = comm.zeros(50, "i4")
            for turn in range(3):
                data = np.arange(120) + 1000 * turn
                fill(one, data + comm.rank)
                fill(rows, np.arange(120 * n) * (comm.rank + 1) + turn)
                fill(spread, comm.rank + turn)
                meet(comm)
                comm.barrier()
                graph.launch(stream)
                stream.synchronize()
                ranks, part = range(n), 120 * comm.rank
                scale = sum(each + 1 for each in ranks)
                np.testing.assert_allclose(view(summed), data + (n - 1) / 2)
                wanted = (np.arange(120) + part) * scale + turn * n
                np.testing.assert_allclose(view(mine), wanted)
                np.testing.assert_array_equal(
                    view(gathered), np.concatenate([data + each for each in ranks])
                )
                parts = [(np.arange(120) + part) * (each + 1) + turn for each in ranks]
                np.testing.assert_array_equal(view(swapped), np.concatenate(parts))
                assert (view(spread) == n - 1 + turn).all()
                if comm.rank == 1:
                    np.testing.assert_allclose(view(rooted), n * data + sum(ranks))
                fill(eager, 1)
                comm.all_reduce(eager, eager)
                assert (view(eager) == n).all()
            comm.barrier()
            del graph
            work.collected(lambda: not comm.leases())
            comm.collect()
            meet(comm)

        work.run(comms, body)


def test_lanes_are_used_again() -> None:
    with pretend((0, 0, 1, 1), LARGE) as comms:

        def body(comm: Communicator) -> list[int]:
            array, used = comm.zeros(100, "i4"), []
            for _ in range(6):
                graph, stream = captured(comm, array)
                comm.barrier()
                graph.launch(stream)
                stream.synchronize()
                comm.barrier()
                del graph
                work.collected(lambda: not comm.leases())
                comm.collect()
                used.append(comm._heap.total_bytes())
            return used

        for used in work.run(comms, body):
            assert used[2] == used[-1]


def test_ranks_of_two_nodes_that_capture_different_calls_are_told() -> None:
    with pretend((0, 0, 1, 1)) as comms:

        def body(comm: Communicator) -> str:
            array, stream = comm.zeros(100, "i4"), comm._driver.make_stream()
            stream.begin_capture()
            with pytest.raises(MismatchError) as caught:
                comm.all_reduce(array[: 50 + comm.rank // 2], array, stream=stream)
            stream.end_capture()
            work.collected(lambda: not comm.leases())
            clean(comm)
            return str(caught.value)

        texts = work.run(comms, body)
        assert all("count=50" in text and "count=51" in text for text in texts), texts


def test_a_capture_that_fails_on_one_node_records_nothing_on_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pretend((0, 0, 1, 1)) as comms:
        broken = comms[3]
        real = broken._registry.share

        def share(*_: object) -> None:
            raise DriverError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", 2)

        def body(comm: Communicator) -> None:
            array, stream = comm.zeros(100, "i4"), comm._driver.make_stream()
            if comm is broken:
                monkeypatch.setattr(comm._registry, "share", share)
            stream.begin_capture()
            with pytest.raises(AgreementError, match="OUT_OF_MEMORY"):
                comm.all_reduce(array, array, stream=stream)
            stream.end_capture()
            if comm is broken:
                monkeypatch.setattr(comm._registry, "share", real)
            work.collected(lambda: not comm.leases())
            clean(comm)

        work.run(comms, body)


def test_registering_that_fails_on_one_node_is_taken_back_on_all() -> None:
    with pretend((0, 0, 1, 1), register="manual") as comms:

        def body(comm: Communicator) -> None:
            pool = pool_of(comm)
            array = array_of(pool)
            bad = cupy.ndarray(4, "i4", cupy.cuda.MemoryPointer(array.data.mem, 0))
            if comm.rank == 3:
                other = cupy_zc.MemoryPool(driver=HostDriver())
                bad = array_of(other)
            with pytest.raises(AgreementError):
                comm.register(bad)
            assert array.data.mem.segment.pins == 0
            assert not comm._registry.locate(array).registered
            comm.register(array).deregister()

        work.run(comms, body)


def test_a_rank_that_leaves_is_missed_on_every_node() -> None:
    with pretend((0, 0, 1, 1), timeout=30) as comms:

        def body(comm: Communicator) -> None:
            array = comm.zeros(100, "i4")
            comm.barrier()
            if comm.rank == 3:
                comm.close()
                return
            with pytest.raises((PeerTimeoutError, ClosedError)) as caught:
                for _ in range(100):
                    comm.all_reduce(array, array)
            if comm.rank == 2:  # which shares the node of the one that left
                assert caught.value.ranks == (3,)
                assert "numbers of node 1; in the communicator 0 is 2, 1 is 3" in str(caught.value)

        work.run(comms, body)


def test_calls_that_differ_end_the_communicator_on_every_node() -> None:
    with pretend((0, 0, 1, 1), timeout=30) as comms:

        def body(comm: Communicator) -> type[BaseException]:
            array = comm.zeros(100, "i4")
            with pytest.raises(Error) as caught:
                comm.all_reduce(array[: 50 + (comm.rank == 1)], array)
            with pytest.raises(ClosedError):
                comm.barrier()
            return caught.type

        kinds = work.run(comms, body)
        assert kinds[:2] == [MismatchError, MismatchError]
        assert set(kinds[2:]) <= {PeerTimeoutError, ClosedError}


def test_a_split_by_node_is_within_that_node_and_one_by_place_is_a_rail() -> None:
    with pretend((0, 0, 1, 1)) as comms, pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "discover", lambda b: Topology(b.rank, (0, 0), (0, 0)))

        def body(comm: Communicator) -> tuple[str, int]:
            array = comm.zeros(10, "i4")
            with comm.split(comm.rank // 2) as part:
                fill(array, comm.rank)
                part.all_reduce(array, array)
                return part.backend, int(view(array)[0])

        assert work.run(comms, body) == [("host", 1), ("host", 1), ("host", 5), ("host", 5)]


def test_point_to_point_calls_go_between_any_two_ranks() -> None:
    with pretend((0, 0, 1, 1)) as comms:

        def body(comm: Communicator) -> None:
            array, got = comm.zeros(10, "i4"), comm.zeros(10, "i4")
            fill(array, comm.rank)
            after, before = (comm.rank + 1) % 4, (comm.rank - 1) % 4
            comm.send(array, after)
            comm.recv(got, before)
            assert (view(got) == before).all()
            comm.send_recv(array, got, comm.rank ^ 3)
            assert (view(got) == comm.rank ^ 3).all()
            assert comm.last_transfer.operation == "send_recv"

        work.run(comms, body)
