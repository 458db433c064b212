"""Ranks that call collectives: buffers of every kind, cases, and what NumPy says of them."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cupy
import group_workers as workers
import ml_dtypes
import numpy as np
from collective_memory import got, put

import cupy_zc
from cupy_zc import Communicator, MemoryPool, PeerTimeoutError
from cupy_zc.collectives.call import BARRIER
from cupy_zc.collectives.device_plan import plan_of
from cupy_zc.collectives.plan import ROLES, Operation
from cupy_zc.driver.host import HostDriver

DTYPES = [
    np.dtype(name)
    for name in (
        "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2",
        ml_dtypes.bfloat16, "f4", "f8", "c8", "c16",
    )
]  # fmt: skip
REDUCTIONS = ("sum", "prod", "min", "max", "avg")
COLLECTIVES = tuple(each for each in Operation if each is not Operation.BARRIER)
PLACEMENTS = ("symmetric", "unregistered", "mixed", "offsets")
#: Bytes of each buffer of a rank.
ROOM = 1 << 16
#: What is in an output before, and around it.
FILL = 0xA5


#: Where threads meet that share a GPU: a copy of one may have to wait for kernels of the others.
_meetings: weakref.WeakKeyDictionary[Communicator, threading.Barrier] = weakref.WeakKeyDictionary()


def meet(comm: Communicator) -> None:
    """On a GPU: wait for the work of this rank, and then for the other ranks of the process."""
    meeting = _meetings.get(comm)
    if meeting is not None:
        comm.synchronize()
        meeting.wait()


def on_stream(comm: Communicator, body: Callable[[Communicator], Any]) -> Any:
    """``body(communicator)``; on the rank's GPU and a stream of its own: ranks may share one."""
    if comm._driver.name == "host":
        return body(comm)
    with comm._driver.use_device(comm._device), cupy_zc.Stream(non_blocking=True, driver="cuda"):
        return body(comm)


def run(comms: Sequence[Communicator], body: Callable[[Communicator], Any]) -> list[Any]:
    """``body(communicator)`` on all ranks; what each returned."""

    def guarded(rank: int) -> Any:
        try:
            return on_stream(comms[rank], body)
        except BaseException:
            if comms[rank] in _meetings:
                _meetings[comms[rank]].abort()
            comms[rank].close(force=True)  # so that the others do not wait for this one
            raise

    outcomes = workers.in_threads(len(comms), guarded)
    outcomes.sort(key=lambda outcome: isinstance(outcome, PeerTimeoutError))
    return list(workers.all_fine(outcomes))


def attempt(comms: Sequence[Communicator], body: Callable[[Communicator], Any]) -> list[Any]:
    """As :func:`run`, with what was raised in place of what was returned."""
    return workers.in_threads(len(comms), lambda rank: on_stream(comms[rank], body))


def collected(condition: Callable[[], Any]) -> None:
    """Collect garbage until a condition holds; beside another thread that does, once is nothing."""
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        gc.collect()


@contextlib.contextmanager
def communicators(n: int, **options: Any) -> Iterator[list[Communicator]]:
    """``n`` ranks in threads; on a host driver with small granules where none is given."""
    driver = options.pop("driver", None) or HostDriver(granularity=1 << 12, memory=1 << 34)
    options.setdefault("timeout", 20)
    comms = Communicator.in_process(n, driver=driver, **options)
    if driver.name == "cuda":
        meeting = threading.Barrier(n, timeout=60)
        _meetings.update((comm, meeting) for comm in comms)
    try:
        yield comms
    finally:
        for each in comms:
            each.close(force=True)


class Buffers(NamedTuple):
    """Bytes of one rank, two of each kind: for inputs and for outputs."""

    symmetric: tuple[cupy.ndarray, cupy.ndarray]
    unregistered: tuple[cupy.ndarray, cupy.ndarray]
    offsets: tuple[cupy.ndarray, cupy.ndarray]
    #: Kept, because one that is dropped waits for the device, which the ranks share.
    pools: tuple[MemoryPool, ...]

    @classmethod
    def of(cls, comm: Communicator) -> Buffers:
        """Collective. The registered ones are at another offset on each rank."""
        driver = comm._options.driver
        apart = MemoryPool(driver=driver, segment_size=1)
        pool = MemoryPool(driver=driver, segment_size=1 << 20)

        def of_pool(pool: MemoryPool, size: int) -> cupy.ndarray:
            return cupy.ndarray(size, "u1", pool.malloc(size))

        held = [of_pool(pool, 512 * (1 + comm.rank))]
        offsets = (of_pool(pool, ROOM), of_pool(pool, ROOM))
        comm.register(offsets[0])
        del held
        return cls(
            (comm.empty(ROOM, "u1"), comm.empty(ROOM, "u1")),
            (of_pool(apart, ROOM), of_pool(apart, ROOM)),
            offsets,
            (apart, pool),
        )

    def pick(self, placement: str, rank: int) -> tuple[cupy.ndarray, cupy.ndarray]:
        if placement == "mixed":
            placement = ("symmetric", "unregistered", "offsets")[rank % 3]
        return getattr(self, placement)


def is_staged(placement: str, rank: int) -> bool:
    return placement == "unregistered" or (placement == "mixed" and rank % 3 == 1)


class Case(NamedTuple):
    """One collective, the same on all ranks."""

    operation: Operation
    dtype: np.dtype[Any]
    op: str
    root: int
    count: int
    placement: str
    in_place: bool
    #: Elements before the array in its buffer.
    lead: int = 0

    def rows(self, n: int) -> tuple[int, int]:
        role = ROLES[self.operation]
        return (n if role.input_rows else 1), (n if role.output_rows else 1)

    def has(self, rank: int) -> tuple[bool, bool]:
        """Whether a rank has an input, and an output."""
        only_root_gives = self.operation in (Operation.BROADCAST, Operation.SCATTER)
        only_root_gets = self.operation in (Operation.REDUCE, Operation.GATHER)
        source = not only_root_gives or rank == self.root
        target = not only_root_gets or rank == self.root
        if self.operation is Operation.BROADCAST:
            target = rank != self.root
        return source, target


def allowed(dtype: np.dtype[Any], op: str) -> bool:
    return not (dtype.kind == "c" and op in ("min", "max")) and not (
        dtype.kind == "b" and op == "avg"
    )


@functools.lru_cache(256)  # every rank asks what every rank gives
def values(case: Case, n: int, rank: int) -> np.ndarray[Any, Any]:
    """What a rank gives: numbers of both signs, zeros, and enough of them to overflow 8 bits."""
    length = case.rows(n)[0] * case.count
    chance = np.random.default_rng((case.operation, case.count, rank))
    numbers = chance.integers(-90, 90, length)
    if case.dtype.kind == "b":
        return numbers > 0
    if case.dtype.kind == "u":
        return (numbers % 120).astype(case.dtype)
    if case.dtype.kind == "c":
        return (numbers / 8 + 1j * chance.integers(-9, 9, length) / 4).astype(case.dtype)
    return (
        numbers.astype(case.dtype) if case.dtype.kind == "i" else (numbers / 8).astype(case.dtype)
    )


def _product(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A complex product by the schoolbook; NumPy's own one rounds otherwise in its vector loop."""
    if one.dtype.kind != "c":
        return one * other
    result = np.empty_like(one)
    result.real = one.real * other.real - one.imag * other.imag
    result.imag = one.real * other.imag + one.imag * other.real
    return result


_UFUNCS = {"sum": np.add, "prod": _product, "min": np.minimum, "max": np.maximum}


def reduced(op: str, given: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The reduction in the order of ranks, by whole arrays."""
    dtype = given[0].dtype
    if len(given) == 1:
        return given[0]
    half = dtype.itemsize == 2 and dtype.kind not in "iu"
    wide = half and op not in ("min", "max")
    with np.errstate(all="ignore"):
        parts = [each.astype("f4") for each in given] if wide else given
        total = functools.reduce(_UFUNCS["sum" if op == "avg" else op], parts)
        if op == "avg" and dtype.kind in "iu":
            exact = [int(value) for value in total]
            total = np.array([abs(v) // len(given) * (1 if v >= 0 else -1) for v in exact])
        elif op == "avg":
            parts = total.view(total.real.dtype)
            total = (parts / parts.dtype.type(len(given))).view(total.dtype)
        return total.astype(dtype)


def expected(case: Case, n: int) -> list[np.ndarray[Any, Any] | None]:
    """What is in the output of each rank afterwards; None where it has none."""
    given = [values(case, n, rank) for rank in range(n)]
    kind, root = case.operation, case.root
    rows = [each.reshape(case.rows(n)[0], case.count) for each in given]
    match kind:
        case Operation.ALL_REDUCE | Operation.REDUCE:
            total = reduced(case.op, given)
            results = [total] * n
        case Operation.REDUCE_SCATTER:
            results = [reduced(case.op, [each[rank] for each in rows]) for rank in range(n)]
        case Operation.BROADCAST:
            results = [given[root]] * n
        case Operation.ALL_GATHER | Operation.GATHER:
            results = [np.concatenate(given)] * n
        case Operation.SCATTER:
            results = [rows[root][rank] for rank in range(n)]
        case Operation.ALL_TO_ALL:
            results = [np.concatenate([each[rank] for each in rows]) for rank in range(n)]
    return [result if case.has(rank)[1] else None for rank, result in enumerate(results)]


def invoke(comm: Communicator, case: Case, source: Any, target: Any, **more: Any) -> None:
    """Call it as a user does."""
    method = getattr(comm, case.operation.call)
    match case.operation:
        case Operation.ALL_REDUCE:
            method(source, target, case.op, **more)
        case Operation.REDUCE:
            method(source, target, case.root, case.op, **more)
        case Operation.BROADCAST:
            method(target if source is None else source, case.root, **more)
        case Operation.REDUCE_SCATTER:
            method(source, target, case.count, case.op, **more)
        case Operation.ALL_GATHER:
            method(source, target, case.count, **more)
        case Operation.ALL_TO_ALL:
            method(source, target, **more)
        case _:
            method(source, target, case.root, **more)


def array_in(buffer: cupy.ndarray, lead: int, length: int, dtype: np.dtype[Any]) -> cupy.ndarray:
    """An array inside a buffer of bytes."""
    return cupy.ndarray(length, dtype, buffer.data + lead * dtype.itemsize)


def arrays(
    case: Case, n: int, rank: int, buffers: Buffers
) -> tuple[cupy.ndarray | None, cupy.ndarray | None]:
    """Input and output of a rank, filled."""
    into, out_of = buffers.pick(case.placement, rank)
    (source_rows, target_rows), (source_there, target_there) = case.rows(n), case.has(rank)
    own = case.root if case.operation in (Operation.SCATTER, Operation.GATHER) else rank
    for buffer in (into, out_of):
        put(buffer, np.full(buffer.size, FILL, "u1"))
    source = target = None
    if source_there:
        source = array_in(into, case.lead, source_rows * case.count, case.dtype)
    if target_there:
        place, lead = out_of, case.lead
        if source_there and case.in_place:
            place = into
            if source_rows > target_rows:
                lead += own * case.count
        target = array_in(place, lead, target_rows * case.count, case.dtype)
        if source_there and case.in_place and target_rows > source_rows:
            source = array_in(into, case.lead + own * case.count, case.count, case.dtype)
    if source is not None:
        put(source, values(case, n, rank))
    return source, target


def check(comm: Communicator, case: Case, buffers: Buffers, *, manual: bool = True) -> bytes:
    """Run a case on one rank and compare; the bytes of its output.

    ``manual``: whether what is not registered stays so, and the transfer must say it was staged.
    """
    n, rank = comm.size, comm.rank
    source, target = arrays(case, n, rank, buffers)
    before = None if source is None else got(source)
    meet(comm)
    invoke(comm, case, source, target)
    meet(comm)
    wanted = expected(case, n)[rank]
    told = f"{case}, rank {rank} of {n}"
    several = comm.backend in ("hierarchical", "nccl")
    if target is not None and wanted is not None:
        compare = _assert_near if several else np.testing.assert_array_equal
        compare(got(target), wanted, err_msg=told)
    if source is not None and not (case.in_place and target is not None):
        np.testing.assert_array_equal(got(source), before, err_msg=told)
    for buffer in buffers.pick(case.placement, rank):
        _check_surroundings(buffer, [each for each in (source, target) if each is not None], told)
    transfer = comm.last_transfer
    assert transfer is not None
    assert transfer.operation == case.operation.call
    if several:
        return b"" if target is None else got(target).tobytes()
    staging = stagers(case, n, touched_by_peers(comm, case))
    if manual or not staging:
        assert transfer.zero_copy == (not staging), (told, transfer)
    assert bool(transfer.reason) == (not transfer.zero_copy), (told, transfer)
    return b"" if target is None else got(target).tobytes()


def _assert_near(found: Any, wanted: Any, err_msg: str) -> None:
    """Equal but for rounding, where the order of a reduction is not that of the ranks."""
    if wanted.dtype.kind in "biu":
        np.testing.assert_array_equal(found, wanted, err_msg=err_msg)
        return
    wide = "c16" if wanted.dtype.kind == "c" else "f8"
    part = wanted.real.dtype if wanted.dtype.kind == "c" else wanted.dtype
    near = 8 * float(ml_dtypes.finfo(part).eps)
    found, wanted = found.astype(wide), wanted.astype(wide)
    most = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0))
    np.testing.assert_allclose(found, wanted, near, near * min(most, 100.0), err_msg=err_msg)


def touched_by_peers(comm: Communicator, case: Case) -> tuple[bool, bool]:
    """Whether other ranks touch input and output, as the engine does it."""
    if comm.backend == "host":
        role = ROLES[case.operation]
        return role.input_remote, role.output_remote
    code, reduction = DTYPES.index(case.dtype), REDUCTIONS.index(case.op)
    call = BARRIER._replace(
        operation=case.operation, dtype=case.dtype, code=code, reduction=reduction,
        columns=case.count,
    )  # fmt: skip
    plan = plan_of(call, comm._engine._machine)
    return plan.input_remote, plan.output_remote


def stagers(case: Case, n: int, touched: tuple[bool, bool]) -> list[int]:
    """The ranks that have to stage, where peers touch inputs and outputs."""
    if n == 1 or not case.count or not any(touched):
        return []
    swaps = case.operation is Operation.ALL_TO_ALL and case.in_place
    found = []
    for rank in range(n):
        source, target = case.has(rank)
        if case.operation is Operation.BROADCAST:
            target = target or touched[1]  # the root's array is an output like the others
        reached = (source and touched[0]) or (target and touched[1])
        if swaps or (reached and is_staged(case.placement, rank)):
            found.append(rank)
    return found


def _check_surroundings(buffer: cupy.ndarray, inside: Sequence[cupy.ndarray], told: str) -> None:
    """Whether nothing but the arrays was written."""
    untouched = np.ones(buffer.size, bool)
    for array in inside:
        start = array.data.ptr - buffer.data.ptr
        if 0 <= start < buffer.size:
            untouched[start : start + array.nbytes] = False
    assert (got(buffer)[untouched] == FILL).all(), told


def cases(n: int) -> list[Case]:
    """Every collective with every dtype and every op it knows, and with every value of the rest."""
    chosen: list[Case] = []
    ways = itertools.cycle(itertools.product(PLACEMENTS, (False, True)))
    counts = itertools.cycle((1, 5, 37, 3 * n + 1, 2 * n))
    for operation, dtype in itertools.product(COLLECTIVES, DTYPES):
        for op in REDUCTIONS if ROLES[operation].reduces else ("sum",):
            if allowed(dtype, op):
                placement, in_place = next(ways)
                root = len(chosen) % n
                chosen.append(
                    Case(operation, dtype, op, root, next(counts), placement, in_place, 3)
                )
    f4, i2 = np.dtype("f4"), np.dtype("i2")
    for operation, placement, in_place, root in itertools.product(
        COLLECTIVES, PLACEMENTS, (False, True), range(n)
    ):
        if ROLES[operation].rooted or root == 0:
            chosen.append(Case(operation, f4, "avg", root, next(counts), placement, in_place, 1))
    chosen += [
        Case(operation, i2, "sum", n - 1, 0, placement, False)
        for operation in COLLECTIVES
        for placement in PLACEMENTS
    ]
    return chosen
