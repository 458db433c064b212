"""How communicators are made: options, checks that all ranks chose the same, and set-up."""

from __future__ import annotations

import dataclasses
import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import settings
from ..driver import select
from ..driver.api import Driver
from ..errors import (
    AgreementError,
    Error,
    InvalidTypeError,
    InvalidValueError,
    MismatchError,
    PeerTimeoutError,
)
from ..group import Bootstrap, Topology, agree_equal, discover, from_mpi, from_tcp, in_process
from ..group.bootstrap import check_member
from ..group.naming import shorten, sides
from ..memory import installed_pool
from .dtypes import refuse_reduction
from .nccl_calls import refuse_nccl_reduction
from .nccl_library import load_nccl
from .nccl_setup import agreed_library
from .plan import SCRATCH_BYTES

if TYPE_CHECKING:
    from .communicator import Communicator

__all__ = ["WITHIN_NODE", "Options", "choose", "init_process_group", "start", "start_threads"]

_log = logging.getLogger("cupy_zc")

#: Engines whose ranks reach each other's memory.
WITHIN_NODE = ("host", "device")
#: What a communicator can be on each driver; the first is for the ranks of one node.
_BACKENDS = {"host": ("host", "hierarchical"), "cuda": ("device", "nccl", "hierarchical")}
#: UUID of the current device, and how many a rank sees.
_DEVICES = struct.Struct("!16sI")


@dataclass(frozen=True, slots=True)
class Options:
    """What a user chose for a communicator."""

    driver: Driver
    device: int
    #: What was asked for, "auto" among it.
    backend: str
    timeout: float | None
    deterministic: bool
    strict: bool
    register: str
    multicast: str
    #: Whether ranks are threads of one process, which share the null stream of a device. Work of
    #: one rank that waits for another one must not be ahead of that one's work in a queue.
    threads: bool = False
    #: Whether to give each rank of a node another GPU, where all have the same one and see more.
    spread: bool = False
    #: Which engine it is, once it is known where the ranks are.
    engine: str = ""
    #: Of the device engine, where ``bench --tune`` measures: from where algorithms take over.
    tables: Any = None

    @classmethod
    def of(
        cls,
        call: str,
        *,
        driver: str | Driver | None = None,
        backend: str = "auto",
        timeout: float | None = None,
        deterministic: bool = False,
        strict: bool = False,
        register: str = "auto",
        multicast: str = "auto",
        spread: bool = False,
    ) -> Options:
        """Check what was passed to a call.

        Raises:
            InvalidValueError, InvalidTypeError: an argument.
        """
        chosen = _driver(driver, backend)
        there = _BACKENDS.get(chosen.name, ())
        if not there:
            raise Error(f"{call}: there is no engine for the {chosen.name} driver")
        if backend not in ("auto", *there):
            allowed = (
                f"'auto' or {' or '.join(map(repr, there))}, what the {chosen.name} driver has"
            )
            raise InvalidValueError(call, "backend", backend, allowed)
        if register not in ("auto", "manual"):
            raise InvalidValueError(call, "register", register, "'auto' or 'manual'")
        if multicast not in ("auto", "require"):
            raise InvalidValueError(
                call, "multicast", multicast,
                "'auto' or 'require'; CUPY_ZC_MULTICAST=off in the environment switches it off",
            )  # fmt: skip
        for name, value in (("deterministic", deterministic), ("strict", strict)):
            if not isinstance(value, bool):
                raise InvalidTypeError(call, name, value, "True or False")
        if timeout is not None and not 0 < timeout < float("inf"):
            raise InvalidValueError(
                call, "timeout", timeout, "a positive number of seconds, or None"
            )
        device = chosen.current_device()
        return cls(
            chosen, device, backend, timeout, deterministic, strict, register, multicast,
            spread=spread,
        )  # fmt: skip

    @property
    def wait(self) -> float:
        """Seconds to wait for a rank that user code can delay."""
        return settings().timeout if self.timeout is None else self.timeout

    @property
    def refuses(self) -> Callable[[np.dtype[Any], str], str | None]:
        """What is allowed in place of a reduction that the engine cannot do."""
        by_nccl = self.driver.name == "cuda" and self.engine not in WITHIN_NODE
        return refuse_nccl_reduction if by_nccl else refuse_reduction

    @property
    def insists(self) -> bool:
        """Whether a call that multicast cannot carry is an error, which all ranks must raise."""
        return self.multicast == "require" and self.strict

    @property
    def shared(self) -> tuple[str | int | bool, ...]:
        """What all ranks must choose alike."""
        return (
            self.driver.name, self.backend, self.deterministic, self.register, self.multicast,
            self.insists, SCRATCH_BYTES,
        )  # fmt: skip


def _driver(driver: str | Driver | None, backend: str) -> Driver:
    """The driver a user means who names none: that of the installed pool, or one with an engine."""
    pool = installed_pool()
    if driver is not None:
        return select(driver)
    if pool is not None:
        return pool.driver
    having = [name for name, backends in _BACKENDS.items() if backend in backends]
    return select(having[0] if len(having) == 1 else None)


def start(kind: type[Communicator], bootstrap: Bootstrap, options: Options) -> Communicator:
    """A communicator of the ranks of a bootstrap, which it owns from here on. Collective.

    Raises:
        As ``Communicator.from_mpi``; the bootstrap is closed then.
    """
    with ExitStack() as stack:
        stack.enter_context(bootstrap)
        topology = discover(bootstrap)
        what = "(driver, backend, deterministic, register, multicast, its strictness, scratch)"
        agree_equal(bootstrap, what, options.shared)
        engine = choose(options, topology)
        if engine in WITHIN_NODE:  # whose ranks are on one machine, whatever nodes are pretended
            topology = dataclasses.replace(topology, node_of=(0,) * topology.size)
        if options.spread:
            options = _spread(bootstrap, topology, options)
        options = dataclasses.replace(options, engine=engine)
        with options.driver.use_device(options.device):
            made = _made(kind, bootstrap, topology, options)
        stack.pop_all()
    return made


def _made(
    kind: type[Communicator], bootstrap: Bootstrap, topology: Topology, options: Options
) -> Communicator:
    """The communicator; of NCCL where GPUs turn out not to reach each other. Collective.

    Raises:
        AgreementError: it could not be made, by NCCL neither; on all ranks.
    """
    try:
        with ExitStack() as stack:
            made = kind(bootstrap, topology, options, stack)
            stack.pop_all()
        return made
    except AgreementError as error:  # on all ranks
        if (options.backend, options.engine) != ("auto", "device") or not _has_nccl(bootstrap):
            raise
        reason = str(error)
    # Here, where nothing of the first attempt is kept alive by its error.
    _log.warning(
        "rank %d: GPUs are not reached directly, so NCCL is used: %s", bootstrap.rank, reason
    )
    return _made(kind, bootstrap, topology, dataclasses.replace(options, engine="nccl"))


def _has_nccl(bootstrap: Bootstrap) -> bool:
    """Whether all ranks have NCCL, of one version. Collective."""
    try:
        agreed_library(bootstrap, load_nccl)
    except (AgreementError, MismatchError) as missing:
        # Its text alone: a log that kept the error would keep what the first attempt had.
        _log.warning("rank %d: NCCL could be used instead, but %s", bootstrap.rank, str(missing))
        return False
    return True


def choose(options: Options, topology: Topology) -> str:
    """Which engine a communicator gets. The same on all ranks.

    Args:
        options: What was asked for.
        topology: Where the ranks are.

    Raises:
        Error: the ranks are where no engine of the driver, or not the one that was asked for, can
            bring them together.
    """
    asked, driver = options.backend, options.driver.name
    machines = topology.machine_of or topology.node_of
    places = {rank: f"node {node}" for rank, node in enumerate(topology.node_of)}
    if driver == "host" and len(set(machines)) > 1:
        raise Error(
            f"rank {topology.rank}: the host driver brings together ranks of one machine; several "
            f"machines need GPUs and NCCL: {sides(places, 'is at')}"
        )
    if asked in WITHIN_NODE and len(set(machines)) > 1:
        raise Error(
            f"rank {topology.rank}: backend={asked!r} is for one node, 'auto' for any: "
            f"{sides(places, 'is at')}"
        )
    if asked == "hierarchical" and not topology.is_even:
        sizes = ", ".join(str(len(node)) for node in topology.nodes)
        raise Error(
            f"rank {topology.rank}: backend='hierarchical' needs as many ranks on each node, and "
            f"they have {shorten(sizes)}; 'auto' does without"
        )
    if asked != "auto":
        return asked
    if len(topology.nodes) == 1:
        return _BACKENDS[driver][0]
    if topology.is_even:
        return "hierarchical"
    return "host" if driver == "host" else "nccl"


def _spread(bootstrap: Bootstrap, topology: Topology, options: Options) -> Options:
    """Give each rank of a machine another device, where all have the same one and see more.

    So a program that names no device runs on all of them, one a rank. The device is made current
    in this thread: what the program allocates from here on is there.
    """
    driver = options.driver
    own = _DEVICES.pack(driver.device_info(options.device).uuid, driver.device_count())
    said = bootstrap.all_gather(own, tag="devices of the ranks")
    ranks = topology.machine_ranks
    machine = [_DEVICES.unpack(said[rank]) for rank in ranks]
    least = min(count for _, count in machine)
    if len({uuid for uuid, _ in machine}) > 1 or len(machine) == 1 or least == 1:
        return options
    device = ranks.index(topology.rank) % least
    if device != options.device:
        _log.info("rank %d: device %d is made current, one a rank", bootstrap.rank, device)
        driver.make_current(device)
    return dataclasses.replace(options, device=device, spread=False)


def start_threads(
    kind: type[Communicator], n: int, devices: Sequence[int] | None, options: Options
) -> list[Communicator]:
    """``n`` communicators of one group in this process, set up in a thread each.

    Raises:
        InvalidValueError: ``n`` or ``devices``. Otherwise as ``Communicator.from_mpi``.
    """
    call = "Communicator.in_process"
    group = in_process(n)
    count = options.driver.device_count()
    chosen = [options.device] * n if devices is None else list(devices)
    if len(chosen) != n or not all(0 <= device < count for device in chosen):
        raise InvalidValueError(call, "devices", devices, f"{n} ordinals from 0 to {count - 1}")
    made: list[Communicator | BaseException | None] = [None] * n

    def run(rank: int) -> None:
        mine = dataclasses.replace(options, device=chosen[rank], threads=True)
        try:
            made[rank] = start(kind, group[rank], mine)
        except BaseException as error:  # noqa: BLE001 - raised below
            made[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"cupy-zc rank {rank}", daemon=True)
        for rank in range(n)
    ]
    for thread in threads:
        thread.start()
    # Each step of the set-up has a deadline of its own; this one is for what nobody thought of.
    until = time.monotonic() + 10 * settings().setup_timeout
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    there = [each for each in made if each is not None and not isinstance(each, BaseException)]
    if len(there) == n:
        return there
    for each in there:
        each.close()
    failures = [each for each in made if isinstance(each, BaseException)]
    failures.sort(key=lambda error: isinstance(error, PeerTimeoutError))  # a consequence, mostly
    stuck = [rank for rank in range(n) if made[rank] is None]
    raise failures[0] if failures else PeerTimeoutError(f"{call}: set-up did not end", stuck)


def init_process_group(
    n_devices: int,
    rank: int,
    *,
    backend: str = "auto",
    host: str | None = None,
    port: int | None = None,
    use_mpi: bool = False,
) -> Communicator:
    """A communicator of ``n_devices`` ranks, as ``cupyx.distributed`` makes it. Collective.

    Args:
        n_devices: Number of ranks.
        rank: This one. Rank 0 listens at ``host`` and ``port`` where MPI is not used.
        backend: As in :meth:`Communicator.from_mpi`.
        host: Rank 0's machine; None for ``CUPYX_DISTRIBUTED_HOST``.
        port: None for ``CUPYX_DISTRIBUTED_PORT``.
        use_mpi: Whether the ranks find each other by mpi4py's ``COMM_WORLD``; ``rank`` may be
            another one than MPI's.

    Raises:
        InvalidValueError: ``rank``, ``n_devices`` or ``backend``.
        MismatchError: the ranks chose differently, or two of them the same rank.
        PeerTimeoutError, AgreementError, Error: as :meth:`Communicator.from_mpi`.
    """
    from .communicator import Communicator

    check_member("init_process_group", rank, n_devices)
    options = Options.of("init_process_group", backend=backend, spread=True)
    find: Callable[[], Bootstrap] = partial(from_tcp, n_devices, rank, host, port)
    if use_mpi:
        find = partial(_by_mpi, n_devices, rank)
    return start(Communicator, find(), options)


def _by_mpi(size: int, rank: int) -> Bootstrap:
    """The ranks of MPI's world, in the order that they ask for."""
    world = from_mpi()
    with ExitStack() as stack:
        stack.enter_context(world)
        asked: list[Any] = world.all_gather(f"{size} {rank}".encode(), tag="init_process_group")
        if sorted(asked) != sorted(f"{world.size} {each}".encode() for each in range(world.size)):
            said = {
                mpi_rank: "n_devices={}, rank={}".format(*each.decode().split())
                for mpi_rank, each in enumerate(asked)
            }
            raise MismatchError(
                f"init_process_group: the {world.size} ranks of MPI must pass n_devices="
                f"{world.size} and each another rank; MPI's {sides(said)}"
            )
        if asked == [f"{size} {each}".encode() for each in range(size)]:
            stack.pop_all()
            return world
        ordered = world.split(0, rank)
    assert ordered is not None  # every rank has a color
    return ordered
