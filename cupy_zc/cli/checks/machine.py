"""Limits of the process, and what a container takes away."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

from ...memory.snapshot import show_bytes
from .finding import Finding, Machine, Status

__all__ = ["look_at_machine"]

#: Descriptors below which a large pool on several ranks can run out of them.
ENOUGH_FILES = 4096
#: Bytes of /dev/shm that NCCL and PyTorch are content with.
ENOUGH_SHM = 1 << 30
_SECCOMP = {"0": "off", "1": "strict", "2": "a filter"}


def look_at_machine(machine: Machine) -> Iterator[Finding]:
    """Limits, then the container."""
    yield _open_files(machine)
    yield _addresses(machine)
    yield _descriptors()
    yield _shared_memory(machine)
    yield _container(machine)
    yield _imex(machine)


def _open_files(machine: Machine) -> Finding:
    soft, hard = machine.limit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} at a time, of {_limit(hard)} that may be allowed"
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        return Finding("limits", "open files", Status.OK, found)
    return Finding(
        "limits", "open files", Status.LIMITED, found,
        "ranks exchange their segments as descriptors, and the host driver keeps one a segment",
        f"ulimit -n {ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)}",
    )  # fmt: skip


def _addresses(machine: Machine) -> Finding:
    soft, _ = machine.limit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return Finding("limits", "addresses", Status.OK, "unlimited")
    return Finding(
        "limits", "addresses", Status.MISSING, f"limited to {show_bytes(soft)}",
        "a pool reserves twice the memory of its GPU, and as much again for each peer",
        "ulimit -v unlimited",
    )  # fmt: skip


def _descriptors() -> Finding:
    """Memory goes from process to process as a descriptor over a socket; do just that."""
    name, means = "memory by descriptor", "ranks cannot share memory, on GPUs or without"
    try:
        fd = os.memfd_create("cupy-zc doctor", os.MFD_CLOEXEC)
        try:
            left, right = socket.socketpair(socket.AF_UNIX)
            with left, right:
                socket.send_fds(left, [b"x"], [fd])
                _, received, _, _ = socket.recv_fds(right, 1, 1)
                for each in received:
                    os.close(each)
        finally:
            os.close(fd)
    except OSError as error:
        remedy = "allow memfd_create, sendmsg and recvmsg in the container's seccomp profile"
        return Finding("container", name, Status.MISSING, f"refused: {error}", means, remedy)
    return Finding("container", name, Status.OK, "sent and received over a socket")


def _shared_memory(machine: Machine) -> Finding:
    name = "/dev/shm"
    means = "cupy-zc does not use it; NCCL and PyTorch in the same process do"
    remedy = "docker: --shm-size=1g, or --ipc=host"
    try:
        about = os.statvfs(machine.path("dev/shm"))
    except OSError as error:
        found = f"not there: {error.strerror}"
        return Finding("container", name, Status.LIMITED, found, means, remedy)
    size, free = about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize
    found = f"{show_bytes(size)}, {show_bytes(free)} free"
    if size >= ENOUGH_SHM:
        return Finding("container", name, Status.OK, found)
    return Finding("container", name, Status.LIMITED, found, means, remedy)


def _container(machine: Machine) -> Finding:
    signs = [name for name in (".dockerenv", "run/.containerenv") if machine.path(name).exists()]
    lines = machine.read("proc/self/status").splitlines()
    mode = next((line.split()[1] for line in lines if line.startswith("Seccomp:")), "")
    found = f"{'a container' if signs else 'no sign of a container'}"
    found += f", seccomp {_SECCOMP.get(mode, 'unknown')}"
    means = ""
    if signs:
        means = (
            "ranks in different containers are different nodes, unless they share the network, "
            "IPC and PID namespaces"
        )
    return Finding("container", "isolation", Status.OK, found, means)


def _imex(machine: Machine) -> Finding:
    channels = machine.entries("dev/nvidia-caps-imex-channels")
    if channels:
        return Finding("container", "IMEX channels", Status.OK, ", ".join(channels))
    return Finding(
        "container", "IMEX channels", Status.LIMITED, "none",
        "memory cannot go to other machines over NVLink; on one machine nothing is lost",
        "only where NVLink joins machines: start nvidia-imex, and give the container a channel",
    )  # fmt: skip


def _limit(value: int) -> str:
    return "any number" if value == resource.RLIM_INFINITY else f"{value:,}"
