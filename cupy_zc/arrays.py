"""Arrays on either driver: read them, fill them, look at their bytes, and judge them.

A ``cupy.ndarray`` is a shape over memory, and it is the memory that says which driver it came
from: ``array.data.mem.driver_name`` is ``"host"`` for a pool on the host driver. Anything else,
memory of CuPy's own allocator included, is CUDA memory.

Without a GPU, CuPy itself can create, slice, transpose and describe such arrays, but not read or
compute on them; :func:`view` gives NumPy the same bytes. The host driver does its work in the
calling thread, so there is nothing to wait for: a view shows what the last call left.

``bfloat16`` works wherever CuPy has it: CuPy 14 knows the type by its ``ml_dtypes`` scalar and
creates such arrays, also without a GPU, and NumPy takes the same dtype. The 8-bit types of
``ml_dtypes`` are refused by CuPy 14 itself.
"""

from __future__ import annotations

import sys
from typing import Any, Literal, NamedTuple

import cupy
import numpy as np

from .errors import InvalidTypeError, InvalidValueError

__all__ = ["ArrayInfo", "asnumpy", "copyto", "inspect", "on_host", "view"]

_SPARSE = "cupyx.scipy.sparse"


class ArrayInfo(NamedTuple):
    """What a collective needs to know about an array; see :func:`inspect`.

    A tuple because one is made in every collective call: it costs 0.2 us to make, where a frozen
    dataclass of as many fields costs 0.8.
    """

    #: Address of the first element.
    ptr: int
    #: Bytes, ``size * dtype.itemsize``.
    nbytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    #: The order in which elements follow each other; ``"C"`` where both would be right.
    order: Literal["C", "F"]
    #: Ordinal of the device the memory belongs to.
    device: int
    #: Number of elements.
    size: int


def inspect(array: cupy.ndarray, call: str, name: str) -> ArrayInfo:
    """Decide whether an array can take part in a collective, and say what it is.

    It can if it is a ``cupy.ndarray`` whose elements lie in memory without gaps, in C or in
    Fortran order. Where its memory is, and whether that is registered, is the communicator's
    business.

    Args:
        array: What the user passed.
        call: The public call it was passed to, for the error.
        name: The parameter, for the error.

    Raises:
        InvalidTypeError: it is not a ``cupy.ndarray``.
        InvalidValueError: its elements do not lie in one piece.
    """
    if not isinstance(array, cupy.ndarray):
        raise InvalidTypeError(call, name, array, _instead_of(array))
    flags = array.flags
    order: Literal["C", "F"]
    if flags.c_contiguous:
        order = "C"
    elif flags.f_contiguous:
        order = "F"
    else:
        layout = f"shape {array.shape}, strides {array.strides}"
        raise InvalidValueError(
            call, name, layout, "elements in one piece; pass cupy.ascontiguousarray(...) of it"
        )
    data = array.data
    return ArrayInfo(
        data.ptr, array.nbytes, array.dtype, array.shape, order, data.device_id, array.size
    )


def _instead_of(array: object) -> str:
    """The sentence that helps somebody who passed the wrong kind of array."""
    sparse = sys.modules.get(_SPARSE)  # if nobody imported it, this is not one of its matrices
    if isinstance(array, np.ndarray):
        return "a cupy.ndarray; copy it to the device first, with cupy.asarray(...)"
    if sparse is not None and sparse.issparse(array):
        return "a dense cupy.ndarray; pass its data, indices and indptr, or .toarray() of it"
    if isinstance(array, (list, tuple)):
        return "one cupy.ndarray; make one with cupy.array(...), or call once for each array"
    return "a cupy.ndarray"


def on_host(array: cupy.ndarray) -> bool:
    """Whether the array lives in memory of the host driver."""
    return getattr(array.data.mem, "driver_name", None) == "host"


class _Bytes:
    """A range of host memory, for NumPy; keeps the memory of an array alive."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }
        self._owner = owner


def view(array: cupy.ndarray) -> Any:
    """The array in the form one can compute with here.

    Args:
        array: Any ``cupy.ndarray``: a slice, transposed, reversed, broadcast, empty.

    Returns:
        On the host driver a ``numpy.ndarray`` of the same bytes, with the same shape, strides and
        dtype; it is writable, and keeps the memory alive. On CUDA the array itself.

    Raises:
        InvalidTypeError: it is not a ``cupy.ndarray``.
    """
    _require_array(array, "view")
    return _host_view(array) if on_host(array) else array


def _host_view(array: cupy.ndarray) -> np.ndarray[Any, Any]:
    shape, strides, dtype, address = array.shape, array.strides, array.dtype, array.data.ptr
    if array.size == 0:
        return np.empty(shape, dtype)  # no bytes, so none to share
    reach = [stride * (length - 1) for length, stride in zip(shape, strides, strict=True)]
    below = -sum(step for step in reach if step < 0)  # a reversed axis begins at its far end
    above = sum(step for step in reach if step > 0) + dtype.itemsize
    data = np.asarray(_Bytes(address - below, below + above, array.data))
    result: np.ndarray[Any, Any]
    result = np.ndarray(shape, dtype, buffer=data, offset=below, strides=strides)
    return result


def _require_array(array: object, call: str) -> None:
    if not isinstance(array, cupy.ndarray):
        raise InvalidTypeError(call, "array", array, _instead_of(array))


def asnumpy(array: Any) -> np.ndarray[Any, Any]:
    """A copy of an array in host memory, as :func:`cupy.asnumpy` makes it, on either driver.

    Args:
        array: A ``cupy.ndarray``. A ``numpy.ndarray`` is returned as it is, so that the results
            of ``comm.xp`` functions can be passed as well.

    Returns:
        A ``numpy.ndarray`` in C order. On CUDA the copy is made after the work of the current
        stream, and is waited for.

    Raises:
        InvalidTypeError: it is neither.
    """
    result: np.ndarray[Any, Any]
    if isinstance(array, np.ndarray):
        result = array
    else:
        _require_array(array, "asnumpy")
        host = on_host(array)
        if not host:  # see CudaDriver.read() for why the stream is waited for before the copy
            cupy.cuda.get_current_stream().synchronize()
        result = np.array(_host_view(array), order="C") if host else cupy.asnumpy(array)
    return result


def copyto(array: cupy.ndarray, values: Any) -> None:
    """Fill an array with values, as :func:`numpy.copyto` does, on either driver.

    Args:
        array: A ``cupy.ndarray``, of any layout.
        values: A ``cupy.ndarray`` on either driver, or anything NumPy makes an array of. It is
            broadcast to the shape of ``array`` and cast to its dtype by the rule ``same_kind``:
            float64 to float32 is fine, float to integer is not. Plain Python numbers must fit.

    On CUDA the copy is enqueued on the current stream; host values have been read on return.

    Raises:
        InvalidTypeError: ``array`` is not a ``cupy.ndarray``, or the values cannot be cast.
        InvalidValueError: the values cannot be broadcast, or do not fit.
    """
    _require_array(array, "copyto")
    host = on_host(array)
    if isinstance(values, cupy.ndarray) and (host or on_host(values)):
        values = _host_view(values) if on_host(values) else cupy.asnumpy(values)
    try:
        kind = (values if hasattr(values, "dtype") else np.asarray(values)).dtype.kind
        if kind == "c" and array.dtype.kind != "c":  # ml_dtypes would drop the imaginary parts
            raise TypeError("complex values have no place in it")
        if host:
            np.copyto(_host_view(array), values, casting="same_kind")
        elif isinstance(values, cupy.ndarray):
            cupy.copyto(array, values, casting="same_kind")
        else:
            cast = np.empty(np.shape(values), array.dtype)
            np.copyto(cast, values, casting="same_kind")
            cupy.copyto(array, cupy.asarray(cast))
    except TypeError as error:
        allowed = f"values of a kind that can be cast to {array.dtype} ({error})"
        raise InvalidTypeError("copyto", "values", values, allowed) from error
    except (ValueError, OverflowError) as error:
        allowed = f"values that fit {array.dtype} and broadcast to {array.shape} ({error})"
        raise InvalidValueError("copyto", "values", values, allowed) from error
