"""Every wrong argument of every call: an error of its own before anything is written or sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest
from cupyx.scipy import sparse

import cupy_zc
from cupy_zc import Communicator, InvalidTypeError, InvalidValueError
from cupy_zc.driver.host import HostDriver


class Rank:
    """Rank 1 of 3 and arrays to pass to it."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.pool = cupy_zc.MemoryPool(driver=comm._driver)

    def make(self, shape: Any, dtype: Any = "f4", order: str = "C") -> cupy.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return cupy.ndarray(shape, dtype, self.pool.malloc(size), order=order)


@pytest.fixture(scope="module")
def rank() -> Iterator[Rank]:
    with work.communicators(3) as comms:
        yield Rank(comms[1])


#: Calls that take two arrays, with arguments that are right: (name, shapes, more arguments).
TWO = {
    "all_reduce": ((6,), (6,), ()),
    "reduce": ((6,), (6,), (1,)),
    "reduce_scatter": ((6,), (2,), (2,)),
    "all_gather": ((2,), (6,), (2,)),
    "gather": ((2,), (3, 2), (1,)),
    "scatter": ((3, 2), (2,), (1,)),
    "all_to_all": ((3, 2), (3, 2), ()),
}


def _refused(kind: type[Exception], call: str, message: str, action: Callable[[], object]) -> None:
    with pytest.raises(kind, match=message) as caught:
        action()
    assert f"Communicator.{call} (rank 1 of 3): " in str(caught.value)


@pytest.mark.parametrize("call", TWO)
def test_arrays_that_cannot_take_part_are_refused(rank: Rank, call: str) -> None:
    source, target, more = TWO[call]
    method = getattr(rank.comm, call)
    good_in, good_out = rank.make(source), rank.make(target)
    matrix = sparse.csr_matrix((3, 3), dtype="f4") if _sparse_works() else None
    wrong: list[tuple[type[Exception], str, Any, Any]] = [
        (InvalidTypeError, "in_array is a ndarray.*cupy.asarray", np.ones(6, "f4"), good_out),
        (InvalidTypeError, "out_array is a list.*one cupy.ndarray", good_in, [1.0]),
        (InvalidTypeError, "in_array is a NoneType", None, good_out),
        (InvalidValueError, "in_array.*strides.*ascontiguousarray", rank.make(12)[::2], good_out),
        (InvalidTypeError, "out_array .* dtype float32, which in_array has", good_in,
         rank.make(target, "f8")),
        (InvalidTypeError, "in_array.*a dtype among bool, int8", rank.make(source, "M8[s]"),
         good_out),
        (InvalidValueError, "in_array.*memory of the host driver",
         cupy.ndarray(6, "f4", _foreign()), good_out),
        (InvalidValueError, "an array in F order.*C order, which in_array has",
         rank.make((3, 2)), rank.make((3, 2), order="F")),
    ]  # fmt: skip
    if matrix is not None:
        wrong.append((InvalidTypeError, "a dense cupy.ndarray", matrix, good_out))
    for kind, message, given, taken in wrong:
        _refused(kind, call, message, lambda g=given, t=taken: method(g, t, *more))


def _sparse_works() -> bool:
    try:
        sparse.csr_matrix((3, 3), dtype="f4")
    except Exception:  # making one needs a device
        return False
    return True


def test_sparse_matrices_are_refused_with_a_sentence(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Matrix:
        pass

    monkeypatch.setattr(sparse, "issparse", lambda thing: isinstance(thing, Matrix))
    array = rank.make(6)
    _refused(
        InvalidTypeError, "all_reduce", "a dense cupy.ndarray; pass its data, indices and indptr",
        lambda: rank.comm.all_reduce(Matrix(), array),
    )  # fmt: skip
    _refused(
        InvalidTypeError, "broadcast", "a dense cupy.ndarray",
        lambda: rank.comm.broadcast(Matrix()),
    )  # fmt: skip


def _foreign() -> Any:
    """Memory that says nothing of where it is, as memory of CuPy's own allocators does."""
    memory = cupy.cuda.UnownedMemory(0x10000, 4096, None, 0)
    return cupy.cuda.MemoryPointer(memory, 0)


@pytest.mark.parametrize(
    ("call", "shapes", "more", "message"),
    [
        ("all_reduce", (6, 5), (), r"out_array.size=5 .* at least 6 elements, which in_array has"),
        ("reduce", (6, 5), (1,), r"out_array.size=5 .* at least 6"),
        ("reduce_scatter", (5, 2), (2,), r"in_array.size=5 .* at least 6 .* for each of 3 ranks"),
        (
            "reduce_scatter",
            (6, 1),
            (2,),
            r"out_array.size=1 .* at least 2 elements, which is count",
        ),
        ("all_gather", (1, 6), (2,), r"in_array.size=1 .* at least 2"),
        ("all_gather", (2, 5), (2,), r"out_array.size=5 .* at least 6"),
        ("gather", (2, 9), (1,), r"out_array.size=9 .* 6 elements, in_array.size=2 for each of 3"),
        ("gather", (2, 5), (1,), r"out_array.size=5 .* a multiple of 3 elements"),
        ("scatter", (9, 2), (1,), r"in_array.size=9 .* 6 elements, out_array.size=2 for each"),
        ("scatter", (4, 2), (1,), r"in_array.size=4 .* a multiple of 3"),
        ("all_to_all", (7, 6), (), r"in_array.size=7 .* a multiple of 3"),
        ("all_to_all", (6, 7), (), r"out_array.size=7 .* a multiple of 3"),
        ("all_to_all", (6, 9), (), r"out_array.size=9 .* 6 elements, which in_array has"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_sides(
    rank: Rank, call: str, shapes: tuple[int, int], more: tuple[int, ...], message: str
) -> None:
    source, target = (rank.make(shape) for shape in shapes)
    cupy_zc.view(target)[:] = 7
    method = getattr(rank.comm, call)
    _refused(InvalidValueError, call, message, lambda: method(source, target, *more))
    assert (cupy_zc.view(target) == 7).all()


@pytest.mark.parametrize("call", ["gather", "scatter", "all_to_all"])
def test_rows_in_fortran_order_are_refused(rank: Rank, call: str) -> None:
    square = rank.make((3, 3), order="F"), rank.make((3, 3), order="F")
    method = getattr(rank.comm, call)
    _refused(
        InvalidValueError, call, "an array in F order.*C order, so that",
        lambda: method(*square, *TWO[call][2]),
    )  # fmt: skip


@pytest.mark.parametrize("call", ["all_reduce", "reduce", "reduce_scatter"])
def test_ops_that_are_unknown_or_have_no_meaning_are_refused(rank: Rank, call: str) -> None:
    source, target, more = TWO[call]
    method = getattr(rank.comm, call)

    def refused(op: Any, dtype: str, message: str) -> None:
        arrays = rank.make(source, dtype), rank.make(target, dtype)
        _refused(InvalidValueError, call, message, lambda: method(*arrays, *more, op))

    refused("mean", "f4", "op='mean' .* one of 'sum', 'prod', 'min', 'max', 'avg'")
    refused(None, "f4", "op=None")
    refused("min", "c8", "'sum', 'prod' or 'avg' for complex arrays")
    refused("max", "c16", "'sum', 'prod' or 'avg' for complex arrays")
    refused("avg", "?", "for bool arrays")


@pytest.mark.parametrize(
    ("call", "arrays", "name"),
    [
        ("reduce", 2, "root"), ("broadcast", 1, "root"), ("gather", 2, "root"),
        ("scatter", 2, "root"), ("send", 1, "peer"), ("recv", 1, "peer"),
        ("send_recv", 2, "peer"),
    ],
)  # fmt: skip
def test_ranks_that_there_are_not_are_refused(
    rank: Rank, call: str, arrays: int, name: str
) -> None:
    given = [rank.make(6) for _ in range(arrays)]
    method = getattr(rank.comm, call)
    for wrong in (3, -1):
        _refused(
            InvalidValueError, call, f"{name}={wrong} .* 0 to 2", lambda w=wrong: method(*given, w)
        )
    for odd in (1.0, "1", None, True):
        _refused(InvalidTypeError, call, f"{name} is a .* 0 to 2", lambda o=odd: method(*given, o))


@pytest.mark.parametrize("call", ["reduce_scatter", "all_gather"])
def test_counts_that_are_none_are_refused(rank: Rank, call: str) -> None:
    method = getattr(rank.comm, call)
    arrays = rank.make(6), rank.make(6)
    _refused(InvalidValueError, call, "count=-1 .* 0 or more", lambda: method(*arrays, -1))
    _refused(InvalidTypeError, call, "count is a float", lambda: method(*arrays, 2.0))


@pytest.mark.parametrize("call", ["broadcast", "send", "recv"])
def test_calls_of_one_array_check_it_too(rank: Rank, call: str) -> None:
    method = getattr(rank.comm, call)
    _refused(InvalidTypeError, call, "is a ndarray", lambda: method(np.ones(3), 0))
    _refused(InvalidValueError, call, "strides", lambda: method(rank.make(12)[::2], 0))
    _refused(InvalidTypeError, call, "a dtype among", lambda: method(rank.make(3, "M8[s]"), 0))


def test_to_oneself_both_arrays_must_fit(rank: Rank) -> None:
    _refused(
        InvalidValueError, "send_recv", "3 elements of float32.* 4 elements of float32, which this",
        lambda: rank.comm.send_recv(rank.make(4), rank.make(3), 1),
    )  # fmt: skip


def test_what_a_rank_does_not_use_is_not_looked_at() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            array, rows = comm.empty(3, "i4"), comm.zeros((2, 3), "i4")
            cupy_zc.copyto(array, comm.rank + 1)
            there = comm.rank == 0
            comm.reduce(array, array if there else None, 0)
            comm.gather(array, rows if there else None, 0)
            comm.scatter(rows if there else None, array, 0)
            assert cupy_zc.asnumpy(array)[0] == (3 if there else 2)

        work.run(comms, body)


def test_outputs_may_be_longer_than_needed_and_stay_as_they_are_there() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> list[int]:
            given, taken = comm.zeros(4, "i4"), comm.zeros(9, "i4")
            cupy_zc.copyto(given, comm.rank + 1)
            cupy_zc.copyto(taken, 7)
            comm.all_reduce(given, taken)
            comm.all_gather(given, taken[4:], 2)
            return cupy_zc.asnumpy(taken).tolist()

        assert work.run(comms, body) == [[3, 3, 3, 3, 1, 1, 2, 2, 7]] * 2


def test_sending_to_oneself_does_not_change_the_order_of_elements(rank: Rank) -> None:
    """Ends: send_recv to the own rank taking a C array for a Fortran one in silence."""
    given, taken = rank.make((2, 3), "i4"), rank.make((2, 3), "i4", "F")
    cupy_zc.copyto(taken, 7)
    _refused(
        InvalidValueError,
        "send_recv",
        "6 elements of int32 in Fortran order.*sends to itself",
        lambda: rank.comm.send_recv(given, taken, 1),
    )
    assert (cupy_zc.asnumpy(taken) == 7).all()


@pytest.mark.parametrize("op", [np.array(["sum", "x"]), None, 3, ["sum"]], ids=repr)
def test_an_operation_that_is_no_text_is_refused_and_not_compared(rank: Rank, op: Any) -> None:
    """Ends: an array as operation raising whatever its comparison raises."""
    array = rank.make(6)
    for wrong in (op, array):
        _refused(
            InvalidValueError,
            "all_reduce",
            "op=.*'sum'",
            lambda wrong=wrong: rank.comm.all_reduce(array, array, wrong),
        )


def test_a_stream_that_cannot_be_used_is_refused_with_call_and_rank() -> None:
    """Ends: a stream of another device being used, and stream errors that name no rank."""
    driver = HostDriver(granularity=1 << 12, devices=2, memory=1 << 34)
    with work.communicators(1, driver=driver) as (comm,):
        array = comm.zeros(6, "f4")
        with driver.use_device(1):
            elsewhere = driver.make_stream()
        named = r"Communicator\.all_reduce \(rank 0 of 1\): .*stream"
        with pytest.raises(InvalidValueError, match=f"(?s){named}.*device 0"):
            comm.all_reduce(array, array, stream=elsewhere)
        with pytest.raises(InvalidTypeError, match=named):
            comm.all_reduce(array, array, stream="s7")
        comm.all_reduce(array, array, stream=driver.make_stream())


def test_a_layout_is_shown_whole(rank: Rank) -> None:
    array = rank.make((64, 64, 64))[:, ::2, ::2]
    _refused(
        InvalidValueError,
        "all_reduce",
        r"shape \(64, 32, 32\), strides \(16384, 512, 8\)",
        lambda: rank.comm.all_reduce(array, array),
    )


def test_to_preload_what_there_is_not_is_refused() -> None:
    comm = Communicator.in_process(1, driver=HostDriver())[0]
    with comm:
        comm.preload("float32")
        comm.preload(np.int8, op="max")
        with pytest.raises(InvalidTypeError, match=r"preload .*dtype.*float128.*one of bool"):
            comm.preload("float128")
        with pytest.raises(InvalidTypeError, match=r"preload .*dtype"):
            comm.preload("no type at all")
        with pytest.raises(InvalidValueError, match=r"preload .*op.*complex arrays"):
            comm.preload("complex64", "max")
