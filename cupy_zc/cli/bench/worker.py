"""One process of a run: it makes the engines, and measures the cases with them by turns."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from . import data
from .api import Case, Context, Engine, Job, Unavailable
from .engines import load
from .group import Group
from .platforms import Platform, open_platform, repeat
from .report import Row, figure, show_bytes, skipped

__all__ = ["ROUNDS", "Plan", "WrongResult", "calls_of", "run", "smallest"]

_Result = TypeVar("_Result")

#: Figures are medians of so many replays.
ROUNDS = 7
#: Calls in a graph, up to a size in bytes, and above it.
_CALLS, _LARGE_CALLS, _LARGE = 20, 4, 16 << 20
#: Host cost: bytes of the call, and calls that are timed together. They fit the launch queue.
_HOST_BYTES, _HOST_CALLS = 1 << 10, 100
#: Seconds after the deadline when a process ends itself, should its parent not have done so.
_GRACE = 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; the same on all ranks."""

    ranks: int
    platform: str
    engines: tuple[str, ...]
    collectives: tuple[str, ...]
    #: Bytes of the larger buffer.
    sizes: tuple[int, ...]
    #: Calls that are timed together; None for 20, and 4 above 16 MiB.
    iterations: int | None
    #: Calls before anything is timed; one is made in any case.
    warm_up: int
    check: bool
    dtype: str
    op: str
    root: int
    #: Whether the calls are replayed in a graph.
    graph: bool
    #: Which to measure: False for out of place, True for in place.
    placements: tuple[bool, ...]
    #: Whether to measure as well what a call costs the Python thread that makes it.
    host_cost: bool
    #: On the clock of ``time.monotonic``, which all processes of a machine share.
    deadline: float

    @property
    def metric(self) -> str:
        """What the figures are of."""
        return "device_us" if self.graph else "eager_us"

    def case(self, collective: str, size: int, *, in_place: bool = False) -> Case:
        """A case of this plan."""
        return Case(collective, size, self.dtype, self.op, self.ranks, self.root, in_place)


class WrongResult(Exception):  # noqa: N818  it is what happened
    """An engine gave something else than the reference.

    Args:
        message: What, on which rank.
        wrong: Elements that are wrong, of all ranks.
    """

    def __init__(self, message: str, wrong: int) -> None:
        super().__init__(message)
        self.wrong = wrong


@dataclass(frozen=True, slots=True)
class _Lane:
    """An engine ready to be timed on a case."""

    engine: str
    job: Job
    replay: Callable[[], object]


def calls_of(plan: Plan, nbytes: int) -> int:
    """How many calls are timed together at a size."""
    return plan.iterations or (_LARGE_CALLS if nbytes > _LARGE else _CALLS)


def run(plan: Plan, rank: int, connection: Connection) -> None:
    """The whole life of a rank."""
    left = plan.deadline - time.monotonic()
    # A thread of C: it ends the process even where a call never returns and the parent is dead.
    faulthandler.dump_traceback_later(max(left, 0) + _GRACE, exit=True)
    group = Group(connection, rank, plan.ranks, plan.deadline)
    platform = open_platform(plan.platform, rank)
    _tell_first(group, "about", {"processes": plan.ranks} | platform.describe())
    if plan.ranks > 1:
        _ceilings(group, platform)
    context = Context(group, platform, _capacity(plan))
    engines = _open(plan, context)
    for collective in plan.collectives:
        for size in plan.sizes:
            for in_place in plan.placements:
                case = plan.case(collective, size, in_place=in_place)
                _measure(plan, context, engines, case)
            _tell_first(group, "step", f"{collective} of {show_bytes(size)}")
        if plan.host_cost:
            size = max(_HOST_BYTES, smallest(plan.ranks, plan.dtype))
            _host_cost(plan, context, engines, plan.case(collective, size))
    group.tell("done")
    for engine in engines.values():
        engine.close()


def smallest(ranks: int, dtype: str) -> int:
    """The fewest bytes of a buffer that hold an element for each rank."""
    return ranks * Case("all_reduce", 0, dtype, "sum", ranks).type.itemsize


def _capacity(plan: Plan) -> int:
    return max(*plan.sizes, _HOST_BYTES, smallest(plan.ranks, plan.dtype))


def _tell_first(group: Group, kind: str, value: object) -> None:
    if group.rank == 0:
        group.tell(kind, value)


def _ceilings(group: Group, platform: Platform) -> None:
    """On GPUs rank 0 measures; the others keep their devices quiet meanwhile."""
    from .ceilings import measure, measure_host

    group.tell("begin", "the ceilings")
    if platform.name == "host":
        for row in measure_host(group):
            group.tell("row", row)
    elif group.rank == 0:
        try:
            for row in measure(platform.xp):
                group.tell("row", row)
        except (RuntimeError, MemoryError) as error:
            group.tell("unavailable", ("ceilings", _words(error)))
    group.barrier()


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, Unavailable) else f"{type(error).__name__}: {text}"


def _together(
    group: Group, errors: tuple[type[Exception], ...], step: Callable[[], _Result]
) -> list[_Result]:
    """Take a step on all ranks. It must not talk to the group, or the ranks could part ways.

    Args:
        group: The ranks.
        errors: What the step may raise, besides :class:`Unavailable`.
        step: What to do.

    Returns:
        The result of this rank, alone in a list.

    Raises:
        Unavailable: the step failed on some rank; raised on all.
    """
    expected: tuple[type[Exception], ...] = (Unavailable, *errors)
    results, reason = [], ""
    try:
        results.append(step())
    except expected as error:
        reason = _words(error)
    reason = group.objection(reason)
    if reason:
        raise Unavailable(reason)
    return results


def _open(plan: Plan, context: Context) -> dict[str, Engine]:
    """The engines that all ranks could make; the report says why the others are missing."""
    engines: dict[str, Engine] = {}
    for name in plan.engines:
        context.group.tell("begin", f"opening {name}")
        engine, reason = _make(name, context)
        if engine is None:
            _tell_first(context.group, "unavailable", (name, reason))
        else:
            engines[name] = engine
            _tell_first(context.group, "about", engine.versions())
    return engines


def _make(name: str, context: Context) -> tuple[Engine | None, str]:
    """An engine, or why there is none; alike on all ranks."""
    group, made = context.group, []

    def probe() -> tuple[type[Engine], Any]:
        kind = load(name)
        return kind, kind.probe(context)

    try:
        ((kind, offer),) = _together(group, Engine.errors, probe)
        shared = group.all_gather(offer)[0]

        def make() -> Engine:
            made.append(kind(context, shared))
            context.platform.synchronize()
            return made[0]

        (engine,) = _together(group, kind.errors, make)
    except Unavailable as error:
        for half in made:  # here, but not on some other rank
            half.close()
        return None, str(error)
    return engine, ""


def _give(context: Context, case: Case, job: Job) -> None:
    """Write the input, where this rank has one."""
    if case.gives(context.rank):
        data.fill(context.platform.xp, case, context.rank, job.send)


def _rest(context: Context, case: Case, job: Job) -> None:
    """Write an input that many calls leave as it is: see :mod:`.data`."""
    if case.in_place and case.reduces:
        data.clear(job.send)
    else:
        _give(context, case, job)


def _check(context: Context, engine: Engine, case: Case, job: Job, call: Callable[[], Any]) -> None:
    """Compare what a call leaves in the output with the reference.

    Raises:
        WrongResult: it differs on some rank; raised on all. Unavailable: a step failed on some.
    """
    platform, group, rank = context.platform, context.group, context.rank

    def before() -> None:
        # The output first: where a collective works in place, the root's input is the output.
        data.poison(platform.xp, job.recv)
        _give(context, case, job)
        platform.synchronize()

    def after() -> tuple[int, str]:
        call()
        platform.synchronize()
        return data.mistake(platform.xp, case, rank, job.recv)

    _together(group, engine.errors, before)
    # It ends in a vote, so no rank fills its buffers again while a peer may still read them.
    ((count, mistake),) = _together(group, engine.errors, after)
    mistakes = group.objection(mistake)
    if mistakes:
        raise WrongResult(mistakes, sum(group.all_gather(count)))


def _ready(plan: Plan, context: Context, engine: Engine, name: str, case: Case) -> _Lane:
    """Prepare, call, capture and check an engine.

    Raises:
        WrongResult, Unavailable: on all ranks.
    """
    platform, group = context.platform, context.group

    def prepare() -> Job:
        job = engine.prepare(case)
        _rest(context, case, job)
        for _ in range(max(plan.warm_up, 1)):  # what is made at the first call is not captured
            job.call()
        platform.synchronize()
        return job

    (job,) = _together(group, engine.errors, prepare)
    calls = calls_of(plan, case.nbytes)
    checked, replay = [job.call], repeat(job.call, calls)
    if plan.graph:
        (replay,) = _together(group, engine.errors, lambda: platform.capture(job.call, calls))
        repeatable = replay
        if case.in_place or not engine.keeps_input:
            (repeatable,) = _together(group, engine.errors, lambda: platform.capture(job.call, 1))
        checked.append(repeatable)
    if plan.check:
        for call in checked:
            _check(context, engine, case, job, call)
        _together(group, engine.errors, lambda: _rest(context, case, job))
    return _Lane(name, job, replay)


def _lanes(
    plan: Plan, context: Context, engines: dict[str, Engine], case: Case, metric: str
) -> list[_Lane]:
    """The engines that run a case on all ranks; the report says why the others do not."""
    lanes = []
    for name, engine in engines.items():
        context.group.tell("begin", f"{name}, {case}")
        refusal = engine.refuses(case)
        if refusal:
            where = f"{case.collective}{' in place' if case.in_place else ''}"
            _tell_first(context.group, "refused", (name, where, refusal))
            continue
        lane, reason, wrong = _try(plan, context, engine, name, case)
        if lane is None:
            row = skipped(case, name, metric, reason, wrong=wrong)
            _tell_first(context.group, "row", row)
        else:
            lanes.append(lane)
    return lanes


def _try(
    plan: Plan, context: Context, engine: Engine, name: str, case: Case
) -> tuple[_Lane | None, str, int]:
    """A lane, or why there is none, and how many elements were wrong if that is why."""
    try:
        return _ready(plan, context, engine, name, case), "", 0
    except WrongResult as error:
        return None, str(error), error.wrong
    except Unavailable as error:
        return None, str(error), 0


def _measure(plan: Plan, context: Context, engines: dict[str, Engine], case: Case) -> None:
    """Device time: the engines take turns, so that a slow moment of the machine hits all alike."""
    lanes = _lanes(plan, context, engines, case, plan.metric)
    platform = context.platform
    clock = platform.microseconds if plan.graph else platform.eager_microseconds
    calls = calls_of(plan, case.nbytes)
    times: dict[str, list[float]] = {lane.engine: [] for lane in lanes}
    for _ in range(ROUNDS):
        for lane in lanes:
            context.group.tell("begin", f"timing {lane.engine}, {case}")
            context.group.barrier()
            times[lane.engine].append(clock(lane.replay) / calls)
    _figures(plan, context, case, plan.metric, times, calls)


def _host_cost(plan: Plan, context: Context, engines: dict[str, Engine], case: Case) -> None:
    """What an eager call costs the Python thread that makes it; nothing is waited for."""
    lanes = _lanes(plan, context, engines, case, "host_us")
    times: dict[str, list[float]] = {lane.engine: [] for lane in lanes}
    for _ in range(ROUNDS):
        for lane in lanes:
            context.group.tell("begin", f"host cost of {lane.engine}, {case}")
            context.group.barrier()
            call = lane.job.call
            start = time.thread_time_ns()
            for _ in range(_HOST_CALLS):
                call()
            spent = time.thread_time_ns() - start
            context.platform.synchronize()
            times[lane.engine].append(spent / _HOST_CALLS / 1e3)
    _figures(plan, context, case, "host_us", times, _HOST_CALLS)


def _figures(
    plan: Plan,
    context: Context,
    case: Case,
    metric: str,
    times: dict[str, list[float]],
    calls: int,
) -> None:
    everyone = context.group.all_gather(times)
    for engine in times:
        of_all = [of_rank[engine] for of_rank in everyone]
        row: Row = figure(case, engine, metric, of_all, calls) | {"checked": plan.check}
        _tell_first(context.group, "row", row)
