"""What the ranks of several nodes do for one collective: pure, so that it can be looked at whole.

``n`` nodes have ``L`` ranks each. The ranks with the same place in their nodes are a *rail*: they
have one network card each where a node has one for each GPU, and one rank a node is what IB SHARP
asks for. Data is reduced in the node first, so that only a part of 1/L goes over each rail:

==============  ==========================================================================
all_reduce      node reduce_scatter, rail all_reduce of the own piece, node all_gather
reduce_scatter  node reduce_scatter of the rows of each node, rail reduce to that node
all_gather      rail broadcast of each rank's row, node all_gather of the rows of each node
broadcast       scatter in the root's node, rail broadcast of the pieces, node all_gather
all_to_all      node all_to_all of what goes to each rail, rail all_to_all, with rows sorted
==============  ==========================================================================

Large ones go in chunks, on two streams: while the rail has one chunk, the node has the next one.
Small ones of ``all_reduce`` and ``broadcast`` go by one rank of each node, the *leader*; small ones
of the others are sorted through scratch, in one call of the node and one of the rail. What is not
here (and all_to_all of large rows, of which each byte crosses the network once anyway) is done by
all ranks as if there were no nodes.

Two streams cannot wait for each other in a circle: work of chunk ``k`` on the side stream is ahead
of all that waits for it, and what it waits for on other ranks is at most chunk ``k - 1`` of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

from .acts import (
    Act,
    Buffer,
    Copy,
    Divide,
    Follow,
    Schedule,
    Shape,
    Sizes,
    Span,
    Step,
    World,
)
from .plan import REDUCTIONS, ROLES, Operation

__all__ = ["Schedules", "schedule"]

_SUM, _AVG = REDUCTIONS.index("sum"), REDUCTIONS.index("avg")
#: Bytes to which the pieces of a rank are aligned.
_ALIGNED = 16
#: Acts of the schedules that a rank keeps, each of some 300 bytes.
_KEPT = 1 << 16


class Schedules:
    """Schedules of one rank, each made once. They end with what has this.

    Where chunks are those of nodes, a schedule has some acts for each node: kept are fewer of them
    the more nodes there are, so that their memory has a bound.
    """

    def __init__(self, world: World, sizes: Sizes) -> None:
        self._world, self._sizes = world, sizes
        self._made: dict[Shape, Schedule | None] = {}
        self._acts = 0

    def of(self, shape: Shape) -> Schedule | None:
        """As :func:`schedule`."""
        try:
            return self._made[shape]
        except KeyError:
            made = schedule(shape, self._world, self._sizes)
        acts = 1 if made is None else 1 + len(made.acts)
        if self._acts + acts > _KEPT:
            self._made.clear()
            self._acts = 0
        self._acts += acts
        self._made[shape] = made
        return made


def schedule(shape: Shape, world: World, sizes: Sizes) -> Schedule | None:
    """How a collective is carried out; None: by all ranks at once. Pure, the same on all ranks but
    for what each one's place makes of it.

    Args:
        shape: The collective.
        world: Where the ranks are.
        sizes: Thresholds.
    """
    if not shape.columns or shape.operation not in _MAKERS:
        return None
    if world.local_size == 1:
        return _one_rank_a_node(shape, world)
    return _MAKERS[shape.operation](_Maker(shape, world, sizes))


def _one_rank_a_node(shape: Shape, world: World) -> Schedule:
    """The rail has all ranks, and does it in one step."""
    role = ROLES[shape.operation]
    # 16-bit floats would overflow as sums: NCCL divides those on the way, without IB SHARP.
    averages = role.reduces and shape.reduction == _AVG
    averages = averages and (shape.divides_last or shape.itemsize != 2)
    given: Span | None = Span("input", 0, shape.columns * (world.size if role.input_rows else 1))
    taken: Span | None = Span("output", 0, shape.columns * (world.size if role.output_rows else 1))
    if shape.operation is Operation.BROADCAST:
        given, taken = (given, None) if shape.root == world.node else (None, taken)
    reduction = _SUM if averages else shape.reduction
    acts: list[Act] = [
        Step(
            "rail", False, shape.operation, reduction, shape.root, shape.columns, given, taken,
            shape.in_place,
        )
    ]  # fmt: skip
    if averages and taken is not None:
        acts.append(Divide(False, taken, world.size))
    return Schedule(tuple(acts))


class _Maker:
    """Puts a schedule together."""

    def __init__(self, shape: Shape, world: World, sizes: Sizes) -> None:
        self.shape, self.world, self.sizes = shape, world, sizes
        self.averages = shape.reduction == _AVG and ROLES[shape.operation].reduces
        #: Of the node. An average of floats is divided as early as can be, so that it has no
        #: overflow where the inputs have none.
        self.inner = _SUM if self.averages and shape.divides_last else shape.reduction
        #: Of the rail, which knows no average: IB SHARP does not.
        self.outer = _SUM if self.averages else shape.reduction
        self.row = shape.columns * shape.itemsize
        self.through_scratch = world.size * self.row <= sizes.scratch

    def node(
        self,
        operation: Operation,
        source: Span | None,
        target: Span | None,
        columns: int,
        *,
        root: int = 0,
        in_place: bool = False,
    ) -> Step:
        reduction = self.inner if ROLES[operation].reduces else 0
        return Step("node", False, operation, reduction, root, columns, source, target, in_place)

    def rail(
        self,
        operation: Operation,
        source: Span | None,
        target: Span | None,
        columns: int,
        *,
        root: int = 0,
        side: bool = False,
    ) -> Iterator[Act]:
        """A step of the rail; of a reduction with the divisions of an average around it."""
        averages = self.averages and ROLES[operation].reduces
        if averages and not self.shape.divides_last and source is not None:
            yield Divide(side, source, self.world.nodes)
        reduction = self.outer if ROLES[operation].reduces else 0
        in_place = source is not None and source == target
        yield Step("rail", side, operation, reduction, root, columns, source, target, in_place)
        if averages and self.shape.divides_last and target is not None:
            yield Divide(side, target, self.world.size)

    def chunks(self) -> tuple[list[tuple[int, int]], int]:
        """Where chunks begin and what each rank has of them; and where the rest begins."""
        step = self.world.local_size * max(1, _ALIGNED // self.shape.itemsize)
        if self.row < self.sizes.leaders:
            return [], 0
        most = max(step, self.world.local_size * self.sizes.piece // self.shape.itemsize)
        most -= most % step
        end = self.shape.columns - self.shape.columns % step
        return [
            (start, min(most, end - start) // self.world.local_size)
            for start in range(0, end, most)
        ], end


def _pipelined(stages: list[tuple[list[Act], list[Act], list[Act]]]) -> Iterator[Act]:
    """Chunks of three stages: before the rail, the rail, and behind it.

    The side stream has the rails. It waits for what comes before; and what comes behind a chunk is
    enqueued when the rail of the next one is.
    """
    behind: list[Act] = []
    for before, rail, after in stages:
        yield from before
        yield Follow(side=True)
        yield Follow(side=False)
        yield from rail
        yield from behind
        behind = after
    yield Follow(side=False)
    yield from behind


def _without_side(acts: list[Act]) -> list[Act]:
    """All on the user's stream: one chunk has nothing beside it."""
    return [
        act._replace(side=False) if isinstance(act, Step | Divide) else act
        for act in acts
        if not isinstance(act, Follow)
    ]


def _in_chunks(stages: list[tuple[list[Act], list[Act], list[Act]]]) -> list[Act]:
    acts = list(_pipelined(stages))
    return acts if len(stages) > 1 else _without_side(acts)


def _all_reduce(make: _Maker) -> Schedule:
    world, columns, in_place = make.world, make.shape.columns, make.shape.in_place
    chunks, rest = make.chunks()
    stages: list[tuple[list[Act], list[Act], list[Act]]] = []
    for start, part in chunks:
        whole = part * world.local_size
        piece = Span("output", start + world.local * part, part)
        target = Span("output", start, whole)
        stages.append(
            (
                [
                    make.node(
                        Operation.REDUCE_SCATTER, Span("input", start, whole), piece, part,
                        in_place=in_place,
                    )
                ],
                list(make.rail(Operation.ALL_REDUCE, piece, piece, part, side=True)),
                [make.node(Operation.ALL_GATHER, piece, target, part, in_place=True)],
            )
        )  # fmt: skip
    acts = _in_chunks(stages) if stages else []
    if rest < columns:
        left = columns - rest
        source, target = Span("input", rest, left), Span("output", rest, left)
        leads = world.local == 0
        acts.append(
            make.node(
                Operation.REDUCE, source, target if leads else None, left,
                in_place=leads and in_place,
            )
        )  # fmt: skip
        if leads:
            acts += make.rail(Operation.ALL_REDUCE, target, target, left)
        acts.append(_hand_out(make, target, 0, leads))
    return Schedule(tuple(acts))


def _hand_out(make: _Maker, span: Span, leader: int, leads: bool) -> Step:
    """A leader gives its node what it got."""
    given, taken = (span, None) if leads else (None, span)
    return make.node(Operation.BROADCAST, given, taken, span.length, root=leader)


def _broadcast(make: _Maker) -> Schedule:
    world, columns = make.world, make.shape.columns
    home = next(node for node in range(world.nodes) if make.shape.root in world.ranks[node])
    leader = world.ranks[home].index(make.shape.root)
    at_home, is_root = world.node == home, (world.node, world.local) == (home, leader)
    array: Buffer = "input" if is_root else "output"
    chunks, rest = make.chunks()
    stages: list[tuple[list[Act], list[Act], list[Act]]] = []
    for start, part in chunks:
        piece = Span(array, start + world.local * part, part)
        whole = Span(array, start, part * world.local_size)
        before: list[Act] = []
        if at_home:
            before.append(
                make.node(
                    Operation.SCATTER, whole if is_root else None, piece, part, root=leader,
                    in_place=is_root,
                )
            )  # fmt: skip
        given, taken = (piece, None) if at_home else (None, piece)
        rail = list(make.rail(Operation.BROADCAST, given, taken, part, root=home, side=True))
        after: list[Act] = [make.node(Operation.ALL_GATHER, piece, whole, part, in_place=True)]
        stages.append((before, rail, after))
    acts = _in_chunks(stages) if stages else []
    if rest < columns:
        span = Span(array, rest, columns - rest)
        if world.local == leader:
            given, taken = (span, None) if at_home else (None, span)
            acts += make.rail(Operation.BROADCAST, given, taken, span.length, root=home)
        acts.append(_hand_out(make, span, leader, world.local == leader))
    return Schedule(tuple(acts))


def _reduce_scatter(make: _Maker) -> Schedule | None:
    world, columns, size = make.world, make.shape.columns, make.world.size
    if make.through_scratch:
        summed, mine = Span("second", 0, world.nodes * columns), Span("output", 0, columns)
        source = Span("first", 0, size * columns)
        return Schedule(
            (
                Copy("to_rails", "input", "first", columns),
                make.node(Operation.REDUCE_SCATTER, source, summed, world.nodes * columns),
                *make.rail(Operation.REDUCE_SCATTER, summed, mine, columns),
            ),
            scratch=size * make.row,
        )
    if not world.is_blocked:
        return None
    block, mine = world.local_size * columns, Span("output", 0, columns)
    stages: list[tuple[list[Act], list[Act], list[Act]]] = []
    for node in range(world.nodes):
        part = Span("extra", node % 2 * columns, columns)
        source = Span("input", node * block, block)
        target = mine if node == world.node else None
        stages.append(
            (
                [make.node(Operation.REDUCE_SCATTER, source, part, columns)],
                list(make.rail(Operation.REDUCE, part, target, columns, root=node, side=True)),
                [],
            )
        )
    return Schedule(tuple(_in_chunks(stages)), extra=2 * make.row)


def _all_gather(make: _Maker) -> Schedule | None:
    world, columns, size = make.world, make.shape.columns, make.world.size
    given = Span("input", 0, columns)
    if make.through_scratch:
        gathered, all_rows = Span("first", 0, world.nodes * columns), size * columns
        return Schedule(
            (
                *make.rail(Operation.ALL_GATHER, given, gathered, columns),
                make.node(
                    Operation.ALL_GATHER, gathered, Span("second", 0, all_rows),
                    world.nodes * columns,
                ),
                Copy("from_rails", "second", "output", columns),
            ),
            scratch=size * make.row,
        )  # fmt: skip
    if not world.is_blocked:
        return None
    block = world.local_size * columns
    stages: list[tuple[list[Act], list[Act], list[Act]]] = []
    for node in range(world.nodes):
        row = Span("output", node * block + world.local * columns, columns)
        at_home = node == world.node
        rail = make.rail(
            Operation.BROADCAST, given if at_home else None, None if at_home else row, columns,
            root=node, side=True,
        )  # fmt: skip
        source, in_place = (given, make.shape.in_place) if at_home else (row, True)
        target = Span("output", node * block, block)
        after: list[Act] = [
            make.node(Operation.ALL_GATHER, source, target, columns, in_place=in_place)
        ]
        stages.append(([], list(rail), after))
    return Schedule(tuple(_in_chunks(stages)))


def _all_to_all(make: _Maker) -> Schedule | None:
    world, columns, rows = make.world, make.shape.columns, make.world.size * make.shape.columns
    if not make.through_scratch:
        return None
    first, second = Span("first", 0, rows), Span("second", 0, rows)
    return Schedule(
        (
            Copy("to_rails", "input", "first", columns),
            make.node(Operation.ALL_TO_ALL, first, second, world.nodes * columns),
            Copy("to_nodes", "second", "first", columns),
            *make.rail(Operation.ALL_TO_ALL, first, second, world.local_size * columns),
            Copy("from_nodes", "second", "output", columns),
        ),
        scratch=rows * make.shape.itemsize,
    )


_MAKERS = {
    Operation.ALL_REDUCE: _all_reduce,
    Operation.BROADCAST: _broadcast,
    Operation.REDUCE_SCATTER: _reduce_scatter,
    Operation.ALL_GATHER: _all_gather,
    Operation.ALL_TO_ALL: _all_to_all,
}
