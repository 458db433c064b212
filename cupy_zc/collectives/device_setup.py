"""Set-up of the device engine: what GPUs the ranks have, and whether their memory can be trusted.

Each step is voted on, so all ranks go on together or none does.
"""

from __future__ import annotations

import ctypes
import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from ..config import settings
from ..driver.api import KernelDriver, KernelName, using_stream
from ..errors import Error
from ..group import vote
from ..group.naming import sides
from ..registration import Registry
from .device_args import EVERY_RANK, MAX_RANKS, nanoseconds
from .device_kernels import launch_with
from .device_lane import DeviceLane, Records
from .device_plan import KEPT_FREE, MAX_BLOCKS, PATTERN_BYTES, THREADS, Machine, sizes
from .device_tables import Tables, load_tables
from .device_windows import WindowTable

__all__ = [
    "lines_are_whole", "local_parts", "machine_of", "step", "try_mappings", "zero_on_all",
]  # fmt: skip

_log = logging.getLogger("cupy_zc")
_T = TypeVar("_T")

#: How often a line is tried at each place of the buffers, of which there are two.
TURNS = 20


def machine_of(
    registry: Registry, ranks: int, tables: Tables | None, *, spare: int, deterministic: bool
) -> Machine:
    """What the ranks share; they have no multicast as yet. Collective.

    Args:
        registry: Of the ranks.
        ranks: How many.
        tables: From where an algorithm takes over; None: as ``CUPY_ZC_PLAN`` says, or the package.
        spare: Multiprocessors of a GPU that are left to another engine.
        deterministic: Whether sums must be the same from run to run.

    Raises:
        Error: more ranks than kernels are made for; on all of them. Or ranks with other tables.
        AgreementError: a rank could not look at its GPU, or at its file of tables; on all of them.
    """
    driver, device = registry.driver, registry.device
    assert isinstance(driver, KernelDriver)
    if ranks > MAX_RANKS:
        raise Error(
            f"rank {registry.channel.rank}: the device engine is for {MAX_RANKS} ranks of a node "
            f"at most, and there are {ranks}"
        )

    def look() -> tuple[Tables | None, list[str | int]]:
        read = load_tables(settings().plan) if tables is None else tables
        uuid, count = driver.device_info(device).uuid.hex(), driver.multiprocessors(device)
        return read, [uuid, count, (read or Tables.own()).digest]

    used, own = step(registry, "look at the GPU, and at its file of thresholds", look)
    said = [
        json.loads(each)
        for each in registry.channel.all_gather(json.dumps(own).encode(), tag="GPUs of the ranks")
    ]
    digests = {rank: digest for rank, (_, _, digest) in enumerate(said)}
    if len(set(digests.values())) > 1:
        raise Error(
            f"rank {registry.channel.rank}: the files of CUPY_ZC_PLAN differ: "
            f"{sides(digests, 'has')}; give all ranks the same one, or none"
        )
    sharing = Counter(uuid for uuid, _, _ in said)
    # All blocks of all ranks must fit their GPU at once, one a multiprocessor or two of the smaller
    # ones, beside kernels of mail that wait for their receivers.
    kept = KEPT_FREE + spare
    blocks = max(1, min((count - kept) // sharing[uuid] for uuid, count, _ in said))
    blocks = min(blocks, MAX_BLOCKS)
    return Machine(
        ranks, blocks, True, sizes(ranks, used), deterministic=deterministic, tables=used,
        shared=spare > 0,
    )  # fmt: skip


def zero_on_all(registry: Registry, stream: Any, what: str, address: int, size: int) -> None:
    """Zero memory of this rank, on all ranks before anybody uses theirs. Collective.

    Raises:
        AgreementError: a rank could not; on all of them.
    """
    driver = registry.driver
    assert isinstance(driver, KernelDriver)

    def zero() -> None:
        driver.fill(address, 0, size, stream)
        stream.synchronize()

    step(registry, f"zero {what}", zero)


def try_mappings(lane: DeviceLane, registry: Registry, stream: Any) -> None:
    """Write a pattern through every mapping of a peer, and look whether it came there. Collective.

    It overwrites the lane.

    Raises:
        AgreementError: a pair of ranks cannot reach each other's memory; on all of them.
    """
    driver = registry.driver
    assert isinstance(driver, KernelDriver)
    me = lane.rank
    peers = [peer for peer in range(len(lane.addresses)) if peer != me]

    def write() -> None:
        for peer in peers:
            _pattern(
                "write", driver, registry.device, stream, _place(lane, peer, me), me, peer, None
            )
        stream.synchronize()

    def check() -> None:
        counter = driver.kept_memory(8)
        for peer in peers:
            for what, at, writer, owner in (
                (f"rank {peer} wrote to its memory", _place(lane, me, peer), peer, me),
                (f"it wrote to the memory of rank {peer}", _place(lane, peer, me), me, peer),
            ):
                driver.fill(counter.ptr, 0, 8, stream)
                _pattern("check", driver, registry.device, stream, at, writer, owner, counter.ptr)
                with using_stream(stream, driver.current_stream):
                    wrong = int.from_bytes(driver.read(counter.ptr, 8), "little")
                if wrong:
                    raise Error(
                        f"rank {me} reads {wrong:,} of {PATTERN_BYTES // 4:,} words wrong that "
                        f"{what}; the GPUs of the two do not share memory as they say (an IOMMU "
                        "or ACS in the way of PCIe, a failing link)"
                    )

    step(registry, "write a pattern to the peers", write)
    step(registry, "read the pattern of the peers", check)


def lines_are_whole(lane: DeviceLane, registry: Registry, stream: Any) -> bool:
    """Whether lines of 128 bytes come over every link in one piece, the flag in them last.

    Rows of patterns, other ones each time, are gathered in such lines; a word of an older line that
    is taken for new shows. Collective; the answer is the same on all ranks.

    Raises:
        AgreementError: a rank did not come, or has no memory; on all of them.
    """
    driver, ranks, me = registry.driver, len(lane.addresses), lane.rank
    assert isinstance(driver, KernelDriver)
    wrong = 0

    def gather() -> None:
        nonlocal wrong
        function = driver.load(registry.device, KernelName("ll128_move.cu", "ll128_all_gather"))
        memory = driver.kept_memory((ranks + 1) * PATTERN_BYTES + 8)
        counter = memory.ptr + (ranks + 1) * PATTERN_BYTES
        driver.fill(counter, 0, 8, stream)
        args = lane.args()
        args.input, args.output = memory.ptr, memory.ptr + PATTERN_BYTES
        args.count, args.element, args.root = PATTERN_BYTES, 1, EVERY_RANK
        args.budget = nanoseconds(settings().setup_timeout)
        for turn in range(TURNS):
            _pattern("write", driver, registry.device, stream, args.input, turn, me, None)
            launch_with(driver, function, 8, THREADS, stream, [args])
            # Nothing may queue up behind a kernel that waits for a rank of the same GPU: the work
            # of that rank may be behind it in one of the GPU's queues.
            stream.synchronize()
            for peer in range(ranks):
                row = args.output + peer * PATTERN_BYTES
                _pattern("check", driver, registry.device, stream, row, turn, peer, counter)
        with using_stream(stream, driver.current_stream):
            wrong = int.from_bytes(driver.read(counter, 8), "little")
        if lane.record.code:
            raise Error(f"rank {me} waited in vain for a line of rank {lane.record.rank}")

    step(registry, "exchange lines of 128 bytes", gather)
    said = registry.channel.all_gather(str(wrong).encode(), tag="whole lines")
    broken = {rank: f"{int(each):,} wrong words" for rank, each in enumerate(said) if int(each)}
    if broken:
        _log.warning(
            "the links between the GPUs do not keep lines of 128 bytes whole (%s), so small "
            "messages take another protocol",
            sides(broken, "got"),
        )
    return not broken


def _pattern(
    kernel: str,
    driver: KernelDriver,
    device: int,
    stream: Any,
    address: int,
    first: int,
    second: int,
    counter: int | None,
) -> None:
    """Write or check ``PATTERN_BYTES`` of a pattern that belongs to two numbers."""
    function = driver.load(device, KernelName("pattern.cu", f"pattern_{kernel}"))
    values: list[Any] = [
        ctypes.c_uint64(address),
        ctypes.c_uint64(PATTERN_BYTES // 4),
        ctypes.c_uint64(0),
        ctypes.c_uint32(1 + first * MAX_RANKS + second),
    ]
    if counter is not None:
        values.append(ctypes.c_uint64(counter))
    launch_with(driver, function, 4, 256, stream, values)


def _place(lane: DeviceLane, owner: int, writer: int) -> int:
    """Where one rank writes its pattern to the lane of another one."""
    return lane.addresses[owner] + writer * PATTERN_BYTES


def local_parts(registry: Registry, ranks: int) -> tuple[Records, Any, WindowTable]:
    """What a rank makes by itself: records, a stream for set-up and inspection, the table."""
    driver = registry.driver
    assert isinstance(driver, KernelDriver)
    side = driver.make_stream(non_blocking=True)
    return Records(driver), side, WindowTable(driver, registry, ranks, side)


def step(registry: Registry, name: str, action: Callable[[], _T]) -> _T:
    """A step of set-up that every rank does by itself, and votes on. Collective.

    Raises:
        AgreementError: it failed on a rank; on all of them.
    """
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - the vote raises it on all ranks
        failure = error
    vote(registry.channel, name, failure)
    return result
