"""What can be launched on the emulated kernels, at random, and what NumPy says must come out."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
from emulated import EVERY_RANK, POISON, Launch, Outcome, Rank

Array = np.ndarray[Any, Any]

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
ROUNDS = 20 if THOROUGH else 1
#: Calls that a lane has seen, just before the number of one would give a flag of 0.
WRAPS = ((1 << 32) - 4, (1 << 32) - 3, (1 << 33) - 3)
SIZES = (1, 2, 3, 4, 8)
#: By number, as the kernels and the plan have them.
DTYPES = [
    np.dtype(name)
    for name in (
        "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
        "float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128",
    )
]  # fmt: skip
FLOAT32, FLOAT64 = 11, 12
OPERATIONS = ("sum", "prod", "min", "max", "avg")
PAIRS = [
    (element, operation)
    for element, dtype in enumerate(DTYPES)
    for operation, name in enumerate(OPERATIONS)
    if not (dtype.kind == "c" and name in ("min", "max"))
    and not (dtype.kind == "b" and name == "avg")
]
COUNTS = (0, 1, 2, 7, 15, 16, 17, 61, 257, 1000)
REDUCING = ("ll128", "ll128 two-step", "ll", "two_shot", "reduce", "reduce_scatter")
MOVING = ("all_gather", "all_to_all", "broadcast", "scatter", "gather")


def values(rng: np.random.Generator, element: int, shape: tuple[int, ...]) -> Array:
    dtype = DTYPES[element]
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)
    if dtype.kind == "c":
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    spread = rng.integers(-6, 6, shape) if dtype.itemsize == 2 else rng.integers(-20, 20, shape)
    return np.asarray(np.ldexp(rng.normal(size=shape), spread)).astype(dtype)


def reduced(operation: str, inputs: list[Array]) -> Array:
    """In the order of the ranks; 16-bit floats in float32; averages of integers truncated."""
    dtype = inputs[0].dtype
    wide = dtype.itemsize == 2 and dtype.kind not in "iu" and operation in ("sum", "prod", "avg")
    total = inputs[0].astype(np.float32) if wide else inputs[0].copy()
    ufunc = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(operation, np.add)
    with np.errstate(all="ignore"):
        for each in inputs[1:]:
            total = ufunc(total, each.astype(total.dtype))
        if operation == "avg":
            by = len(inputs)
            if dtype.kind in "iu":
                exact = total.astype(object)
                signs = np.where(total < 0, -1, 1).astype(object)
                total = np.asarray(abs(exact) // by * signs)
            else:
                real = {8: np.float32, 16: np.float64}
                parts = total.view(real[dtype.itemsize]) if dtype.kind == "c" else total
                total = (parts / parts.dtype.type(by)).view(total.dtype)
        return total.astype(dtype)


def call_of(kernel: str) -> str:
    """What a kernel of lines does, by the name of the kernel that does it without."""
    return kernel.removeprefix("ll128_").removeprefix("pair_")


def expected(launch: Launch) -> list[Array | None]:
    """The outputs of all ranks; None where a rank's output must not be touched."""
    inputs, size = [rank.input for rank in launch.ranks], len(launch.ranks)
    root, name = launch.root, OPERATIONS[launch.operation]
    kernel = call_of(launch.kernel)
    if kernel in ("ll128", "ll", "two_shot", "reduce", "all_reduce"):
        result = reduced(name, inputs)
        return [result if root in (EVERY_RANK, rank) else None for rank in range(size)]
    if kernel == "reduce_scatter":
        return [reduced(name, [each[:, [rank]] for each in inputs]) for rank in range(size)]
    if kernel == "all_gather":
        return [np.concatenate(inputs, axis=1)] * size
    if kernel == "all_to_all":
        return [
            np.concatenate([each[:, [rank]] for each in inputs], axis=1) for rank in range(size)
        ]
    if kernel == "broadcast":
        return [inputs[root]] * size
    if kernel == "scatter":
        return [inputs[root][:, [rank]] for rank in range(size)]
    gathered = np.concatenate(inputs, axis=1)
    return [gathered if rank == root else None for rank in range(size)]


def launch_of(
    rng: np.random.Generator,
    case: str,
    size: int,
    element: int,
    operation: int = 0,
    *,
    count: int | None = None,
    repeats: int = 1,
) -> Launch:
    """One launch, with everything that is not given drawn at random."""
    count = int(rng.choice(COUNTS)) if count is None else count
    kernel = {"ll128 two-step": "ll128", "reduce": "two_shot"}.get(case, case)
    input_rows = size if kernel in ("reduce_scatter", "all_to_all", "scatter") else 1
    output_rows = size if kernel in ("all_gather", "all_to_all", "gather") else 1
    root = int(rng.integers(size))
    itemsize = DTYPES[element].itemsize
    unit = itemsize // 2 if DTYPES[element].kind == "c" else itemsize
    registration = str(rng.choice(["all", "none", "mixed"]))
    aligned = bool(rng.integers(2))
    in_place_of_all = bool(rng.integers(2))
    ranks = []
    for rank in range(size):
        registered = {"all": True, "none": False}.get(registration, bool(rng.integers(2)))
        skews = [0, 0] if aligned else [int(x) * unit for x in rng.integers(0, 16 // unit + 1, 2)]
        entry = Rank(
            values(rng, element, (repeats, input_rows, count)),
            registered_input=registered,
            registered_output=registered if registration != "mixed" else bool(rng.integers(2)),
            input_skew=skews[0],
            output_skew=skews[1],
        )
        if in_place_of_all and (kernel != "broadcast" or rank == root):
            entry.in_place = "input in output"
            if kernel in ("reduce_scatter", "scatter"):
                entry.in_place = "output in input" if kernel != "scatter" or rank == root else ""
            if kernel in ("reduce_scatter", "scatter", "all_gather", "gather"):
                entry.row = rank
            if kernel == "gather" and rank != root:
                entry.in_place = ""
            entry.registered_output = entry.registered_input
        ranks.append(entry)
    return Launch(
        kernel,
        ranks,
        input_rows,
        output_rows,
        element,
        operation,
        blocks=int(rng.integers(1, 4)),
        threads=32 * int(rng.integers(1, 3)),
        root=root if case in ("reduce", "broadcast", "scatter", "gather") else EVERY_RANK,
        two_step=case == "ll128 two-step",
        chunk=128 * size * int(rng.integers(1, 9)),
        lines=2 * (count * itemsize // 112 // (size if case == "ll128 two-step" else 2) + 2),
        packs=max(1, -(-count * itemsize // 16)),
    )


def same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def check(launch: Launch, outcomes: list[Outcome]) -> None:
    """Every rank has what NumPy says, bit for bit, and nothing else was written."""
    name, dtype = OPERATIONS[launch.operation], DTYPES[launch.element]
    kernel = call_of(launch.kernel)
    wanted = expected(launch)
    first = next(
        each.output for each, want in zip(outcomes, wanted, strict=True) if want is not None
    )
    for number, (rank, outcome, want) in enumerate(
        zip(launch.ranks, outcomes, wanted, strict=True)
    ):
        where = f"rank {number} of {launch}"
        assert outcome.code == 0, f"{outcome} on {where}"
        if want is None:
            assert rank.in_place or outcome.untouched, where
        elif dtype.kind == "c" and name == "prod":
            np.testing.assert_allclose(outcome.output, want, 1e-4, err_msg=where)
            assert kernel == "reduce_scatter" or same(outcome.output, first), where
        else:
            assert same(outcome.output, want), where
        assert outcome.guards is None or set(outcome.guards) == {POISON}, where
        if not rank.in_place:
            assert same(outcome.input, rank.input), where


def odd_launch(case: str, size: int, odd: int) -> Launch:
    launch = launch_of(np.random.default_rng(2), case, size, FLOAT32, count=100)
    launch.budget = 20_000_000
    for rank in launch.ranks:
        rank.in_place, rank.row = "", 0
    launch.ranks[odd].fingerprint += 1
    return launch
