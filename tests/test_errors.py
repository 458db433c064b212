"""The exception tree is as its docstring draws it, and messages hold what they should."""

from __future__ import annotations

import inspect
import pickle
import re

import cupy
import pytest

import cupy_zc
from cupy_zc import errors


def test_every_exception_is_drawn_public_and_an_error():
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__))
    assert drawn | {"Error"} == set(errors.__all__)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.Error)
        assert getattr(cupy_zc, name) is getattr(errors, name)


def test_the_drawn_builtin_base_is_the_real_one():
    for name, base in re.findall(r"── (\w+)\s+\(([\w.]+)\)", errors.__doc__):
        wanted = {"cupy.cuda.memory.OutOfMemoryError": cupy.cuda.memory.OutOfMemoryError}
        builtin = wanted.get(base) or __builtins__[base]
        assert issubclass(getattr(errors, name), builtin)


def test_argument_errors_name_call_argument_value_and_what_is_allowed():
    value = errors.InvalidValueError("all_reduce", "op", "xor", "one of sum, prod")
    assert str(value) == "all_reduce: op='xor' is not allowed; expected one of sum, prod"
    kind = errors.InvalidTypeError("all_reduce", "in_array", [1], "a cupy.ndarray")
    assert str(kind) == "all_reduce: in_array is a list ([1]); expected a cupy.ndarray"


def test_long_values_are_shortened():
    assert len(str(errors.InvalidValueError("f", "x", list(range(10_000)), "less"))) < 200


def test_a_driver_error_names_call_result_and_cause():
    error = errors.DriverError(
        "cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", 2, detail="size=64", cause="the device is full"
    )
    assert str(error) == (
        "cuMemCreate(size=64) returned CUDA_ERROR_OUT_OF_MEMORY (2): the device is full"
    )
    assert error.out_of_memory
    assert not errors.DriverError("cuMemMap", "CUDA_ERROR_INVALID_VALUE", 1).out_of_memory


def test_out_of_memory_survives_pickling_as_cupys_does():
    error = errors.OutOfMemoryError(512, 1024, 2048, largest_hole=256, free=300, reason="full")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.size, copy.total, copy.limit) == (512, 1024, 2048)
    assert (copy.largest_hole, copy.free, copy.reason) == (256, 300, "full")


def test_without_a_limit_it_says_none():
    assert "limit: none" in str(errors.OutOfMemoryError(512, 0))


def test_a_timeout_keeps_the_ranks():
    error = errors.PeerTimeoutError("barrier: no word from rank 3", ranks=[3])
    assert error.ranks == (3,)
    assert isinstance(error, TimeoutError)


def test_an_agreement_error_keeps_the_rank():
    assert errors.AgreementError("map failed on rank 2", 2).rank == 2


@pytest.mark.parametrize("name", errors.__all__)
def test_every_exception_has_a_docstring(name):
    assert inspect.getdoc(getattr(errors, name))
