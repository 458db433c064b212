"""The hierarchical engine: ranks of several nodes, with the engine of a node and one of the rails.

What a collective is made of is the matter of :mod:`.schedule`. Here it is enqueued: steps of the
node on the user's stream, those of the rail beside them. What has no schedule is done by all ranks
as if there were no nodes. Between nodes nothing is compared in an eager call: ranks of a node that
call different things get a MismatchError, and so do the other nodes where their rails can tell;
NCCL cannot, and then the deadline ends what was called.

A captured call is compared between nodes, too, by whoever records it (:mod:`.captured`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cupy

from ..config import settings
from ..driver.api import Driver
from ..group import Across, vote
from ..group.naming import numbered
from ..memory.blocks import Segment
from ..registration import Probe, Registration, Rule
from .acts import Copy, Divide, Follow, Order, Schedule, Shape, Sizes, World
from .call import BARRIER, Call, Transfer, transfer_of
from .device_copies import Extra
from .engine import Agreed, Engine, Place
from .gate import Gate
from .level import Level
from .local import LocalWork, Rows
from .parents import Parents
from .parts import steps_of, view_of
from .point_to_point import Letter
from .schedule import Schedules
from .tiers import Tier

__all__ = ["HierarchicalEngine"]

_ORDERS: tuple[Order, ...] = ("to_rails", "to_nodes", "from_rails", "from_nodes")


@dataclass(slots=True)
class _Lane:
    """What calls of one lane need."""

    rail: int
    whole: int
    side: Any
    #: Two arrays of bytes, once a call needs them.
    scratch: dict[str, Any] = field(default_factory=dict)
    #: Whether a graph on this rank has it.
    held: bool = True


class HierarchicalEngine:
    """Carries out checked calls of ranks on several nodes. Collective to make.

    Args:
        node: The ranks of this rank's node.
        engine: Of those.
        rail: The ranks with this place in their nodes, in the order of nodes.
        whole: All ranks.
        across: Tells other nodes how a step went.
        world: Where they are.
        local: Work on own memory.
        parents: Told of eager calls.
        gate: Keeps data of failed steps on the node; None where those raise at once.
        sizes: Thresholds.
    """

    name = "hierarchical"

    def __init__(
        self,
        node: Level,
        engine: Engine,
        rail: Tier,
        whole: Tier,
        across: Across,
        world: World,
        local: LocalWork,
        parents: Parents,
        gate: Gate | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self.multicast_probe: Probe | None = engine.multicast_probe
        self.prove_multicast = engine.prove_multicast
        self._node, self._engine = node, engine
        self._rail, self._whole, self._across = rail, whole, across
        self._world, self._sizes = world, sizes or Sizes()
        self._schedules = Schedules(world, self._sizes)
        self._local = local
        rail_ranks = world.rail
        #: Blocks whose errors have the numbers of these ranks.
        self._named: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "node": across.named,
            "rail": lambda: numbered(f"rail {world.local}", rail_ranks),
        }
        self._driver: Driver = node.registry.driver
        self._parents = parents
        self._gate = gate
        self._extra = Extra(self._driver)
        self._one_row = local.prepare(Rows(((0, 0),)))
        self._last: Transfer | None = None
        self._flat = False
        self._tables = {name: local.prepare(Rows(world.order(name))) for name in _ORDERS}
        self._lanes = {0: _Lane(0, 0, self._driver.make_stream(non_blocking=True))}
        self._make_scratch(0)

    # Set-up

    def connect(self) -> None:
        """Connect the rails and all ranks. Collective."""
        for what, engine in zip(("nodes", "rails", "ranks"), self._engines, strict=True):
            self._on_all(f"connect the {what}", engine.connect, 5 * settings().setup_timeout)

    def _on_all(self, step: str, do: Callable[[], None], timeout: float = 0.0) -> None:
        """What one tier does; the node learns how it went, as rails do not know of each other."""
        failure: Exception | None = None
        try:
            do()
        except Exception as error:  # noqa: BLE001 - the vote raises it on every rank
            failure = error
        with self._named["node"]():
            vote(self._node.talk, step, failure, timeout=timeout or 3 * self._node.registry.timeout)

    def _on_rails(self, step: str, do: Callable[[], None]) -> None:
        def named() -> None:
            with self._named["rail"]():
                do()

        self._on_all(step, named)

    def register(self, registration: Registration) -> None:
        """Let the rails, and all ranks, know the segments, too. Collective."""
        self._on_rails("register on the rails", partial(self._rail.register, registration))
        self._on_all("register between nodes", partial(self._whole.register, registration))

    def adopt(self, segment: Segment) -> None:
        """Let the tiers use a segment that all ranks have. Collective."""
        self._rail.adopt(segment)
        self._whole.adopt(segment)

    def collect(self) -> None:
        """Carry out what was let go of, on the tiers. Collective."""
        self._on_rails("collect on the rails", self._rail.collect)
        self._on_all("collect between nodes", self._whole.collect)

    def rules(self, array: Any) -> tuple[Rule, ...]:
        """What the rails need."""
        return self._rail.engine.rules(array)

    def preload(self, code: int, reduction: int) -> None:
        """Load what calls of an element type and a reduction may need. Local."""
        for engine in self._engines:
            engine.preload(code, reduction)
        self._local.preload([code])

    @property
    def _engines(self) -> tuple[Engine, Engine, Engine]:
        return self._engine, self._rail.engine, self._whole.engine

    # What it did, and what went wrong

    def last(self, *, ended: bool) -> Transfer | None:
        """What the last call did; of a point-to-point call, what the ranks did at once."""
        return self._whole.engine.last(ended=ended) if self._flat else self._last

    def check(self, call: object) -> None:
        """Raise what went wrong in a call that ran, of the node or between nodes."""
        with self._named["node"]():
            self._engine.check(call)
        with self._named["rail"]():
            self._rail.engine.check(call)
        self._whole.engine.check(call)

    def fail(self, error: BaseException) -> BaseException:
        """Make no further calls, on any tier."""
        first = self._engine.fail(error)
        for engine in self._engines[1:]:
            engine.fail(first)
        return first

    def wait(self, point: Any) -> None:
        """Wait behind calls of this engine. What is between nodes ends by itself in time."""
        with self._named["node"](), self._rail.waiting(), self._whole.waiting():
            self._engine.wait(point)

    def decline(self) -> None:
        """Tell peers of the node that this rank captures."""
        self._engine.decline()

    def invalidate(self) -> None:
        """Make every replay of a graph do nothing from now on."""
        with ExitStack() as stack:
            stack.callback(self._local.shut)  # when none is under way any more
            for engine in self._engines:
                stack.callback(engine.invalidate)

    def part(self) -> None:
        """Let the ranks of other nodes know that this one makes no further calls."""
        self._rail.part()
        self._whole.part()

    def leave(self) -> None:
        """Wait for sends, and a moment for the others."""
        self._whole.engine.leave()

    def close(self) -> None:
        """Give back what there is. Local."""
        with ExitStack() as stack:
            stack.callback(self._engine.close)
            stack.callback(self._extra.close)
            stack.callback(self._rail.close)
            stack.callback(self._whole.close)
            # Graphs that live keep what their copies read and write.
            self._lanes = {n: lane for n, lane in self._lanes.items() if n and lane.held}
            if not self._lanes:
                stack.callback(self._local.close)

    # Lanes

    def open_lane(self) -> int:
        """A lane for a graph. Collective."""
        lanes: list[int] = []
        tiers: list[_Lane] = []
        try:
            with self._across.step("open a lane"):
                lanes.append(self._engine.open_lane())
                self._on_all("open lanes", partial(self._open_tiers, lanes[0], tiers))
        except BaseException:
            for each in tiers:
                self._rail.close_lane(each.rail)
                self._whole.close_lane(each.whole)
            for lane in lanes:
                self._node.registry.lanes.give_up(lane)
            raise
        self._lanes[lanes[0]] = tiers[0]
        return lanes[0]

    def _open_tiers(self, lane: int, opened: list[_Lane]) -> None:
        side = self._driver.make_stream(non_blocking=True)
        before = self._lanes.get(lane)
        rail = self._rail.open_lane()
        try:
            whole = self._whole.open_lane()
        except BaseException:  # on all ranks
            self._rail.close_lane(rail)
            raise
        opened.append(_Lane(rail, whole, side, {} if before is None else before.scratch))

    def fit_lane(self, lane: int, call: Call, agreed: Agreed | None) -> None:
        """Give each tier, and the node, what steps of a call need. Collective."""
        mine, plan = self._lanes[lane], self._schedule(call)
        if plan is None:
            self._on_all("fit a lane", lambda: self._whole.fit_lane(mine.whole, call))
            return
        if agreed is not None:  # of other arrays than those of the steps
            agreed = agreed._replace(inputs={})
        with self._across.step("fit a lane"):
            if plan.scratch and not mine.scratch:
                self._make_scratch(lane)
            steps = list(steps_of(plan, call, self._arrays(plan, call, mine, None)))
            for step, part in steps:
                if step.who == "node":
                    self._engine.fit_lane(lane, part, agreed)
        rails = [part for step, part in steps if step.who == "rail"]
        self._on_all("fit a lane of the rail", lambda: self._fit_rail(mine.rail, rails))

    def _fit_rail(self, lane: int, calls: Sequence[Call]) -> None:
        for call in calls:
            self._rail.fit_lane(lane, call)

    def _make_scratch(self, lane: int) -> None:
        arrays = {}
        for name in ("first", "second"):
            memory = self._node.heap.reserve(self._sizes.scratch)
            pointer = cupy.cuda.MemoryPointer(memory, 0)
            arrays[name] = cupy.ndarray(self._sizes.scratch, "u1", pointer)
        self._lanes[lane].scratch.update(arrays)

    def lane_bytes(self, lane: int) -> int:
        """Bytes of a lane on this rank, those of the tiers included."""
        mine = self._lanes[lane]
        own: int = sum(array.nbytes for array in mine.scratch.values())
        rails = self._rail.lane_bytes(mine.rail) + self._whole.lane_bytes(mine.whole)
        return self._engine.lane_bytes(lane) + own + rails

    def close_lane(self, lane: int) -> None:
        """The graph of a lane is gone on this rank; perhaps long after :meth:`close`."""
        mine = self._lanes[lane]
        mine.held = False
        self._rail.close_lane(mine.rail)
        self._whole.close_lane(mine.whole)
        self._engine.close_lane(lane)

    # A call

    def _schedule(self, call: Call) -> Schedule | None:
        return self._schedules.of(Shape.of(call))

    def places(self, work: Call | Letter) -> tuple[Place, ...]:
        """Where the user's arrays are, as far as other ranks touch them. Local."""
        plan = None if isinstance(work, Letter) else self._schedule(work)
        if plan is None or isinstance(work, Letter):
            return self._whole.engine.places(work)
        places: dict[Place, None] = {}
        if work.clash:
            places[Place(-1, 0, work.clash, None)] = None
        for step, part in steps_of(plan, work, self._arrays(plan, work, self._lanes[0], None)):
            engine = self._engine if step.who == "node" else self._rail.engine
            places.update(dict.fromkeys(place for place in engine.places(part) if place.reason))
        return tuple(places)

    def enqueue(self, work: Call | Letter, stream: Any, lane: int = 0) -> None:
        """Put a call at the end of a stream, and parts of it beside that."""
        try:
            if work is BARRIER:
                self._barrier(stream)
                return
            plan = None if isinstance(work, Letter) else self._schedule(work)
            self._flat = plan is None
            if plan is None or isinstance(work, Letter):
                self._enqueue_flat(work, stream, lane)
            else:
                self._enqueue(plan, work, stream, lane)
        except BaseException as error:
            # Other nodes are in this call. Of a message all ranks' engine knows whether it matters.
            if not (lane or isinstance(work, Letter)):
                self.fail(error)
            raise

    def _enqueue_flat(self, work: Call | Letter, stream: Any, lane: int) -> None:
        """All ranks at once."""
        if not lane and isinstance(work, Call):
            self._parents.add(work, 0)
            self._whole.enter([work])
            self._rail.enter(())
        self._whole.engine.enqueue(work, stream, self._lanes[lane].whole)

    def _barrier(self, stream: Any) -> None:
        """All nodes have come when all rails have, between two meetings of the node."""
        self._parents.add(BARRIER, 2)
        for who, engine in (
            ("node", self._engine), ("rail", self._rail.engine), ("node", self._engine),
        ):  # fmt: skip
            if who == "rail" and self._gate is not None:
                self._gate.enqueue(stream, 0)
            with self._named[who]():
                engine.enqueue(BARRIER, stream)

    def _enqueue(self, plan: Schedule, call: Call, stream: Any, lane: int) -> None:
        mine = self._lanes[lane]
        reasons = [place.reason for place in self.places(call) if place.reason]
        self._last = transfer_of(call, self.name, self._world.size, reasons, staged=bool(reasons))
        self._local.preload((call.code,))  # not behind a kernel that waits
        arrays = self._arrays(plan, call, mine, stream)
        steps = dict(steps_of(plan, call, arrays))
        if not lane:
            self._parents.add(call, sum(step.who == "node" for step in steps))
            self._rail.enter(part for step, part in steps.items() if step.who == "rail")
            self._whole.enter(())
        for act in plan.acts:
            if isinstance(act, Follow):
                first, then = (stream, mine.side) if act.side else (mine.side, stream)
                self._driver.follow(then, first)
            elif isinstance(act, Copy):
                self._sort(act, call, arrays, stream)
            elif isinstance(act, Divide):
                array = view_of(arrays, act.span, call)
                on = mine.side if act.side else stream
                self._local.divide(array.data.ptr, array.size, call.code, act.by, on)
            else:
                on = mine.side if act.side else stream
                engine, number = (
                    (self._engine, lane) if act.who == "node" else (self._rail.engine, mine.rail)
                )
                if act.who == "rail" and self._gate is not None:
                    self._gate.enqueue(on, lane)
                with self._named[act.who]():
                    engine.enqueue(steps[act], on, number)

    def _sort(self, act: Copy, call: Call, arrays: Mapping[str, Any], stream: Any) -> None:
        width = act.columns * call.dtype.itemsize
        source, target = arrays[act.source].data.ptr, arrays[act.target].data.ptr
        table = self._tables[act.order]
        self._local.copy_rows(table, target, width, source, width, width, stream)

    def _arrays(self, plan: Schedule, call: Call, lane: _Lane, stream: Any) -> dict[str, Any]:
        """By name of a buffer; with memory for this call alone where a stream is given."""
        arrays = {"input": call.input, "output": call.output, **lane.scratch}
        if stream is None:  # nobody looks into it
            return {**arrays, "extra": self._lanes[0].scratch["first"]}
        if plan.extra:
            arrays["extra"] = self._extra.empty(plan.extra, stream)
        if call.clash:
            copy = self._extra.empty(call.input.nbytes, stream)
            size, at = call.input.nbytes, call.input.data.ptr
            self._local.copy_rows(self._one_row, copy.data.ptr, size, at, size, size, stream)
            arrays["input"] = copy
        return arrays

    def repeat(self) -> None:
        """None: the parts are made anew."""
