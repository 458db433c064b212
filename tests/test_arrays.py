"""Arrays in host memory without any pool, and on a GPU where there is one."""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from collections.abc import Iterator
from typing import Any

import cupy
import cupyx.scipy.sparse
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_zc import arrays
from cupy_zc.errors import InvalidTypeError, InvalidValueError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]


class HostMemory(cupy.cuda.BaseMemory):
    """What the pool's blocks look like on the host driver: an anonymous mapping."""

    driver_name = "host"

    def __init__(self, size: int) -> None:
        self.mapping = mmap.mmap(-1, max(size, 1))
        self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        self.size = size
        self.device_id = 3


def allocate(size: int) -> Any:
    return cupy.cuda.MemoryPointer(HostMemory(size), 0)


@pytest.fixture(scope="module", autouse=True)
def host_memory() -> Iterator[None]:
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(allocate)
    yield
    cupy.cuda.set_allocator(before)


@pytest.fixture
def cuda_memory() -> Iterator[None]:
    pool = cupy.cuda.MemoryPool()
    cupy.cuda.set_allocator(pool.malloc)
    yield
    cupy.cuda.set_allocator(allocate)


def counting(shape: tuple[int, ...], dtype: Any = np.float32, order: str = "C") -> Any:
    """An array that holds 0, 1, 2, ... in C order of its elements."""
    array = cupy.empty(shape, dtype=dtype, order=order)
    arrays.copyto(array, np.arange(array.size).reshape(shape).astype(dtype))
    return array


# view


def test_a_view_is_the_same_bytes() -> None:
    array = counting((3, 4))
    view = arrays.view(array)
    assert type(view) is np.ndarray
    assert (view.shape, view.strides, view.dtype) == ((3, 4), array.strides, np.float32)
    assert view.ctypes.data == array.data.ptr
    view[1, 2] = 77
    assert arrays.asnumpy(array)[1, 2] == 77


SLICES = st.builds(
    slice,
    st.none() | st.integers(-5, 5),
    st.none() | st.integers(-5, 5),
    st.sampled_from([None, 1, 2, 3, -1, -2, -3]),
)


@given(
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple),
    order=st.sampled_from("CF"),
    dtype=st.sampled_from([*DTYPES, BFLOAT16]),
    data=st.data(),
)
def test_a_view_shows_what_numpy_would(
    shape: tuple[int, ...], order: str, dtype: Any, data: st.DataObject
) -> None:
    array = counting(shape, dtype, order)
    expected = np.arange(array.size).reshape(shape).astype(dtype)
    for _ in range(data.draw(st.integers(0, 3))):
        key: Any = tuple(data.draw(SLICES) for _ in array.shape)
        axes = data.draw(st.permutations(range(array.ndim)))
        array, expected = array[key].transpose(axes), expected[key].transpose(axes)
    view = arrays.view(array)
    assert view.shape == expected.shape
    assert view.dtype == expected.dtype
    np.testing.assert_array_equal(view, expected)
    if array.size:
        assert view.strides == array.strides
        assert view.ctypes.data == array.data.ptr
    arrays.copyto(array, np.zeros((), dtype))
    assert not view.any()


def test_a_view_of_a_broadcast_array_repeats_it() -> None:
    wide = cupy.broadcast_to(counting((4,)), (3, 4))
    np.testing.assert_array_equal(arrays.view(wide), np.broadcast_to(np.arange(4), (3, 4)))


def test_a_view_of_nothing_is_empty() -> None:
    for shape in ((0,), (3, 0, 2)):
        view = arrays.view(cupy.empty(shape, dtype=np.int16))
        assert (view.shape, view.dtype, view.size) == (shape, np.int16, 0)


def test_a_view_keeps_the_memory_alive() -> None:
    array = counting((4,))
    memory = weakref.ref(array.data.mem)
    view = arrays.view(array[1:])
    del array
    gc.collect()
    assert memory() is not None
    assert view.tolist() == [1, 2, 3]
    del view
    gc.collect()
    assert memory() is None


def test_bfloat16_arrays_are_ordinary_arrays() -> None:
    array = counting((5,), BFLOAT16)
    assert array.dtype == BFLOAT16
    assert array.nbytes == 10
    assert arrays.view(array).astype(np.float32).tolist() == [0, 1, 2, 3, 4]
    arrays.copyto(array, 1.5)
    assert arrays.asnumpy(array).tolist() == [1.5] * 5
    assert arrays.inspect(array, "all_reduce", "array").dtype == BFLOAT16


# asnumpy and copyto


def test_asnumpy_is_a_copy_in_c_order() -> None:
    array = counting((2, 3), order="F")
    copy = arrays.asnumpy(array)
    assert copy.flags.c_contiguous
    assert copy.flags.owndata
    arrays.copyto(array, -1)
    assert copy.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_asnumpy_returns_a_numpy_array_as_it_is() -> None:
    array = np.arange(3)
    assert arrays.asnumpy(array) is array


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (2, [[2, 2, 2], [2, 2, 2]]),
        (2.5, [[2.5] * 3] * 2),
        (np.float64(2.5), [[2.5] * 3] * 2),
        ([1, 2, 3], [[1, 2, 3], [1, 2, 3]]),
        ([[1], [2]], [[1, 1, 1], [2, 2, 2]]),
        (np.arange(6, dtype=np.int64).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
        (np.arange(6, dtype=np.float64).reshape(1, 2, 3), [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_copyto_broadcasts_and_casts_as_numpy_does(values: Any, expected: Any) -> None:
    array = cupy.empty((2, 3), dtype=np.float32)
    arrays.copyto(array, values)
    assert arrays.asnumpy(array).tolist() == expected


def test_copyto_takes_an_array_in_host_memory() -> None:
    source, target = counting((2, 3)), cupy.empty((3, 2), dtype=np.float64)
    arrays.copyto(target, source.T)
    assert arrays.asnumpy(target).tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("values", [1.5, np.array([1.5]), [1j], np.array(["a"]), [object()]])
def test_copyto_refuses_what_would_lose_the_kind(values: Any) -> None:
    array = counting((3,), np.int32)
    with pytest.raises(InvalidTypeError, match=r"copyto: values.*cast to int32"):
        arrays.copyto(array, values)
    assert arrays.asnumpy(array).tolist() == [0, 1, 2]


@pytest.mark.parametrize("values", [[1, 2], np.zeros((2, 3), np.int8), [[1, 2], [3]], 1 << 40])
def test_copyto_refuses_what_does_not_fit(values: Any) -> None:
    array = counting((3,), np.int32)
    with pytest.raises(InvalidValueError, match=r"copyto: values.*fit int32 and broadcast to \(3,"):
        arrays.copyto(array, values)
    assert arrays.asnumpy(array).tolist() == [0, 1, 2]


@pytest.mark.parametrize("wrong", [[1, 2], None, 7])
def test_what_is_no_array_is_refused_everywhere(wrong: Any) -> None:
    for call in (arrays.view, arrays.asnumpy, lambda value: arrays.copyto(value, 0)):
        with pytest.raises(InvalidTypeError, match=r"array is a .*expected .*cupy\.ndarray"):
            call(wrong)


# inspect


@pytest.mark.parametrize("dtype", [*DTYPES, BFLOAT16])
def test_an_array_in_one_piece_is_described(dtype: Any) -> None:
    array = cupy.empty((2, 3), dtype=dtype)
    info = arrays.inspect(array, "all_reduce", "in_array")
    itemsize = np.dtype(dtype).itemsize
    assert info == (array.data.ptr, 6 * itemsize, np.dtype(dtype), (2, 3), "C", 3, 6)
    assert arrays.inspect(array.T, "all_reduce", "in_array").order == "F"
    assert info._fields == ("ptr", "nbytes", "dtype", "shape", "order", "device", "size")


def test_parts_that_lie_in_one_piece_can_take_part() -> None:
    array = counting((4, 6))
    for part, order, offset in (
        (array[1:3], "C", 24),
        (array[2, 1:4], "C", 52),
        (array[:, :1].T[:, :1], "C", 0),
        (array[0:0], "C", 0),
        (cupy.empty((4, 6), order="F")[:, 2:], "F", None),
        (cupy.empty(()), "C", None),
    ):
        info = arrays.inspect(part, "all_reduce", "in_array")
        assert info.order == order
        assert (info.size, info.nbytes, info.shape) == (part.size, part.nbytes, part.shape)
        if offset is not None:
            assert info.ptr == array.data.ptr + offset


@pytest.mark.parametrize(
    "key",
    [
        np.s_[:, :2],
        np.s_[::2],
        np.s_[::-1],
        np.s_[:, ::-1],
    ],
)
def test_parts_with_gaps_or_reversed_cannot(key: Any) -> None:
    array = counting((4, 6))[key]
    with pytest.raises(InvalidValueError) as caught:
        arrays.inspect(array, "broadcast", "in_out_array")
    text = str(caught.value)
    assert text.startswith("broadcast: in_out_array=")
    assert str(array.strides) in text
    assert "cupy.ascontiguousarray" in text


@pytest.mark.parametrize(
    ("wrong", "help_"),
    [
        (np.zeros(3), r"cupy\.asarray"),
        ([1, 2], r"call once for each array"),
        ((), r"call once for each array"),
        (3.5, r"expected a cupy\.ndarray$"),
        (None, r"expected a cupy\.ndarray$"),
    ],
)
def test_each_wrong_kind_has_its_own_advice(wrong: Any, help_: str) -> None:
    with pytest.raises(InvalidTypeError, match=f"(?s)all_gather: in_array is a .*{help_}"):
        arrays.inspect(wrong, "all_gather", "in_array")


@pytest.mark.parametrize("kind", ["csr_matrix", "csc_matrix", "coo_matrix", "dia_matrix"])
def test_a_sparse_matrix_has_advice_too(kind: str) -> None:
    # Made without __init__, which needs a GPU; then it has nothing that repr() could show.
    base = getattr(cupyx.scipy.sparse, kind)
    named = type(kind, (base,), {"__repr__": lambda self: "a matrix", "__str__": None})
    with pytest.raises(InvalidTypeError, match=r"toarray\(\)"):
        arrays.inspect(named.__new__(named), "all_gather", "in_array")


# On a GPU


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda_memory")
def test_on_cuda_the_view_is_the_array_itself() -> None:
    array = cupy.arange(6, dtype=np.float32).reshape(2, 3)
    assert arrays.view(array) is array
    assert arrays.asnumpy(array.T).tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda_memory")
@pytest.mark.parametrize("dtype", [np.float32, np.int32, BFLOAT16])
def test_on_cuda_copyto_does_the_same(dtype: Any) -> None:
    array = cupy.empty((2, 3), dtype=dtype)[:, ::-1]
    for values in (2, np.int8(3), [[1], [2]], np.arange(3, dtype=np.int8)):
        arrays.copyto(array, values)
        assert arrays.asnumpy(array).tolist() == np.broadcast_to(values, (2, 3)).tolist()
        values = cupy.asarray(np.asarray(values).astype(dtype))
        arrays.copyto(array, values)
        plain = values.get()
        assert arrays.asnumpy(array).tolist() == np.broadcast_to(plain, (2, 3)).tolist()
    for wrong in (1j, np.complex64(1j), [1j], np.array(["a"]), cupy.array([1j])):
        with pytest.raises(InvalidTypeError, match="cast to"):
            arrays.copyto(array, wrong)
    for wrong in ([1, 2], cupy.arange(2, dtype=dtype)):
        with pytest.raises(InvalidValueError, match="broadcast to"):
            arrays.copyto(array, wrong)


@pytest.mark.gpu
def test_values_cross_between_host_and_cuda_memory() -> None:
    host = counting((4,))
    cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc)
    try:
        device = cupy.empty(4, dtype=np.float32)
        arrays.copyto(device, host)
        device += 1
        arrays.copyto(host, device)
    finally:
        cupy.cuda.set_allocator(allocate)
    assert arrays.asnumpy(host).tolist() == [1, 2, 3, 4]
