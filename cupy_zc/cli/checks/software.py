"""Versions: the driver, CUDA, CuPy and what they need, NCCL, MPI."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata

import cupy
from cupy.cuda import nvrtc, runtime

from ... import __version__
from ...driver.cuda_reports import driver_version
from ...errors import DriverError
from ..examples import mpiexec
from .finding import Finding, Machine, Status

__all__ = ["look_at_software"]

_TOPIC = "software"
#: Seconds to wait for another program's answer about its version.
_PATIENCE = 30.0


def look_at_software(machine: Machine) -> Iterator[Finding]:
    """Each piece of software that matters, with its version."""
    about = f"{__version__}, Python {platform.python_version()}"
    yield Finding(_TOPIC, "cupy-zc", Status.OK, about)
    yield _kernel_driver(machine)
    yield _cuda_driver()
    yield _cupy()
    yield _nvrtc()
    yield _nccl()
    yield _mpi()


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def dotted(number: int) -> str:
    """A version as CUDA counts it: 13010 is 13.1."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _kernel_driver(machine: Machine) -> Finding:
    name = "NVIDIA kernel driver"
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", machine.read("proc/driver/nvidia/version"))
    if found:
        return Finding(_TOPIC, name, Status.OK, found[0])
    return Finding(
        _TOPIC, name, Status.MISSING, "not loaded: there is no /proc/driver/nvidia/version",
        "this system has no NVIDIA GPU, or does not show it",
        "install the NVIDIA driver; in a container, start it with the GPUs (docker: --gpus all)",
    )  # fmt: skip


def _cuda_driver() -> Finding:
    name = "CUDA driver"
    try:
        return Finding(_TOPIC, name, Status.OK, f"CUDA {driver_version()}")
    except DriverError as error:
        return Finding(
            _TOPIC, name, Status.MISSING, f"{error.call} gave {error.result}",
            "no GPU can be used; pools and communicators take the host driver",
            error.cause,
        )  # fmt: skip


def _cupy() -> Finding:
    bindings = installed("cuda-bindings") or "unknown"
    about = f"{cupy.__version__}, cuda-bindings {bindings}"
    try:
        about += f", built for CUDA {dotted(runtime.runtimeGetVersion())}"
    except (RuntimeError, OSError) as error:  # its own error classes are RuntimeErrors
        return Finding(
            _TOPIC, "CuPy", Status.MISSING, f"{about}; its CUDA runtime failed: {error}",
            "CuPy's own kernels cannot run", "reinstall the CuPy wheel of the CUDA you have",
        )  # fmt: skip
    return Finding(_TOPIC, "CuPy", Status.OK, about)


def _nvrtc() -> Finding:
    try:
        version = ".".join(map(str, nvrtc.getVersion()))
    except (RuntimeError, OSError) as error:
        return Finding(
            _TOPIC, "NVRTC", Status.MISSING, str(error).strip() or type(error).__name__,
            "the kernels of the collectives cannot be compiled",
            "pip install 'cupy-zc[cuda13]' (or [cuda12]), which brings it",
        )  # fmt: skip
    return Finding(_TOPIC, "NVRTC", Status.OK, version)


def _nccl() -> Finding:
    means = "ranks of one machine do not need it; ranks on several do"
    theirs = installed("nccl4py")
    with warnings.catch_warnings(record=True) as said:  # CuPy warns, and gives an empty module
        warnings.simplefilter("always")
        from cupy.cuda import nccl
    if hasattr(nccl, "get_version"):
        about = f"{dotted_nccl(int(nccl.get_version()))}, nccl4py {theirs or 'is not installed'}"
        return Finding(_TOPIC, "NCCL", Status.OK, about)
    reasons = [re.search(r"Reason: (.*)", str(warning.message)) for warning in said]
    found = next((reason[1] for reason in reasons if reason), "CuPy did not load it")
    remedy = "pip install nvidia-nccl-cu13 (or -cu12)"
    return Finding(_TOPIC, "NCCL", Status.LIMITED, found, means, remedy)


def dotted_nccl(number: int) -> str:
    """A version as NCCL counts it: 22809 is 2.28.9."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _mpi() -> Finding:
    version = installed("mpi4py")
    launcher = mpiexec()
    if version is None:
        return Finding(
            _TOPIC, "MPI", Status.LIMITED, "mpi4py is not installed",
            "ranks meet over TCP (init_process_group) or as threads (Communicator.in_process)",
            "pip install 'cupy-zc[mpi]', if you start your ranks with mpiexec",
        )  # fmt: skip
    # In a process of its own: importing mpi4py.MPI starts MPI, which has its own ideas of when.
    command = [sys.executable, "-m", "mpi4py", "--mpi-lib-version"]
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=True
        ).stdout
    except (subprocess.SubprocessError, OSError) as error:
        return Finding(
            _TOPIC, "MPI", Status.LIMITED, f"mpi4py {version} cannot load its MPI: {error}",
            "ranks cannot be started with mpiexec", "pip install 'cupy-zc[mpi]' brings an MPI",
        )  # fmt: skip
    library = " ".join(said.strip().partition("\n")[0].split()) or "unknown"
    about = f"mpi4py {version}, {library}"
    if launcher is None:
        return Finding(
            _TOPIC, "MPI", Status.LIMITED, f"{about}, but mpiexec is not in PATH",
            "ranks cannot be started with it here", "pip install 'cupy-zc[mpi]' brings one",
        )  # fmt: skip
    return Finding(_TOPIC, "MPI", Status.OK, f"{about}, {launcher}")
