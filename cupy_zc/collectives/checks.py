"""Arguments of collectives, checked before anything is enqueued, and made into a :class:`Call`.

Every error names the call, the rank, and both sides of what does not fit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from ..arrays import ArrayInfo, inspect, on_host
from ..errors import InvalidTypeError, InvalidValueError
from .call import Call
from .dtypes import DTYPES, code_of, refuse_reduction
from .plan import REDUCTIONS, Operation

__all__ = ["Checker", "overlap"]


def overlap(one: ArrayInfo, other: ArrayInfo) -> bool:
    """Whether two arrays share a byte."""
    return (
        one.ptr < other.ptr + other.nbytes
        and other.ptr < one.ptr + one.nbytes
        and bool(one.nbytes and other.nbytes)
    )


@dataclass(frozen=True, slots=True)
class Checker:
    """What a rank can check by itself.

    Args:
        rank: This one.
        size: Number of ranks.
        device: The device that arrays must belong to.
        host: Whether that is one of the host driver.
        refuses: What is allowed in place of a reduction of a dtype that the engine cannot do;
            None where it can.
        group: Whose ranks these are, where they are not those of the communicator.
    """

    rank: int
    size: int
    device: int
    host: bool = True
    refuses: Callable[[np.dtype[Any], str], str | None] = refuse_reduction
    group: str = ""

    def name(self, call: str) -> str:
        """A call as errors name it."""
        return f"Communicator.{call} (rank {self.rank} of {self.size}{self.group})"

    # One argument

    def array(self, call: str, name: str, array: Any) -> ArrayInfo:
        """An array that can take part.

        Raises:
            InvalidTypeError: not a ``cupy.ndarray``, or of a dtype that collectives do not know.
            InvalidValueError: not in one piece, of another device, or not memory of the host.
        """
        where = self.name(call)
        info = inspect(array, where, name)
        if code_of(info.dtype) is None:
            raise InvalidTypeError(where, name, array, f"a dtype among {', '.join(DTYPES)}")
        if on_host(array) != self.host:
            raise InvalidValueError(
                where, name, array,
                f"memory of the {'host' if self.host else 'cuda'} driver, which this communicator "
                "works on; allocate it after cupy_zc.install(), or with empty() or zeros() of the "
                "communicator",
            )  # fmt: skip
        if info.device != self.device:
            allowed = f"an array of device {self.device}, the communicator's"
            raise InvalidValueError(where, name, f"an array of device {info.device}", allowed)
        return info

    def number(self, call: str, name: str, value: Any, limit: int | None) -> int:
        """A whole number from 0, below ``limit``."""
        most = "" if limit is None else f" to {limit - 1}"
        allowed = f"an int, 0{most or ' or more'}"
        try:
            number = operator.index(value)
        except TypeError:
            raise InvalidTypeError(self.name(call), name, value, allowed) from None
        if isinstance(value, bool):
            raise InvalidTypeError(self.name(call), name, value, allowed)
        if number < 0 or (limit is not None and number >= limit):
            raise InvalidValueError(self.name(call), name, value, allowed)
        return number

    def rank_of(self, call: str, name: str, value: Any) -> int:
        """A rank of the communicator."""
        return self.number(call, name, value, self.size)

    def kind(self, call: str, dtype: Any, op: Any) -> tuple[int, int]:
        """The numbers of a dtype and of a reduction that it knows.

        Raises:
            InvalidTypeError: no dtype that collectives know. InvalidValueError: no such reduction.
        """
        try:
            kind = np.dtype(dtype)
        except TypeError:
            kind = None
        code = None if kind is None else code_of(kind)
        if kind is None or code is None:
            raise InvalidTypeError(self.name(call), "dtype", dtype, f"one of {', '.join(DTYPES)}")
        return code, self.reduction(call, op, kind)

    def reduction(self, call: str, op: Any, dtype: np.dtype[Any]) -> int:
        """The number of a reduction that the dtype knows."""
        if not isinstance(op, str) or op not in REDUCTIONS:  # an array would be compared
            allowed = f"one of {', '.join(map(repr, REDUCTIONS))}"
            raise InvalidValueError(self.name(call), "op", op, allowed)
        instead = self.refuses(dtype, op)
        if instead is not None:
            raise InvalidValueError(self.name(call), "op", op, instead)
        return REDUCTIONS.index(op)

    # Two arrays

    def pair(self, call: str, source: Any, target: Any) -> tuple[ArrayInfo, ArrayInfo, int]:
        """Input and output of a call, and whether both are in Fortran order.

        Raises:
            As :meth:`array`. InvalidTypeError: the dtypes differ. InvalidValueError: one is in C
            order and one in Fortran order.
        """
        given = self.array(call, "in_array", source)
        taken = self.array(call, "out_array", target)
        if given.dtype != taken.dtype:
            allowed = f"dtype {given.dtype}, which in_array has"
            raise InvalidTypeError(self.name(call), "out_array", target, allowed)
        if given.order != taken.order and not (_both(source) or _both(target)):
            raise InvalidValueError(
                self.name(call), "out_array", f"an array in {taken.order} order",
                f"{given.order} order, which in_array has; elements are passed on as they lie in "
                "memory, so make a copy of one in the order of the other",
            )  # fmt: skip
        return given, taken, int("F" in (given.order, taken.order))

    def sizes(self, call: str, name: str, has: int, needs: int, why: str, *, exact: bool) -> None:
        """Whether an array has the elements that a call needs.

        Raises:
            InvalidValueError: too few, or too many where it must be exact.
        """
        if has < needs or (exact and has != needs):
            allowed = f"{'' if exact else 'at least '}{needs} elements, {why}"
            raise InvalidValueError(self.name(call), f"{name}.size", has, allowed)

    def rows(self, call: str, name: str, info: ArrayInfo) -> int:
        """How many elements a row of a ``(ranks, ...)`` array has."""
        if info.order == "F":
            allowed = "C order, so that what belongs to a rank is in one piece"
            raise InvalidValueError(self.name(call), name, "an array in F order", allowed)
        if info.size % self.size:
            allowed = f"a multiple of {self.size} elements, as many for each rank"
            raise InvalidValueError(self.name(call), f"{name}.size", info.size, allowed)
        return info.size // self.size

    # Calls

    def all_reduce(self, source: Any, target: Any, op: Any) -> Call:
        """Check ``all_reduce``."""
        call = "all_reduce"
        given, taken, fortran = self.pair(call, source, target)
        self.sizes(call, "out_array", taken.size, given.size, "which in_array has", exact=False)
        reduction = self.reduction(call, op, given.dtype)
        return self._call(
            Operation.ALL_REDUCE, given, taken, given.size, source, target,
            reduction=reduction, fortran=fortran,
        )  # fmt: skip

    def reduce(self, source: Any, target: Any, root: Any, op: Any) -> Call:
        """Check ``reduce``; the output is looked at on the root only."""
        call = "reduce"
        root = self.rank_of(call, "root", root)
        given = self.array(call, "in_array", source)
        taken, fortran = None, int(given.order == "F")
        if self.rank == root:
            given, taken, fortran = self.pair(call, source, target)
            self.sizes(call, "out_array", taken.size, given.size, "which in_array has", exact=False)
        reduction = self.reduction(call, op, given.dtype)
        return self._call(
            Operation.REDUCE, given, taken, given.size, source, target,
            reduction=reduction, root=root, fortran=fortran,
        )  # fmt: skip

    def broadcast(self, array: Any, root: Any) -> Call:
        """Check ``broadcast``."""
        info = self.array("broadcast", "in_out_array", array)
        root = self.rank_of("broadcast", "root", root)
        fortran = int(info.order == "F")
        given, taken = (info, None) if self.rank == root else (None, info)
        return self._call(
            Operation.BROADCAST, given, taken, info.size, array, array, root=root, fortran=fortran
        )

    def reduce_scatter(self, source: Any, target: Any, count: Any, op: Any) -> Call:
        """Check ``reduce_scatter``."""
        call = "reduce_scatter"
        given, taken, fortran = self.pair(call, source, target)
        count = self.number(call, "count", count, None)
        why = f"count={count} for each of {self.size} ranks"
        self.sizes(call, "in_array", given.size, count * self.size, why, exact=False)
        self.sizes(call, "out_array", taken.size, count, "which is count", exact=False)
        reduction = self.reduction(call, op, given.dtype)
        return self._call(
            Operation.REDUCE_SCATTER, given, taken, count, source, target,
            reduction=reduction, fortran=fortran,
        )  # fmt: skip

    def all_gather(self, source: Any, target: Any, count: Any) -> Call:
        """Check ``all_gather``."""
        call = "all_gather"
        given, taken, fortran = self.pair(call, source, target)
        count = self.number(call, "count", count, None)
        why = f"count={count} for each of {self.size} ranks"
        self.sizes(call, "in_array", given.size, count, "which is count", exact=False)
        self.sizes(call, "out_array", taken.size, count * self.size, why, exact=False)
        return self._call(
            Operation.ALL_GATHER, given, taken, count, source, target, fortran=fortran
        )

    def gather(self, source: Any, target: Any, root: Any) -> Call:
        """Check ``gather``; the output is looked at on the root only."""
        call = "gather"
        root = self.rank_of(call, "root", root)
        given = self.array(call, "in_array", source)
        taken, fortran = None, int(given.order == "F")
        if self.rank == root:
            given, taken, fortran = self.pair(call, source, target)
            self.rows(call, "out_array", taken)
            why = f"in_array.size={given.size} for each of {self.size} ranks"
            needs = given.size * self.size
            self.sizes(call, "out_array", taken.size, needs, why, exact=True)
        return self._call(
            Operation.GATHER, given, taken, given.size, source, target, root=root, fortran=fortran
        )

    def scatter(self, source: Any, target: Any, root: Any) -> Call:
        """Check ``scatter``; the input is looked at on the root only."""
        call = "scatter"
        root = self.rank_of(call, "root", root)
        taken = self.array(call, "out_array", target)
        given, fortran = None, int(taken.order == "F")
        if self.rank == root:
            given, taken, fortran = self.pair(call, source, target)
            self.rows(call, "in_array", given)
            why = f"out_array.size={taken.size} for each of {self.size} ranks"
            needs = taken.size * self.size
            self.sizes(call, "in_array", given.size, needs, why, exact=True)
        return self._call(
            Operation.SCATTER, given, taken, taken.size, source, target, root=root, fortran=fortran
        )

    def all_to_all(self, source: Any, target: Any) -> Call:
        """Check ``all_to_all``."""
        call = "all_to_all"
        given, taken, _ = self.pair(call, source, target)
        count = self.rows(call, "in_array", given)
        self.rows(call, "out_array", taken)
        self.sizes(call, "out_array", taken.size, given.size, "which in_array has", exact=True)
        return self._call(Operation.ALL_TO_ALL, given, taken, count, source, target)

    def _call(
        self,
        operation: Operation,
        given: ArrayInfo | None,
        taken: ArrayInfo | None,
        count: int,
        source: Any,
        target: Any,
        *,
        reduction: int = 0,
        root: int = 0,
        fortran: int = 0,
    ) -> Call:
        info = given or taken
        assert info is not None  # every rank has one of the two
        in_place, clash = False, ""
        if given is not None and taken is not None:
            row = count * info.dtype.itemsize
            shift = {
                Operation.REDUCE_SCATTER: self.rank * row,
                Operation.SCATTER: root * row,
                Operation.ALL_GATHER: -self.rank * row,
                Operation.GATHER: -root * row,
            }.get(operation, 0)
            in_place = count > 0 and taken.ptr == given.ptr + shift
            if not in_place and overlap(given, taken):
                clash = "in_array overlaps out_array other than in place, so it was copied"
        code = code_of(info.dtype)
        assert code is not None  # checked with the array
        return Call(
            operation, info.dtype, code, reduction, root, count, fortran,
            None if given is None else source, None if taken is None else target, in_place, clash,
        )  # fmt: skip


def _both(array: cupy.ndarray) -> bool:
    """Whether an array is in C order and in Fortran order, as those of one dimension are."""
    return bool(array.flags.c_contiguous and array.flags.f_contiguous)
