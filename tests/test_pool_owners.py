"""A snapshot with arrays says what is in each block, and by what Python path it is kept alive."""

from __future__ import annotations

import collections
import gc
from typing import Any

import cupy
import pytest

import cupy_zc
from cupy_zc.driver.host import HostDriver

kept: Any = None


class Model:
    def __init__(self, weights: Any) -> None:
        self.weights = weights


class Slotted:
    __slots__ = ("weights",)

    def __init__(self, weights: Any) -> None:
        self.weights = weights


@pytest.fixture
def pool(allocator: Any) -> Any:
    made = cupy_zc.MemoryPool(driver=HostDriver())
    allocator(made)
    yield made
    globals()["kept"] = None


def found(pool: cupy_zc.MemoryPool) -> list[dict[str, Any]]:
    gc.collect()
    blocks = [
        block
        for device in pool.snapshot(arrays=True)["devices"]
        for segment in device["segments"]
        for block in segment["blocks"]
        if block["state"] == "used"
    ]
    return [array for block in blocks for array in block["arrays"]]


@pytest.mark.parametrize(
    ("hold", "path"),
    [
        (lambda a: a, f"{__name__}.kept"),
        (lambda a: [0, a], f"{__name__}.kept[1]"),
        (lambda a: {"w": (a,)}, f"{__name__}.kept['w'][0]"),
        (lambda a: {3: a}, f"{__name__}.kept[3]"),
        (lambda a: {(1, 2): a}, f"{__name__}.kept[...]"),
        (lambda a: collections.deque([a]), f"{__name__}.kept[0]"),
        (lambda a: a[1:], f"{__name__}.kept.base"),
        (lambda a: Model([a]), "<Model>.weights[0]"),
        (lambda a: Model(a), "<Model>.weights"),
        (lambda a: Slotted(a), "<Slotted>"),
        (lambda a: [[[[[[a]]]]]], "<list>[0][0][0][0]"),  # deeper than it looks
    ],
)
def test_an_array_is_named_by_what_holds_it(pool: Any, hold: Any, path: Any) -> None:
    global kept
    kept = hold(cupy.empty((2, 3), "f4"))
    (array,) = found(pool)
    assert array == {"shape": [2, 3], "dtype": "float32", "held_by": array["held_by"]}
    assert array["held_by"] == path


def test_a_local_variable_is_named_with_its_function(pool: Any) -> None:
    weights = cupy.empty(7, "i2")
    (array,) = found(pool)
    assert array["held_by"].startswith("local weights of test_a_local_variable")
    del weights


def test_a_variable_of_a_closure_is_followed(pool: Any) -> None:
    def make() -> Any:
        captured = cupy.empty(1)
        return lambda: captured

    global kept
    kept = make()
    (array,) = found(pool)
    assert array["held_by"] is not None


def test_attributes_in_a_dict_that_was_asked_for_are_named_alike(pool: Any) -> None:
    global kept
    kept = Model(cupy.empty(1))
    assert kept.__dict__  # from now on it is an object of its own
    (array,) = found(pool)
    assert array["held_by"] == "<Model>.weights"


def test_memory_without_an_array_has_none(pool: Any) -> None:
    pointer = pool.malloc(1000)
    assert found(pool) == []
    del pointer


def test_arrays_of_another_pool_are_left_out(pool: Any, allocator: Any) -> None:
    other = cupy_zc.MemoryPool(driver=HostDriver())
    allocator(other)
    array = cupy.empty(1)
    assert found(pool) == []
    assert len(found(other)) == 1
    del array


def test_classes_are_not_asked_for_anything(pool: Any) -> None:
    """Ends: looking for arrays ran ``__class__`` and ``__getattribute__`` of whatever was alive."""

    class Trap:
        @property
        def __class__(self) -> Any:  # type: ignore[misc]
            raise AssertionError("asked for its class")

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    global kept
    trap = Trap()
    kept = [trap, cupy.empty(1)]
    object.__getattribute__(trap, "__dict__")["array"] = kept[1]
    (array,) = found(pool)
    assert array["held_by"] is not None


def test_a_plain_snapshot_does_not_look(pool: Any) -> None:
    array = cupy.empty(1)
    (device,) = pool.snapshot()["devices"]
    assert not any("arrays" in block for block in device["segments"][0]["blocks"])
    del array
