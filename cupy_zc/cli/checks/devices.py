"""The GPUs: what they are, whether their memory can be shared, and whether they reach each other.

No multicast object is created unless that is asked for: there are only questions. The self-test of
the peers runs where multicast is switched off (:mod:`.peers`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ...config import multicast_refusal, settings
from ...driver import Driver, select
from ...driver.api import DeviceInfo
from ...driver.cuda_reports import Reach, capability, reach
from ...errors import DriverError
from ...memory.snapshot import show_bytes
from ..output import CannotError
from .finding import Finding, Status
from .peers import Measured, measure

__all__ = ["Devices", "look_at_devices"]

_DIRECTLY = "nothing for correctness: ranks read and write each other's memory directly instead"
_ONE_MACHINE = "nothing on one machine; memory cannot go to others over NVLink"


@dataclass(frozen=True, slots=True)
class Devices:
    """What was found of the GPUs."""

    findings: tuple[Finding, ...]
    #: A row for each GPU, for a table.
    table: tuple[dict[str, Any], ...] = ()
    #: ``matrix[a][b]``: how GPU ``a`` gets at the memory of ``b``; None of itself, or not known.
    matrix: tuple[tuple[Reach | None, ...], ...] = ()


def look_at_devices(
    measure: Callable[[str, int], Measured] = measure,
    probe: Callable[[int], None] | None = None,
) -> Devices:
    """The GPUs of this process; where there are none, what is used instead.

    Args:
        measure: The self-test: ``measure(driver, ranks)``.
        probe: Tries multicast, which makes multicast objects: ``probe(ranks)``; raises CannotError
            with the driver's words. None: it is not tried.
    """
    try:
        driver = select("cuda")
    except DriverError as error:
        return Devices(tuple(_without(error, measure)))
    count = driver.device_count()
    infos, table, broken = _describe(driver, count)
    matrix, failures = _matrix(count)
    findings = [
        Finding("GPUs", "GPUs", Status.OK, f"{count} visible"),
        *_choice(),
        *broken,
        *(finding for info in infos for finding in _memory(driver, info)),
        *_peers(matrix, failures, measure),
        *_multicast(driver, infos, probe),
    ]
    return Devices(tuple(findings), tuple(table), matrix)


def _describe(
    driver: Driver, count: int
) -> tuple[list[DeviceInfo], list[dict[str, Any]], list[Finding]]:
    """The devices that answer, their rows, and a finding for each one that does not."""
    infos, table, broken = [], [], []
    for device in range(count):
        try:
            info = driver.device_info(device)
            row = _row(driver, info)
            driver.granularity(device, settings().segment_size)
        except DriverError as error:
            name, means = f"device {device}", "it cannot be used"
            broken.append(Finding("GPUs", name, Status.MISSING, str(error), means, error.cause))
            continue
        infos.append(info)
        table.append(row)
    return infos, table, broken


def _without(error: DriverError, measure: Callable[[str, int], Measured]) -> Iterator[Finding]:
    yield Finding(
        "GPUs", "GPUs", Status.MISSING, f"{error.call} gave {error.result}",
        "arrays live in shared host memory (the host driver); collectives work on them, CuPy's "
        "own kernels do not",
        error.cause,
    )  # fmt: skip
    ranks = 2
    measured = measure("host", ranks)
    yield Finding(
        "GPUs", "self-test on the host", Status.OK if measured.passed else Status.MISSING,
        measured.words, "" if measured.passed else "not even the host driver works",
        "" if measured.passed else "the lines on limits and the container may say why",
    )  # fmt: skip


def _choice() -> Iterator[Finding]:
    if settings().driver == "host":
        yield Finding(
            "GPUs", "driver setting", Status.LIMITED, "CUPY_ZC_DRIVER=host",
            "pools and communicators do not use the GPUs", "unset CUPY_ZC_DRIVER",
        )  # fmt: skip


def _row(driver: Driver, info: DeviceInfo) -> dict[str, Any]:
    memory = driver.memory_info(info.ordinal)
    return {
        "device": info.ordinal,
        "name": info.name,
        "uuid": info.uuid.hex(),
        "capability": capability(info.ordinal),
        "free": memory.free,
        "total": memory.total,
        "posix_fd": info.posix_fd,
        "fabric": info.fabric,
        "gpu_direct_rdma": info.gpu_direct_rdma,
        "multicast": info.multicast,
    }


# Memory


def _memory(driver: Driver, info: DeviceInfo) -> Iterator[Finding]:
    name = f"memory of device {info.ordinal}"
    if not info.posix_fd:
        yield Finding(
            "GPUs", name, Status.MISSING, "cannot be exported as a POSIX file descriptor",
            "ranks cannot reach it", "use a whole GPU or a MIG instance; some vGPUs cannot share",
        )  # fmt: skip
        return
    try:
        kinds, size = _try_segment(driver, info.ordinal)
    except DriverError as error:
        means, remedy = "pools cannot serve arrays there", error.cause
        yield Finding("GPUs", name, Status.MISSING, str(error), means, remedy)
        return
    found = f"a segment of {show_bytes(size)} was made and exported as {', '.join(kinds)}"
    yield Finding("GPUs", name, Status.OK, found)
    yield _fabric(info, kinds)
    if not info.gpu_direct_rdma:
        yield Finding(
            "GPUs", f"RDMA of device {info.ordinal}", Status.LIMITED, "the device has it not",
            "network adapters cannot read its segments; nothing on one machine",
        )  # fmt: skip


def _fabric(info: DeviceInfo, kinds: tuple[str, ...]) -> Finding:
    name = f"FABRIC of device {info.ordinal}"
    if "fabric" in kinds:
        return Finding("GPUs", name, Status.OK, "segments get FABRIC handles")
    if not info.fabric:
        found = "the device has no such handles"
        return Finding("GPUs", name, Status.LIMITED, found, _ONE_MACHINE)
    return Finding(
        "GPUs", name, Status.LIMITED, "the device has such handles, and the driver refuses them",
        _ONE_MACHINE, "see the line on IMEX channels",
    )  # fmt: skip


def _try_segment(driver: Driver, device: int) -> tuple[tuple[str, ...], int]:
    """Make a segment, export it, and give it back: what it can be exported as, and its size."""
    size = driver.granularity(device, 1).size
    with ExitStack() as stack:
        handle = driver.create(device, size)
        stack.callback(driver.release, handle)
        os.close(driver.export_segment(handle))
        return handle.handle_types, size


# Peers


def _matrix(count: int) -> tuple[tuple[tuple[Reach | None, ...], ...], list[str]]:
    """How each GPU reaches each other one, and what the driver did not answer."""
    failures: list[str] = []

    def ask(device: int, peer: int) -> Reach | None:
        if device == peer:
            return None
        try:
            return reach(device, peer)
        except DriverError as error:
            failures.append(str(error))
            return None

    matrix = tuple(tuple(ask(a, b) for b in range(count)) for a in range(count))
    return matrix, failures


def _peers(
    matrix: tuple[tuple[Reach | None, ...], ...],
    failures: list[str],
    measure: Callable[[str, int], Measured],
) -> Iterator[Finding]:
    count = len(matrix)
    if count < 2:
        yield Finding(
            "peers", "links", Status.LIMITED, "not measured: there is one GPU",
            "there is no other GPU to reach; ranks can share this one",
            "where there are more, let CUDA_VISIBLE_DEVICES show all of them",
        )  # fmt: skip
        return
    if failures:
        means, remedy = "it is not known which GPUs reach each other", "the self-test says more"
        yield Finding("peers", "links", Status.LIMITED, failures[0], means, remedy)
    apart = [
        f"{a} to {b}"
        for a, row in enumerate(matrix)
        for b, way in enumerate(row)
        if way is not None and not way.access
    ]
    if apart:
        yield Finding(
            "peers", "P2P", Status.MISSING, f"no access from GPU {', '.join(apart)}",
            "a communicator with these GPUs cannot be made",
            "use GPUs that are joined by NVLink or a PCIe switch: nvidia-smi topo -p2p r",
        )  # fmt: skip
        return
    if not failures:
        yield Finding("peers", "P2P", Status.OK, f"all {count} GPUs have access to each other")
    measured = measure("cuda", count)
    yield Finding(
        "peers", "self-test", Status.OK if measured.passed else Status.MISSING, measured.words,
        "" if measured.passed else "data would arrive wrong, or not at all",
        "" if measured.passed else "switch off ACS and the IOMMU for these GPUs; look at dmesg",
    )  # fmt: skip


# Multicast


def _multicast(
    driver: Driver, infos: list[DeviceInfo], probe: Callable[[int], None] | None
) -> Iterator[Finding]:
    if not infos:
        return
    topic = "multicast"
    without = [str(info.ordinal) for info in infos if not info.multicast]
    if without:
        found = f"device {', '.join(without)} does not have it"
        yield Finding(topic, "attribute", Status.LIMITED, found, _DIRECTLY)
    else:
        yield Finding(topic, "attribute", Status.OK, "all devices have it")
    switch = multicast_refusal()
    if switch is None:
        yield Finding(topic, "guard", Status.OK, "nothing switches it off")
    else:
        remedy = f"start without {switch}, if this machine may use multicast"
        yield Finding(topic, "guard", Status.LIMITED, f"off by {switch}", _DIRECTLY, remedy)
    yield from _granules(driver, infos)
    if not without and switch is None:
        yield _probed(len(infos), probe)


def _probed(count: int, probe: Callable[[int], None] | None) -> Finding:
    topic, name = "multicast", "probe"
    if probe is None or count < 2:
        why = "this command creates no multicast object" if count > 1 else "there is one GPU"
        return Finding(
            topic, name, Status.LIMITED, f"not measured: {why}",
            "a communicator that wants multicast finds out, and goes without where it fails",
            "cupy-zc doctor --multicast makes some" if count > 1 else "",
        )  # fmt: skip
    try:
        probe(count)
    except CannotError as error:
        return Finding(topic, name, Status.LIMITED, error.message, _DIRECTLY)
    return Finding(topic, name, Status.OK, f"{count} ranks stored and added up through the switch")


def _granules(driver: Driver, infos: list[DeviceInfo]) -> Iterator[Finding]:
    """A line for each different answer."""
    said: dict[str, list[str]] = {}
    for info in infos:
        granules = driver.granularity(info.ordinal, settings().segment_size)
        parts = [
            f"allocation {show_bytes(granules.allocation_minimum)}, recommended "
            f"{show_bytes(granules.allocation_recommended)}"
        ]
        if granules.multicast_minimum:
            parts.append(
                f"multicast {show_bytes(granules.multicast_minimum)}, recommended "
                f"{show_bytes(granules.multicast_recommended)}"
            )
        text = f"{'; '.join(parts)}; pools use {show_bytes(granules.size)}"
        said.setdefault(text, []).append(str(info.ordinal))
    for text, devices in said.items():
        name = f"granules of device {', '.join(devices)}"
        yield Finding("multicast", name, Status.OK, text)
