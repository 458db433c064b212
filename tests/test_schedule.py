"""Schedules of collectives over several nodes: what is moved, and that nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupy_zc.collectives.schedule as module
from cupy_zc.collectives.acts import Copy, Divide, Follow, Schedule, Shape, Sizes, Step, World
from cupy_zc.collectives.plan import REDUCTIONS, ROLES, Operation
from cupy_zc.collectives.schedule import Schedules, schedule

SCHEDULED = (
    Operation.ALL_REDUCE, Operation.BROADCAST, Operation.REDUCE_SCATTER, Operation.ALL_GATHER,
    Operation.ALL_TO_ALL,
)  # fmt: skip


def worlds(nodes: int, local_size: int, *, in_turns: bool = False) -> list[World]:
    """By rank: where it is."""
    ranks = tuple(
        tuple(
            local * nodes + node if in_turns else node * local_size + local
            for local in range(local_size)
        )
        for node in range(nodes)
    )
    where = {ranks[n][place]: (n, place) for n in range(nodes) for place in range(local_size)}
    return [World(nodes, local_size, *where[rank], ranks) for rank in range(nodes * local_size)]


def schedules(world: list[World], shape: Shape, sizes: Sizes) -> list[Schedule] | None:
    made = [schedule(shape, each, sizes) for each in world]
    there = [each for each in made if each is not None]
    assert len(there) in (0, len(made))  # all ranks go one way
    return there or None


_AVG = REDUCTIONS.index("avg")


@st.composite
def _calls(draw: st.DrawFn) -> tuple[list[World], Shape]:
    """Ranks on one to four nodes, and a collective of theirs."""
    nodes, local = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = Shape(
        operation=draw(st.sampled_from(SCHEDULED)),
        columns=draw(st.integers(1, 300)),
        itemsize=draw(st.sampled_from([1, 2, 4, 8, 16])),
        reduction=draw(st.sampled_from([0, _AVG])),
        divides_last=draw(st.booleans()),
        root=draw(st.integers(0, nodes * local - 1)),
        in_place=draw(st.booleans()),
    )
    return worlds(nodes, local, in_turns=draw(st.booleans())), shape


_SIZES = st.builds(
    Sizes,
    leaders=st.sampled_from([0, 256, 1 << 20]),
    piece=st.sampled_from([1, 64, 1 << 20]),
    scratch=st.sampled_from([0, 1 << 20]),
)


class _Meeting(NamedTuple):
    """A step as its members know it: who, and which of their common ones."""

    who: str
    group: int
    number: int


def _streams(world: World, plan: Schedule) -> list[tuple[bool, Any]]:
    """What a rank enqueues: stream, and a meeting, a wait for a place of the other stream, or None
    for work of its own."""
    counts: Counter[str] = Counter()
    places = {True: 0, False: 0}
    queued: list[tuple[bool, Any]] = []
    for act in plan.acts:
        match act:
            case Follow(side):
                queued.append((side, ("after", places[not side])))
                places[side] += 1
                continue
            case Step():
                group = world.node if act.who == "node" else world.local
                queued.append((act.side, _Meeting(act.who, group, counts[act.who])))
                counts[act.who] += 1
            case Copy() | Divide():
                queued.append((getattr(act, "side", False), None))
        places[queued[-1][0]] += 1
    return queued


def _finishes(world: list[World], plans: list[Schedule], calls: int, chance: random.Random) -> bool:
    """Whether ranks get through ``calls`` calls, where work of a stream begins when what is ahead
    of it has ended. Both streams of a rank have room on its GPU: node engines leave some free."""
    queues: list[dict[bool, list[Any]]] = []
    for mine, plan in zip(world, plans, strict=True):
        both: dict[bool, list[Any]] = {False: [], True: []}
        for call in range(calls):
            base = {side: len(both[side]) for side in both}
            for side, item in _streams(mine, plan):
                if isinstance(item, _Meeting):
                    item = (item, call)
                elif item is not None:
                    item = ("after", base[not side] + item[1])
                both[side].append(item)
        queues.append(both)
    at = [{False: 0, True: 0} for _ in world]
    members = {("node", node): ranks for node, ranks in enumerate(world[0].ranks)} | {
        ("rail", local): tuple(ranks[local] for ranks in world[0].ranks)
        for local in range(world[0].local_size)
    }

    def next_of(rank: int, side: bool) -> Any:
        place = at[rank][side]
        return queues[rank][side][place] if place < len(queues[rank][side]) else ("end",)

    def waits_at(rank: int, meeting: Any) -> bool | None:
        return next((side for side in (False, True) if next_of(rank, side) == meeting), None)

    moved = True
    while moved:
        moved = False
        for rank in chance.sample(range(len(world)), len(world)):
            for side in chance.sample([False, True], 2):
                item = next_of(rank, side)
                if item is None or (item[0] == "after" and at[rank][not side] >= item[1]):
                    at[rank][side] += 1
                    moved = True
                elif item is not None and isinstance(item[0], _Meeting):
                    group = members[item[0].who, item[0].group]
                    sides = {peer: waits_at(peer, item) for peer in group}
                    if None not in sides.values():
                        for peer, where in sides.items():
                            assert where is not None
                            at[peer][where] += 1
                        moved = True
    return all(at[r][s] == len(queues[r][s]) for r in range(len(world)) for s in (False, True))


@settings(max_examples=150)
@given(call=_calls(), sizes=_SIZES, seed=st.integers(0, 1 << 30))
def test_two_streams_on_one_gpu_never_wait_in_a_circle(
    call: tuple[list[World], Shape], sizes: Sizes, seed: int
) -> None:
    world, shape = call
    plans = schedules(world, shape, sizes)
    if plans is not None:
        assert _finishes(world, plans, 2, random.Random(seed))


def test_the_search_finds_a_circle_where_there_is_one() -> None:
    world = worlds(2, 2)
    rail = Step("rail", False, Operation.ALL_REDUCE, 0, 0, 4, None, None)
    plans = [Schedule((rail, rail._replace(who="node")))] * 4
    assert _finishes(world, plans, 1, random.Random(1))
    plans[0] = plans[3] = Schedule((rail._replace(who="node"), rail))
    assert not _finishes(world, plans, 1, random.Random(1))


@settings(max_examples=200)
@given(call=_calls(), sizes=_SIZES)
def test_members_of_a_step_agree_about_it_and_stay_within_their_buffers(
    call: tuple[list[World], Shape], sizes: Sizes
) -> None:
    world, shape = call
    plans = schedules(world, shape, sizes)
    if plans is None:
        return
    rows = dict.fromkeys(("input", "output"), shape.columns)
    role = ROLES[shape.operation]
    rows["input"] *= len(world) if role.input_rows else 1
    rows["output"] *= len(world) if role.output_rows else 1
    met: dict[tuple[str, int], list[list[tuple[Operation, int, int, int]]]] = {}
    for mine, plan in zip(world, plans, strict=True):
        room = {
            **rows,
            "first": plan.scratch // shape.itemsize,
            "second": plan.scratch // shape.itemsize,
            "extra": plan.extra // shape.itemsize,
        }
        steps: dict[str, list[tuple[Operation, int, int, int]]] = {"node": [], "rail": []}
        for act in plan.acts:
            if isinstance(act, Step):
                steps[act.who].append((act.operation, act.reduction, act.root, act.columns))
                for span in (act.source, act.target):
                    assert span is None or 0 <= span.start <= room[span.buffer] - span.length
        met.setdefault(("node", mine.node), []).append(steps["node"])
        met.setdefault(("rail", mine.local), []).append(steps["rail"])
    for (who, which), said in met.items():
        leaders_only = who == "rail" and which and not said[0]
        assert leaders_only or all(each == said[0] for each in said), (who, which)


@settings(max_examples=100)
@given(
    nodes=st.integers(2, 4), local=st.integers(1, 3), columns=st.integers(1, 5000),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]), piece=st.integers(1, 300) | st.just(1 << 20),
)  # fmt: skip
def test_of_a_large_all_reduce_each_rail_gets_its_part_and_each_element_goes_once(
    nodes: int, local: int, columns: int, itemsize: int, piece: int
) -> None:
    shape = Shape(Operation.ALL_REDUCE, columns, itemsize, 0, False, 0, False)
    sent: list[list[int]] = []
    begins: set[int] = set()
    for mine in worlds(nodes, local)[:local]:  # of one node
        plan = schedule(shape, mine, Sizes(leaders=1, piece=piece))
        assert plan is not None
        rails = [act for act in plan.acts if isinstance(act, Step) and act.who == "rail"]
        begins |= {act.source.start * itemsize % 16 for act in rails if act.source is not None}
        sent.append(
            [
                element
                for act in rails
                if act.source is not None
                for element in range(act.source.start, act.source.start + act.columns)
            ]
        )
    assert begins <= {0}, "a piece that does not begin at a multiple of 16 bytes takes scalar ways"
    assert sorted(element for rank in sent for element in rank) == list(range(columns))
    rest = local * max(1, 16 // itemsize)  # goes by the leader alone
    assert max(map(len, sent)) <= columns // local + rest


def test_a_schedule_is_made_once() -> None:
    (world, *_) = worlds(2, 2)
    kept = Schedules(world, Sizes())
    shape = Shape(Operation.ALL_REDUCE, 64, 4, 0, False, 0, False)
    assert kept.of(shape) == schedule(shape, world, Sizes())
    assert kept.of(replace(shape)) is kept.of(shape)
    nothing = replace(shape, columns=0)
    assert kept.of(nothing) is kept.of(nothing) is None


def test_kept_schedules_of_many_nodes_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduce_scatter of large rows has acts for each node."""
    monkeypatch.setattr(module, "_KEPT", 1000)
    (world, *_) = worlds(40, 2)
    kept = Schedules(world, Sizes(scratch=1))
    most = 0
    for columns in range(1, 50):
        shape = Shape(Operation.REDUCE_SCATTER, columns, 4, 0, False, 0, False)
        assert kept.of(shape) is kept.of(shape)
        acts = [plan.acts for plan in kept._made.values() if plan is not None]
        assert kept._acts == sum(1 + len(each) for each in acts) <= 1000
        most = max(most, len(acts))
    assert most > 1


def _touched(act: Any, size: int) -> list[tuple[str, int, int, bool]]:
    """What an act reads and writes: buffer, first and last element, whether it writes."""
    match act:
        case Step():
            spans = [(act.source, False), (act.target, True)]
            return [
                (span.buffer, span.start, span.start + span.length, writes)
                for span, writes in spans
                if span is not None
            ]
        case Divide():
            return [(act.span.buffer, act.span.start, act.span.start + act.span.length, True)]
        case Copy():
            rows = size * act.columns
            return [(act.source, 0, rows, False), (act.target, 0, rows, True)]
    raise AssertionError(act)


def _unordered(plan: Schedule, size: int) -> list[tuple[Any, Any]]:
    """Pairs of acts on two streams that touch the same elements, of which one writes, at once."""
    known: dict[bool, set[int]] = {False: set(), True: set()}
    found = []
    for index, act in enumerate(plan.acts):
        if isinstance(act, Follow):
            known[act.side] |= known[not act.side]
            continue
        side = getattr(act, "side", False)
        mine = _touched(act, size)
        for before in set(range(index)) - known[side]:
            other = plan.acts[before]
            if isinstance(other, Follow):
                continue
            found += [
                (other, act)
                for buffer, start, end, writes in mine
                for name, first, last, wrote in _touched(other, size)
                if buffer == name and start < last and first < end and (writes or wrote)
            ]
        known[side].add(index)
    ends = {index for index, act in enumerate(plan.acts) if getattr(act, "side", False)}
    late = [(plan.acts[index], None) for index in ends - known[False] if index in known[True]]
    return found + [each for each in late if not isinstance(each[0], Follow)]


@settings(max_examples=200)
@given(call=_calls(), sizes=_SIZES)
def test_what_two_streams_do_to_the_same_elements_has_an_order(
    call: tuple[list[World], Shape], sizes: Sizes
) -> None:
    world, shape = call
    for plan in schedules(world, shape, sizes) or ():
        assert not _unordered(plan, len(world))
