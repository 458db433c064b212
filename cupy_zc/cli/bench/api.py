"""The seam between the harness and the engines: a case to measure, and who can run it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .group import Group
from .platforms import Platform

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "OPS",
    "REDUCING",
    "ROOTED",
    "Case",
    "Context",
    "Engine",
    "Job",
    "Unavailable",
    "places",
    "unpaired",
]

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "send_recv",
    "reduce",
    "gather",
    "scatter",
)
#: Those with an operation, and those with a root.
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
)
OPS = ("sum", "prod", "min", "max")


class Unavailable(Exception):  # noqa: N818  a state of the machine, told in the report
    """An engine cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """One collective of one size.

    ``asked`` is what the user asked for, in bytes of the larger of the two buffers; ``count`` is
    rounded down to whole elements for each rank.
    """

    collective: str
    asked: int
    dtype: str
    op: str
    ranks: int
    root: int = 0
    #: Input and output are one array; where one of them is a part of the other's size, it is this
    #: rank's part of it.
    in_place: bool = False

    def __str__(self) -> str:
        where = " in place" if self.in_place else ""
        return f"{self.collective}{where} of {self.asked:,} bytes"

    @property
    def type(self) -> np.dtype[Any]:
        """The NumPy type of the elements."""
        if self.dtype == "bfloat16":
            import ml_dtypes

            bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
            return bfloat16
        return np.dtype(self.dtype)

    @property
    def count(self) -> int:
        """Elements of the larger buffer, a multiple of the number of ranks."""
        return self.asked // self.type.itemsize // self.ranks * self.ranks

    @property
    def part(self) -> int:
        """Elements of one rank's share of the larger buffer."""
        return self.count // self.ranks

    @property
    def call_count(self) -> int:
        """What nccl-tests calls count: elements of a rank's row of the call."""
        whole = ("all_reduce", "broadcast", "reduce", "send_recv")
        return self.count if self.collective in whole else self.part

    @property
    def nbytes(self) -> int:
        """Bytes of the larger buffer."""
        return self.count * self.type.itemsize

    @property
    def send_count(self) -> int:
        """Elements a rank gives."""
        return self.part if self.collective in ("all_gather", "gather") else self.count

    @property
    def recv_count(self) -> int:
        """Elements a rank gets."""
        return self.part if self.collective in ("reduce_scatter", "scatter") else self.count

    @property
    def reduces(self) -> bool:
        """Whether it has an operation."""
        return self.collective in REDUCING

    def gives(self, rank: int) -> bool:
        """Whether the input of a rank matters."""
        return rank == self.root or self.collective not in ("broadcast", "scatter")

    def gets(self, rank: int) -> bool:
        """Whether a rank has an output."""
        return rank == self.root or self.collective not in ("reduce", "gather")

    @property
    def bus_bytes(self) -> float:
        """Bytes that must cross a link in each direction; what nccl-tests calls bus bandwidth."""
        share = (self.ranks - 1) / self.ranks
        factor = {"all_reduce": 2 * share, "broadcast": 1.0, "reduce": 1.0, "send_recv": 1.0}
        return self.nbytes * factor.get(self.collective, share)


@dataclass(frozen=True, slots=True)
class Context:
    """What an engine is given."""

    group: Group
    platform: Platform
    #: Bytes that each of the two buffers of an engine must hold.
    capacity: int

    @property
    def rank(self) -> int:
        """This process."""
        return self.group.rank

    @property
    def ranks(self) -> int:
        """All processes."""
        return self.group.size


@dataclass(frozen=True, slots=True)
class Job:
    """A case ready to run: two flat arrays of the platform, and the call that enqueues it once."""

    send: Any
    recv: Any
    call: Callable[[], object]


def places(case: Case, rank: int, send: Any, recv: Any) -> tuple[Any, Any]:
    """Input and output of a case in two buffers of bytes, as flat arrays of its type.

    In place both are in the second buffer.
    """
    size = case.type.itemsize
    if case.in_place:
        whole = recv[: case.nbytes]
        mine = whole[rank * case.part * size :][: case.part * size]
        send = mine if case.send_count < case.count else whole
        recv = mine if case.recv_count < case.count else whole
    given, taken = send[: case.send_count * size], recv[: case.recv_count * size]
    return given.view(case.type), taken.view(case.type)


def unpaired(case: Case) -> str:
    """Why a rank would have nobody to exchange with, or nothing."""
    odd = case.collective == "send_recv" and case.ranks % 2 == 1
    return "needs an even number of ranks" if odd else ""


class Engine(ABC):
    """One implementation of the collectives, in one process of the run.

    Making one is collective; it happens on all ranks, or (where :meth:`probe` refuses on any of
    them) on none.

    Args:
        context: Where it runs.
        shared: What :meth:`probe` gave on rank 0.
    """

    #: Which platforms it runs on.
    platforms: ClassVar[tuple[str, ...]] = ("cuda",)
    #: False where a call destroys its input, so that only its first result is right.
    keeps_input: ClassVar[bool] = True
    #: What a call may raise; a case that fails so is skipped, and the report says why.
    errors: tuple[type[Exception], ...] = (
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        MemoryError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    )

    def __init__(self, context: Context, shared: Any) -> None:
        del shared
        self.context = context

    @classmethod
    def probe(cls, context: Context) -> Any:
        """Look, without talking to other ranks, whether the engine can run here.

        Returns:
            On rank 0, what the ranks need to find each other, if anything.

        Raises:
            Unavailable: it cannot.
        """
        platform = context.platform.name
        if platform not in cls.platforms:
            raise Unavailable(f"runs on {' and '.join(cls.platforms)}, not on {platform}")
        return None

    def refuses(self, case: Case) -> str:
        """Why it does not run a case, or nothing. The same on all ranks."""
        del case
        return ""

    @abstractmethod
    def prepare(self, case: Case) -> Job:
        """Make a case ready. What it allocates lives as long as the job."""

    def versions(self) -> dict[str, str]:
        """Versions of the libraries behind it."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""
