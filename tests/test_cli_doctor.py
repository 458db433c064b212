"""``cupy-zc doctor``: each line, as it is on machines of every kind, and what it advises."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as real
import pytest
from click.testing import CliRunner
from doctor_parts import by_name, fake_gpus, looked, machine_at, put
from fake_bindings import FakeBindings

import cupy_zc
from cupy_zc.cli import doctor
from cupy_zc.cli.app import cli
from cupy_zc.cli.checks import (
    Devices,
    Finding,
    Status,
    look_at_machine,
    look_at_network,
    look_at_software,
    machine,
    software,
)
from cupy_zc.cli.output import Exit
from cupy_zc.driver import cuda_reports


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeBindings]:
    return fake_gpus(monkeypatch)


# Software


def test_versions_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: Any) -> None:
    gpus()
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
    put(tmp_path, "proc/driver/nvidia/version", text)
    lines = by_name(look_at_software(machine_at(tmp_path)))
    assert lines["NVIDIA kernel driver"].found == "580.95.05"
    assert lines["CUDA driver"].found == "CUDA 13.1"
    assert lines["cupy-zc"].found.startswith(cupy_zc.__version__)
    assert lines["MPI"].status is Status.OK
    assert "mpi4py 4" in lines["MPI"].found


def test_software_that_is_not_there_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: Any
) -> None:
    fake = gpus()
    fake.fail["cuDriverGetVersion"] = [real.CUresult.CUDA_ERROR_NOT_INITIALIZED]

    def fails() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(software.nvrtc, "getVersion", fails)  # type: ignore[attr-defined]
    monkeypatch.setattr(software.runtime, "runtimeGetVersion", fails)  # type: ignore[attr-defined]
    monkeypatch.setattr(software, "installed", lambda name: None)
    lines = by_name(look_at_software(machine_at(tmp_path)))
    missing = [name for name, line in lines.items() if line.status is Status.MISSING]
    assert missing == ["NVIDIA kernel driver", "CUDA driver", "CuPy", "NVRTC"]
    assert lines["CUDA driver"].found == "cuDriverGetVersion gave CUDA_ERROR_NOT_INITIALIZED"
    assert "libnvrtc.so.13" in lines["NVRTC"].found
    assert lines["MPI"].found == "mpi4py is not installed"
    assert lines["MPI"].status is Status.LIMITED


def test_what_is_not_installed_has_no_version() -> None:
    assert software.installed("no-such-distribution") is None
    assert software.installed("numpy") is not None


@pytest.mark.parametrize(
    ("nccl", "status", "words"),
    [
        (SimpleNamespace(get_version=lambda: 22809), Status.OK, "2.28.9, nccl4py "),
        (SimpleNamespace(), Status.LIMITED, "CuPy did not load it"),
    ],
)
def test_nccl_is_asked_through_cupy(
    nccl: Any, status: Status, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cupy.cuda.nccl", nccl, raising=False)
    line = software._nccl()
    assert line.status is status
    assert line.found.startswith(words)


@pytest.mark.parametrize("error", [OSError("no fork"), subprocess.TimeoutExpired("mpi4py", 30)])
def test_an_mpi_that_does_not_answer_is_limited(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(software.subprocess, "run", fails)  # type: ignore[attr-defined]
    line = software._mpi()
    assert line.status is Status.LIMITED
    assert "cannot load its MPI" in line.found


def test_an_mpi_without_a_launcher_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "mpiexec", lambda: None)
    assert software._mpi().found.endswith("but mpiexec is not in PATH")


# The machine


def test_a_roomy_machine_is_ok(tmp_path: Path) -> None:
    put(tmp_path, "dev/nvidia-caps-imex-channels/channel0")
    put(tmp_path, "dev/shm/x")
    put(tmp_path, "proc/self/status", "Name:\tx\nSeccomp:\t0\n")
    lines = by_name(look_at_machine(machine_at(tmp_path)))
    shm = lines.pop("/dev/shm")
    assert all(line.status is Status.OK for line in lines.values())
    assert lines["open files"].found.startswith("any number at a time")
    assert lines["IMEX channels"].found == "channel0"
    assert lines["isolation"].found == "no sign of a container, seccomp off"
    assert " free" in shm.found


def test_a_tight_machine_says_what_to_raise(tmp_path: Path) -> None:
    limits = {resource.RLIMIT_NOFILE: 256, resource.RLIMIT_AS: 1 << 30}
    put(tmp_path, ".dockerenv")
    put(tmp_path, "proc/self/status", "Seccomp:\t2\n")
    lines = by_name(look_at_machine(machine_at(tmp_path, limits)))
    assert (lines["open files"].status, lines["open files"].remedy) == (
        Status.LIMITED, "ulimit -n 4096",
    )  # fmt: skip
    assert (lines["addresses"].status, lines["addresses"].found) == (
        Status.MISSING, "limited to 1 GiB",
    )  # fmt: skip
    assert lines["/dev/shm"].found == "not there: No such file or directory"
    assert lines["isolation"].found == "a container, seccomp a filter"
    assert "different nodes" in lines["isolation"].means
    assert lines["IMEX channels"].status is Status.LIMITED


def test_a_small_dev_shm_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SimpleNamespace(f_blocks=1 << 14, f_bavail=1 << 13, f_frsize=4096)
    monkeypatch.setattr(machine.os, "statvfs", lambda path: small)  # type: ignore[attr-defined]
    line = by_name(look_at_machine(machine_at(tmp_path)))["/dev/shm"]
    assert (line.status, line.found) == (Status.LIMITED, "64 MiB, 32 MiB free")


@pytest.mark.parametrize("call", ["memfd_create", "socketpair", "send_fds"])
def test_a_seccomp_filter_that_forbids_sharing_is_found_and_nothing_leaks(
    call: str, monkeypatch: pytest.MonkeyPatch, resources: Any
) -> None:
    def refuse(*arguments: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    place: Any = os if call == "memfd_create" else machine.socket  # type: ignore[attr-defined]
    monkeypatch.setattr(place, call, refuse)
    line = machine._descriptors()
    assert line.status is Status.MISSING
    assert "Operation not permitted" in line.found
    assert "seccomp" in line.remedy


def test_files_that_may_not_be_read_are_no_error(tmp_path: Path) -> None:
    here = machine_at(tmp_path)
    assert here.read("no/such/file") == ""
    assert here.entries("no/such/folder") == []


# The network


def test_an_adapter_and_the_plug_in_are_found(tmp_path: Path) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1"
    put(tmp_path, f"{port}/state", "4: ACTIVE\n")
    put(tmp_path, f"{port}/rate", "400 Gb/sec (4X NDR)\n")
    put(tmp_path, "sys/module/nvidia_peermem/version")
    put(tmp_path, "opt/own/libnccl-net.so")
    put(tmp_path, "opt/mellanox/sharp/lib/libsharp_coll.so")
    given = {"LD_LIBRARY_PATH": ":/opt/own", "NCCL_COLLNET_ENABLE": "1"}
    lines = by_name(look_at_network(machine_at(tmp_path, None, **given)))
    assert all(line.status is Status.OK for line in lines.values())
    assert lines["InfiniBand or RoCE"].found == "mlx5_0 port 1: 400 Gb/sec (4X NDR), ACTIVE"
    assert lines["SHARP plug-in of NCCL"].found == "/opt/mellanox/sharp/lib/libsharp_coll.so"
    off = by_name(look_at_network(machine_at(tmp_path, LD_LIBRARY_PATH="/opt/own")))
    assert off["SHARP plug-in of NCCL"].remedy == "export NCCL_COLLNET_ENABLE=1"


def test_an_adapter_whose_ports_are_down_is_limited(tmp_path: Path) -> None:
    put(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    lines = by_name(look_at_network(machine_at(tmp_path, {resource.RLIMIT_MEMLOCK: 65536})))
    assert lines["InfiniBand or RoCE"].means == "no port is up"
    assert lines["GPUDirect RDMA"].status is Status.LIMITED
    assert lines["locked memory"].found == "65,536 bytes"


def test_a_machine_without_a_network_is_limited_and_not_more(tmp_path: Path) -> None:
    lines = by_name(look_at_network(machine_at(tmp_path)))
    assert {line.status for line in lines.values()} == {Status.LIMITED}
    assert lines["SHARP plug-in of NCCL"].found == "libnccl-net.so was not found"


# The command


def shown(monkeypatch: pytest.MonkeyPatch, found: Devices) -> Callable[[list[str]], Any]:
    """Let the command find these devices, and nothing else."""
    monkeypatch.setattr(doctor, "look_at_devices", lambda probe: found)
    for name in ("look_at_software", "look_at_machine", "look_at_network"):
        monkeypatch.setattr(doctor, name, lambda machine: ())
    return lambda words: CliRunner().invoke(cli, ["doctor", *words])


def test_good_gpus_are_shown_with_their_links(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(3)
    found, _ = looked()
    result = shown(monkeypatch, found)([])
    assert result.exit_code == Exit.OK
    assert "Zero-copy between GPUs works here." in result.output
    assert "  OK      P2P: all 3 GPUs have access to each other" in result.output
    assert "Fake H200" in result.output
    (row,) = [line for line in result.output.splitlines() if line.split()[:2] == ["0", "-"]]
    assert row.split() == ["0", "-", "P2P", "P2P"]


def test_links_of_every_kind_have_a_cell(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    found, _ = looked()
    no = cuda_reports.Reach(access=False, atomics=False, rank=1)
    slow = cuda_reports.Reach(access=True, atomics=False, rank=1)
    matrix = ((None, no, slow), (None, None, no), (no, no, None))
    output = shown(monkeypatch, Devices(found.findings, found.table, matrix))([]).output
    assert "P2P, no atomics" in output
    assert [line.split() for line in output.splitlines() if line.startswith(" 1 ")][-1] == [
        "1", "?", "-", "no",
    ]  # fmt: skip


def test_a_missing_line_says_what_it_means_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Finding("limits", "addresses", Status.MISSING, "few", "no room", "ulimit -v unlimited")
    result = shown(monkeypatch, Devices((bad,)))([])
    assert result.exit_code == Exit.FINDING
    assert "  missing addresses: few\n" in result.output
    assert "means: no room\n" in result.output
    assert "do:    ulimit -v unlimited\n" in result.output
    assert "No zero-copy between GPUs here. Missing: addresses." in result.output


def test_json_has_the_same_facts(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    found, _ = looked()
    result = shown(monkeypatch, found)(["--json"])
    said = json.loads(result.stdout)
    assert [each["name"] for each in said["findings"]] == [each.name for each in found.findings]
    assert said["findings"][0]["status"] == "OK"
    assert said["peers"][0] == [None, {"access": True, "atomics": True, "rank": 0}]
    assert said["devices"][0]["posix_fd"] is True


def test_this_machine_is_looked_at_as_it_is() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    said = json.loads(result.stdout)
    missing = [each for each in said["findings"] if each["status"] == "missing"]
    assert result.exit_code == (Exit.FINDING if missing else Exit.OK)
    assert {"software", "GPUs", "limits", "container", "network"} <= {
        each["topic"] for each in said["findings"]
    }
    for each in said["findings"]:
        assert each["found"]
        assert each["status"] == "OK" or each["means"]
