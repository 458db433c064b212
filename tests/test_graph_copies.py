"""Rows that copy engines move in a graph: what they move, and what becomes of them at the end."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
import pytest
from collective_workers import collected
from graph_ranks import Rank, emulated, make, on_all, run
from hypothesis import given
from hypothesis import strategies as st

import cupy_zc
from cupy_zc import ClosedError, DriverError, PeerTimeoutError
from cupy_zc.collectives import device_tables
from cupy_zc.collectives.call import Call
from cupy_zc.collectives.device_pulls import pulls_of
from cupy_zc.collectives.plan import ROLES, Operation
from cupy_zc.memory.graphs import settle

__all__ = ["emulated"]  # a fixture

#: On all ranks in threads, as everywhere; and with three.
SEVERAL = pytest.mark.parametrize(
    ("backend", "n"),
    [
        ("device, emulated", 2),
        ("device, emulated", 3),
        pytest.param("device", 2, marks=pytest.mark.gpu),
        pytest.param("device", 3, marks=pytest.mark.gpu),
        pytest.param("device, 2 GPUs", 2, marks=pytest.mark.multi_gpu),
    ],
)
TWO = pytest.mark.parametrize(
    "backend",
    [
        "device, emulated",
        pytest.param("device", marks=pytest.mark.gpu),
        pytest.param("device, 2 GPUs", marks=pytest.mark.multi_gpu),
    ],
)
MOVES = [operation for operation, role in ROLES.items() if not role.reduces and operation]
COUNT = 100


@pytest.fixture
def _every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy engines move rows of any size."""
    for table in (name for name in vars(device_tables) if name.startswith("LL128")):
        monkeypatch.setattr(device_tables, table, {8: 0})
    monkeypatch.setattr(device_tables, "COPY_ENGINES", {8: 1})


def arrays_of(operation: Operation, rank: int, n: int, root: int) -> tuple[int, int]:
    """Rows of what a rank gives and gets; 0 where it has none."""
    role = ROLES[operation]
    gives = not role.rooted or operation is Operation.GATHER or rank == root
    gets = not role.rooted or operation is not Operation.GATHER or rank == root
    return (n if role.input_rows else 1) * gives, (n if role.output_rows else 1) * gets


def result_of(operation: Operation, rank: int, n: int, root: int, value: Any) -> list[int]:
    """A number for each row of the output; ``value(giver, row)`` is what was given."""
    match operation:
        case Operation.BROADCAST:
            return [value(root, 0)]
        case Operation.SCATTER:
            return [value(root, rank)]
        case Operation.ALL_TO_ALL:
            return [value(giver, rank) for giver in range(n)]
        case _:
            return [value(giver, 0) for giver in range(n)]


def gathering(rank: Rank) -> tuple[cupy.ndarray, cupy.ndarray, list[Any]]:
    """What a rank gives, its number + 1, what it gets, 7, and a graph of all_gather, in a list."""
    source, target = rank.empty(COUNT), rank.empty(2 * COUNT)
    rank.fill(source, rank.rank + 1)
    rank.fill(target, 7)
    with rank.capturing() as made:
        rank.comm.all_gather(source, target, COUNT)
    return source, target, made


def is_left_alone(rank: Rank, target: cupy.ndarray, graph: Any) -> None:
    """A replay of rank 0 without rank 1 is an error that names it, and the GPU works after it."""
    graph.launch(rank.stream)
    rank.stream.synchronize()
    with pytest.raises(PeerTimeoutError, match="rank 1"):
        rank.comm.check()
    rank.fill(target, 3)
    assert (rank.read(target) == 3).all()


@given(st.sampled_from(MOVES), st.integers(1, 8), st.data(), st.integers(1, 5), st.booleans())
def test_the_copies_of_all_ranks_are_the_collective(
    operation: Operation, n: int, data: st.DataObject, count: int, in_place: bool
) -> None:
    root = data.draw(st.integers(0, n - 1))
    in_place = in_place and operation is not Operation.ALL_TO_ALL
    memory = np.full(n * 2 * n * count, -1)
    calls, inputs = [], {}
    for rank in range(n):
        rows = arrays_of(operation, rank, n, root)
        starts = [(2 * rank + which) * n * count for which in range(2)]
        if in_place and all(rows):
            own = root if operation is Operation.SCATTER else rank
            if rows[1] > rows[0]:
                starts[0] = starts[1] + own * count
            elif rows[0] > rows[1]:
                starts[1] = starts[0] + own * count
            else:
                starts[1] = starts[0]
        array = [
            SimpleNamespace(data=SimpleNamespace(ptr=start)) if there else None
            for start, there in zip(starts, rows, strict=True)
        ]
        if operation is Operation.BROADCAST and rank == root:
            array[1] = None  # the root's array has it all
        inputs[rank] = starts[0]
        for row in range(rows[0]):
            memory[starts[0] + row * count :][:count] = 10 * rank + row
        calls.append(
            Call(operation, np.dtype("u1"), 2, 0, root, count, 0, array[0], array[1], in_place, "")
        )
    before = memory.copy()
    copies = [pulls_of(call, rank, n, inputs.__getitem__) for rank, call in enumerate(calls)]
    for rank, (remote, own) in enumerate(copies):
        assert all(pull.source // (2 * n * count) != rank for pull in remote)
        assert all(pull.source // (2 * n * count) == rank for pull in own)
        for target, source, nbytes in remote + own:
            assert target // (2 * n * count) == rank, "a rank writes to its own output only"
            assert nbytes == count
            memory[target : target + nbytes] = before[source : source + nbytes]
    for rank, call in enumerate(calls):
        if call.written is None:
            continue
        wanted = np.repeat(result_of(operation, rank, n, root, lambda g, r: 10 * g + r), count)
        found = memory[call.written.data.ptr :][: len(wanted)]
        np.testing.assert_array_equal(found, wanted)


@SEVERAL
@pytest.mark.parametrize("operation", MOVES)
@pytest.mark.usefixtures("emulated", "_every_row")
def test_replays_move_what_is_there_then(backend: str, n: int, operation: Operation) -> None:
    root = n - 1

    def body(rank: Rank) -> None:
        comm, (gives, gets) = rank.comm, arrays_of(operation, rank.rank, n, root)
        source, target = rank.empty(max(1, gives) * COUNT), rank.empty(max(1, gets) * COUNT)
        with rank.capturing() as made:
            if operation is Operation.BROADCAST:
                comm.broadcast(source if gives else target, root)
            elif operation is Operation.ALL_GATHER:
                comm.all_gather(source, target, COUNT)
            elif operation is Operation.ALL_TO_ALL:
                comm.all_to_all(source, target)
            else:
                getattr(comm, operation.call)(
                    source if gives else None, target if gets else None, root
                )
        transfer = comm.last_transfer
        assert transfer is not None
        assert (transfer.algorithm, transfer.zero_copy) == ("copy_engines", True)
        for turn in range(3):
            for row in range(gives):
                value = 100 * turn + 10 * rank.rank + row
                rank.fill(source[row * COUNT : (row + 1) * COUNT], value)
            if not (operation is Operation.BROADCAST and gives):
                rank.fill(target, -1)
            made[0].launch(rank.stream)
            if operation is Operation.BROADCAST and gives:
                continue
            found = rank.read(target)
            rows = result_of(
                operation,
                rank.rank,
                n,
                root,
                lambda g, r: 100 * turn + 10 * g + r,  # noqa: B023
            )
            np.testing.assert_array_equal(found, np.repeat(rows, COUNT) if gets else found)
        rank.stream.synchronize()
        comm.check()
        rank.meet()

    on_all(backend, body, n)


@TWO
@pytest.mark.usefixtures("emulated", "_every_row")
def test_inputs_that_peers_do_not_reach_are_pushed_by_kernels(backend: str) -> None:
    def body(rank: Rank) -> None:
        comm = rank.comm
        memory = comm._driver.plain_memory(4 * COUNT) if rank.rank else None
        source = rank.empty(COUNT)
        if memory is not None:
            source = cupy.ndarray(COUNT, "i4", cupy.cuda.MemoryPointer(memory, 0))
        target = rank.empty(2 * COUNT)
        rank.fill(source, rank.rank + 1)
        with rank.capturing() as made:
            comm.all_gather(source, target, COUNT)
        transfer = comm.last_transfer
        assert transfer is not None
        assert (transfer.algorithm, transfer.zero_copy) == ("push", True)
        made[0].launch(rank.stream)
        np.testing.assert_array_equal(rank.read(target), np.repeat([1, 2], COUNT))
        rank.meet()

    on_all(backend, body)


@TWO
@pytest.mark.usefixtures("emulated", "_every_row")
def test_a_rank_that_does_not_replay_is_named_and_keeps_what_it_has(backend: str) -> None:
    failed = threading.Barrier(2, timeout=20)

    def body(rank: Rank) -> None:
        _, target, made = gathering(rank)
        if rank.rank == 0:
            is_left_alone(rank, target, made[0])
        failed.wait()
        if rank.rank:
            assert (rank.read(target) == 7).all()
        failed.wait()

    on_all(backend, body, timeout=2)


@TWO
@pytest.mark.usefixtures("emulated", "_every_row")
def test_what_a_graph_reads_stays_mapped_until_it_is_gone_though_all_was_closed(
    backend: str,
) -> None:
    """Copies cannot look whether the communicator is closed: what they read must be there."""

    def body(rank: Rank) -> None:
        source, target = rank.empty(COUNT), rank.empty(2 * COUNT)
        rank.fill(source, rank.rank + 1)
        graphs = []
        for _ in range(2):
            with rank.capturing() as made:
                rank.comm.all_gather(source, target, COUNT)
            graphs.append(made.pop())
        windows = rank.comm._registry.windows
        rank.stream.synchronize()
        rank.meet()
        rank.comm.close(force=True)
        for number in range(2):
            with contextlib.suppress(ClosedError):
                graphs[number].launch(rank.stream)
        with contextlib.suppress(ClosedError):
            rank.stream.synchronize()
        graphs.pop()
        for _ in range(10):
            gc.collect()
            settle()
            time.sleep(0.005)
        assert windows._windows, "of two graphs, one lives"
        graphs.clear()
        collected(lambda: (settle(), not windows._windows)[1])

    on_all(backend, body)


@TWO
@pytest.mark.usefixtures("emulated", "_every_row")
def test_a_replay_alone_finds_what_it_copies_though_the_other_graph_is_gone(backend: str) -> None:
    """Ends: copies from memory of a peer that was unmapped, as that peer's graph was gone."""
    gone = threading.Barrier(2, timeout=20)

    def body(rank: Rank) -> None:
        source, target, made = gathering(rank)
        segment = source.data.mem.segment
        if rank.rank:
            made.clear()
            rank.leases_end()
        for _ in range(3):
            rank.comm.collect()
        assert segment.pins == 1, "of the graph, here or on the other rank"
        if not rank.rank:
            is_left_alone(rank, target, made[0])
        gone.wait()

    on_all(backend, body, timeout=2, register="manual")


@TWO
@pytest.mark.usefixtures("emulated", "_every_row")
def test_what_a_graph_read_is_let_go_of_when_all_ranks_have_dropped_theirs(backend: str) -> None:
    def body(rank: Rank) -> None:
        source, _, made = gathering(rank)
        segment = source.data.mem.segment
        made.clear()
        rank.leases_end()
        rank.meet()
        for _ in range(3):
            rank.comm.collect()
        assert segment.pins == 0
        windows = rank.comm._registry.windows._windows
        assert not windows[1 - rank.rank, 1]._mapped
        rank.meet()

    on_all(backend, body, register="manual")


@TWO
@pytest.mark.usefixtures("emulated", "_every_row")
def test_captures_under_way_at_once_do_not_meet(backend: str) -> None:
    """Ends: one stream beside all captures, which drew them into each other."""

    def body(rank: Rank) -> None:
        sources = [rank.empty(COUNT) for _ in range(2)]
        targets = [rank.empty(2 * COUNT) for _ in range(2)]
        streams = [rank.stream, rank.other]
        for each in streams:
            each.synchronize()
        for each in streams:
            each.begin_capture()
        for source, target, stream in zip(sources, targets, streams, strict=True):
            rank.comm.all_gather(source, target, COUNT, stream=stream)
        graphs = [each.end_capture() for each in streams]
        for number, source in enumerate(sources):
            rank.fill(source, 10 * number + rank.rank)
        rank.stream.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            graph.launch(stream)
            stream.synchronize()
        for number, target in enumerate(targets):
            wanted = np.repeat([10 * number, 10 * number + 1], COUNT)
            np.testing.assert_array_equal(rank.read(target), wanted)
        rank.meet()

    on_all(backend, body)


@pytest.mark.parametrize("backend", ["device, emulated"])
@pytest.mark.usefixtures("emulated", "_every_row")
def test_what_cannot_be_unmapped_when_a_graph_is_gone_is_said_in_the_log(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that finds the graph gone may be at anything; it must not get the error."""

    def body(rank: Rank) -> tuple[Any, list[Any]]:
        *_, made = gathering(rank)
        rank.stream.synchronize()
        rank.meet()
        rank.comm.close(force=True)
        return rank.comm._registry.windows, made

    def refuse(address: int, size: int) -> None:
        raise DriverError("cuMemUnmap", "CUDA_ERROR_UNKNOWN", 999)

    comms = make(backend, 2, timeout=20)
    try:
        windows, graphs = zip(*run(comms, body), strict=True)
        with monkeypatch.context() as later, caplog.at_level(logging.ERROR, "cupy_zc"):
            later.setattr(comms[0]._driver, "unmap", refuse)
            for made in graphs:
                made.clear()
            collected(lambda: (settle(), caplog.text.count("is left behind") == 2)[1])
        for each in windows:
            assert each._windows
            each.close()
            assert not each._windows
    finally:
        cupy_zc.uninstall()
