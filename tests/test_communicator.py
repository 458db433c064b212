"""What a communicator does besides moving data: signatures, memory, registration."""

from __future__ import annotations

import gc
import inspect
import warnings
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest

import cupy_zc
from cupy_zc import (
    AgreementError,
    Communicator,
    InvalidTypeError,
    InvalidValueError,
    MismatchError,
    NotZeroCopyError,
)
from cupy_zc.collectives import Transfer
from cupy_zc.driver.host import HostDriver

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no NCCL here
    import cupyx.distributed
    from cupyx.distributed import NCCLBackend


def _sum(comm: Communicator, array: cupy.ndarray) -> int:
    cupy_zc.copyto(array, comm.rank + 1)
    comm.all_reduce(array, array)
    return int(cupy_zc.asnumpy(array)[0])


# Signatures


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "send", "recv",
        "send_recv", "scatter", "gather", "all_to_all", "barrier", "stop",
    ],
)  # fmt: skip
def test_the_calls_have_the_signatures_of_cupyx_distributed(name: str) -> None:
    theirs = inspect.signature(getattr(NCCLBackend, name)).parameters.values()
    ours = inspect.signature(getattr(Communicator, name)).parameters.values()
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in theirs
    ]


def test_init_process_group_takes_the_arguments_of_cupyx_distributed() -> None:
    theirs = inspect.signature(cupyx.distributed.init_process_group).parameters
    ours = inspect.signature(cupy_zc.init_process_group).parameters
    assert [(p.name, p.kind) for p in ours.values()] == [(p.name, p.kind) for p in theirs.values()]
    same = [name for name in ours if name != "backend"]
    assert [ours[name].default for name in same] == [theirs[name].default for name in same]


# Memory


def test_empty_and_zeros_are_at_one_offset_and_registered_from_the_start() -> None:
    with work.communicators(3, register="manual", strict=True) as comms:

        def body(comm: Communicator) -> tuple[list[int], Transfer | None]:
            arrays = [comm.zeros((3, 5), "f4"), comm.empty(7, "i8"), comm.zeros(3, bool, "F")]
            assert comm.xp is np
            assert (cupy_zc.view(arrays[0]) == 0).all()
            assert arrays[0].shape == (3, 5)
            assert _sum(comm, arrays[1]) == 6
            assert comm.empty((0, 3)).size == 0
            *rules, multicast = comm.explain(arrays[1])
            assert all(rule.passed for rule in rules)
            assert (multicast.name, multicast.passed) == ("multicast", False)  # one device for all
            return [a.data.ptr - comm._heap.arena.base for a in arrays], comm.last_transfer

        results = work.run(comms, body)
        assert results[0] == results[1] == results[2]
        assert results[0][1] == Transfer("all_reduce", "two_shot", True, "", 56)


def test_offsets_stay_equal_whatever_ranks_drop_and_collect_and_when() -> None:
    with work.communicators(3) as comms:

        def body(comm: Communicator) -> list[int]:
            chance = np.random.default_rng(comm.rank)
            alive: list[Any] = []
            offsets = []
            for turn in range(60):
                array = comm.empty(1 + turn * 37 % 500, "u1")
                offsets.append(array.data.ptr - comm._heap.arena.base)
                alive.append([array])
                alive[-1].append(alive[-1])  # a cycle: only the collector frees it
                del array
                while len(alive) > 4:
                    alive.pop(int(chance.integers(len(alive))))
                if comm.rank == turn % 3:
                    gc.collect()
            return offsets

        results = work.run(comms, body)
        assert results[0] == results[1] == results[2]


def test_bad_requests_for_memory_are_refused_before_anybody_is_asked() -> None:
    with work.communicators(1) as (comm,):
        with pytest.raises(InvalidValueError, match=r"Communicator.empty \(rank 0 of 1\): shape"):
            comm.empty((3, -1))
        with pytest.raises(InvalidTypeError, match="a tuple of ints"):
            comm.zeros((1.5,))
        with pytest.raises(InvalidTypeError, match="an int"):
            comm.zeros("many")
        with pytest.raises(InvalidValueError, match="'C' or 'F'"):
            comm.empty(3, order="K")


def test_ranks_that_ask_for_different_sizes_all_get_a_mismatch() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> int:
            with pytest.raises(MismatchError):
                comm.empty(1000 * (1 + comm.rank), "f8")
            return _sum(comm, comm.empty(4, "i4"))

        assert work.run(comms, body) == [3, 3]


# Registration


def test_a_registration_makes_calls_zero_copy_until_it_ends() -> None:
    with work.communicators(2, register="manual") as comms:

        def body(comm: Communicator) -> list[bool]:
            pool = cupy_zc.MemoryPool(driver=comm._driver)
            array = cupy.ndarray(100, "i4", pool.malloc(400))
            told = []

            def note() -> None:
                assert _sum(comm, array) == 3
                assert comm.last_transfer is not None
                told.append(comm.last_transfer.zero_copy)

            note()
            with comm.register(array):
                note()
            note()
            comm.collect()
            note()
            with comm.register(pool):
                note()
            comm.barrier()
            return told

        assert work.run(comms, body) == [[False, True, False, False, True]] * 2


@pytest.mark.parametrize(("register", "wanted"), [("auto", True), ("manual", False)])
def test_arrays_are_registered_without_asking_unless_told_not_to(
    register: str, wanted: bool
) -> None:
    with work.communicators(3, register=register) as comms:

        def body(comm: Communicator) -> list[bool]:
            pool = cupy_zc.MemoryPool(driver=comm._driver, segment_size=1 << 14)
            history = [pool.malloc(5000) for _ in range(comm.rank * 4)]  # another one on each rank
            array = cupy.ndarray(100, "i4", pool.malloc(400))
            told = []
            for _ in range(3):
                assert _sum(comm, array) == 6
                assert comm.last_transfer is not None
                told.append(comm.last_transfer.zero_copy)
            late = cupy.ndarray(9000, "i4", pool.malloc(36000))  # a segment that came later
            for _ in range(6):
                assert _sum(comm, late) == 6
            told.append(comm.last_transfer.zero_copy)
            comm.barrier()
            del history
            return told

        assert work.run(comms, body) == [[wanted] * 4] * 3


def test_an_array_that_cannot_be_registered_is_an_error_on_all_ranks() -> None:
    foreign = cupy_zc.MemoryPool(driver=HostDriver())
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> str:
            ours = comm.empty(4)
            array = ours if comm.rank else cupy.ndarray(4, "f8", foreign.malloc(32))
            with pytest.raises(AgreementError) as caught:
                comm.register(array)
            assert _sum(comm, comm.empty(4, "i4")) == 3
            return str(caught.value)

        first, second = work.run(comms, body)
        assert first == second
        assert "rank 0" in first


def test_strict_refuses_what_would_be_staged_before_anything_is_enqueued() -> None:
    with work.communicators(2, register="manual", strict=True) as comms:

        def body(comm: Communicator) -> None:
            pool = cupy_zc.MemoryPool(driver=comm._driver)
            array, good = cupy.ndarray(4, "i4", pool.malloc(16)), comm.empty(4, "i4")
            with pytest.raises(NotZeroCopyError, match=r"the input is staged: .*; register"):
                comm.all_reduce(array, good)
            with pytest.raises(NotZeroCopyError, match="the output is staged"):
                comm.all_reduce(good, array)
            with pytest.raises(NotZeroCopyError, match="in_array is copied"):
                comm.send_recv(array, good, 1 - comm.rank)
            with pytest.raises(NotZeroCopyError, match="in_array overlaps"):
                comm.send_recv(good, good, 1 - comm.rank)
            with pytest.raises(NotZeroCopyError, match="all_to_all in place"):
                comm.all_to_all(good, good)
            comm.send(array, 1 - comm.rank)  # always copies, and does not promise otherwise
            comm.recv(array, 1 - comm.rank)
            comm.all_gather(good, cupy.ndarray(8, "i4", pool.malloc(32)), 4)  # only its own output
            with comm.register(array):
                comm.all_reduce(array, good)
            comm.barrier()

        work.run(comms, body)
