"""The network between machines: adapters, and NCCL's plug-in for SHARP in the switches."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from .finding import Finding, Machine, Status

__all__ = ["look_at_network"]

_TOPIC = "network"
_ADAPTERS = "sys/class/infiniband"
_FOLDERS = (
    "usr/lib",
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/local/lib",
    "opt/mellanox/sharp/lib",
    "opt/hpcx/sharp/lib",
    "opt/hpcx/nccl_rdma_sharp_plugin/lib",
)
_ONE_MACHINE = "nothing for ranks on one machine"


def look_at_network(machine: Machine) -> Iterator[Finding]:
    """All of it matters to ranks on several machines only."""
    adapters = machine.entries(_ADAPTERS)
    yield _adapters(machine, adapters)
    if adapters:
        yield _peer_memory(machine)
        yield _locked_memory(machine)
    yield _sharp(machine)


def _adapters(machine: Machine, names: list[str]) -> Finding:
    if not names:
        return Finding(
            _TOPIC, "InfiniBand or RoCE", Status.LIMITED, "no adapter", _ONE_MACHINE,
            "in a container, give it /dev/infiniband; several machines go over TCP without it",
        )  # fmt: skip
    ports, down = [], []
    for name in names:
        for port in machine.entries(f"{_ADAPTERS}/{name}/ports"):
            folder = f"{_ADAPTERS}/{name}/ports/{port}"
            state = machine.read(f"{folder}/state").partition(":")[2].strip() or "unknown"
            rate = machine.read(f"{folder}/rate").strip() or "unknown rate"
            ports.append(f"{name} port {port}: {rate}, {state}")
            down += [] if state == "ACTIVE" else [name]
    found = "; ".join(ports) or ", ".join(names)
    if ports and len(down) == len(ports):
        remedy = "look at the cables and at ibstat"
        return Finding(_TOPIC, "InfiniBand or RoCE", Status.LIMITED, found, "no port is up", remedy)
    return Finding(_TOPIC, "InfiniBand or RoCE", Status.OK, found)


def _peer_memory(machine: Machine) -> Finding:
    name = "GPUDirect RDMA"
    if machine.path("sys/module/nvidia_peermem").exists():
        return Finding(_TOPIC, name, Status.OK, "nvidia_peermem is loaded")
    return Finding(
        _TOPIC, name, Status.LIMITED, "nvidia_peermem is not loaded",
        "adapters read GPU memory only where the kernel and the driver support DMA-BUF",
        "modprobe nvidia_peermem, where NCCL says that it copies through the host",
    )  # fmt: skip


def _locked_memory(machine: Machine) -> Finding:
    soft, _ = machine.limit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(_TOPIC, "locked memory", Status.OK, "unlimited")
    return Finding(
        _TOPIC, "locked memory", Status.LIMITED, f"{soft:,} bytes",
        "an adapter locks the memory that it reads", "ulimit -l unlimited",
    )  # fmt: skip


def _sharp(machine: Machine) -> Finding:
    name = "SHARP plug-in of NCCL"
    given = machine.environment.get("LD_LIBRARY_PATH", "").split(":")
    folders = [folder.lstrip("/") for folder in given if folder] + list(_FOLDERS)
    for wanted in ("libnccl-net.so", "libsharp_coll.so"):
        found = [f"/{f}/{wanted}" for f in folders if machine.path(f"{f}/{wanted}").exists()]
        if not found:
            return Finding(
                _TOPIC, name, Status.LIMITED, f"{wanted} was not found",
                f"InfiniBand switches do not add up for NCCL; {_ONE_MACHINE}",
                "install HPC-X (nccl_rdma_sharp_plugin) and name its folders in LD_LIBRARY_PATH",
            )  # fmt: skip
        at = found[0]
    on = machine.environment.get("NCCL_COLLNET_ENABLE") == "1"
    if not on:
        return Finding(
            _TOPIC, name, Status.LIMITED, f"{at}, but NCCL_COLLNET_ENABLE is not 1",
            "NCCL does not use it", "export NCCL_COLLNET_ENABLE=1",
        )  # fmt: skip
    return Finding(_TOPIC, name, Status.OK, at)
