"""``cupy-zc doctor``: each line, as it is on machines of every kind, and what it advises."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as real
import pytest
from click.testing import CliRunner
from fake_bindings import FakeBindings, cuda_driver

import cupy_zc
from cupy_zc.cli import doctor
from cupy_zc.cli.app import cli
from cupy_zc.cli.checks import (
    Devices,
    Finding,
    Machine,
    Status,
    devices,
    look_at_devices,
    look_at_machine,
    look_at_network,
    look_at_software,
    machine,
    peers,
    software,
)
from cupy_zc.cli.checks.peers import Measured, measure, pass_a_sum
from cupy_zc.cli.output import Exit
from cupy_zc.driver import cuda_reports

ALL = ("POSIX_FILE", "FABRIC", "RDMA", "MULTICAST")
GOOD = Measured(True, "all is well")
INFINITE = resource.RLIM_INFINITY
REFUSED = real.CUresult.CUDA_ERROR_NOT_PERMITTED


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def machine_at(root: Path, limits: dict[int, int] | None = None, **environment: str) -> Machine:
    known = limits or {}

    def limit(which: int) -> tuple[int, int]:
        return known.get(which, INFINITE), INFINITE

    return Machine(root, environment, limit)


def put(root: Path, name: str, text: str = "") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


# GPUs


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeBindings]:
    """``gpus(count, abilities)``: let the machine have fake GPUs."""

    def have(count: int = 2, abilities: tuple[str, ...] = ALL) -> FakeBindings:
        fake = FakeBindings(count, abilities=abilities)
        driver = cuda_driver(monkeypatch, fake)
        monkeypatch.setattr(devices, "select", lambda name: driver)
        return fake

    return have


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "multicast_refusal", lambda: None)


def looked(measured: Measured = GOOD) -> tuple[Devices, list[tuple[str, int]]]:
    """What is found of the devices, and which self-tests were asked for."""
    asked: list[tuple[str, int]] = []

    def test(driver: str, ranks: int) -> Measured:
        asked.append((driver, ranks))
        return measured

    return look_at_devices(test), asked


def test_two_good_gpus_are_ok_in_every_line_but_the_probe(gpus: Any, unguarded: None) -> None:
    fake = gpus()
    found, asked = looked()
    lines = by_name(found.findings)
    assert {n for n, f in lines.items() if f.status is not Status.OK} == {"probe"}
    assert "creates no multicast object" in lines["probe"].found
    assert asked == [("cuda", 2)]
    assert "exported as posix_fd, fabric" in lines["memory of device 1"].found
    assert "multicast 2 MiB, recommended 2 MiB; pools use 2 MiB" in (
        lines["granules of device 0, 1"].found
    )
    assert [row["name"] for row in found.table] == ["Fake H200"] * 2
    assert found.table[1]["uuid"] == "01" * 16
    assert found.table[0]["capability"] == "0.0"
    way = found.matrix[0][1]
    assert way is not None
    assert (way.access, way.atomics, way.rank) == (True, True, 0)
    assert found.matrix[0][0] is None
    assert fake.handles == set()


def test_no_multicast_object_is_made_bound_or_joined(gpus: Any, unguarded: None) -> None:
    """The one thing this command must never do."""
    fake = gpus(8)
    looked()
    made = ("cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem")
    assert [fake.called(name) for name in made] == [0, 0, 0]


def test_the_switch_that_turns_multicast_off_is_named(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus()
    monkeypatch.setattr(devices, "multicast_refusal", lambda: "NCCL_NVLS_ENABLE=0")
    lines = by_name(looked()[0].findings)
    assert lines["guard"].status is Status.LIMITED
    assert lines["guard"].found == "off by NCCL_NVLS_ENABLE=0"
    assert "probe" not in lines


def test_devices_that_lack_something_are_limited(gpus: Any, unguarded: None) -> None:
    gpus(2, ("POSIX_FILE",))
    lines = by_name(looked()[0].findings)
    for name in ("FABRIC of device 0", "RDMA of device 1", "attribute"):
        assert lines[name].status is Status.LIMITED
    assert lines["attribute"].found == "device 0, 1 does not have it"
    assert "multicast" not in lines["granules of device 0, 1"].found
    assert "probe" not in lines


def test_a_fabric_handle_that_the_driver_refuses_points_to_imex(gpus: Any, unguarded: None) -> None:
    fake = gpus(1)
    fake.fail["cuMemCreate"] = [REFUSED]
    line = by_name(looked()[0].findings)["FABRIC of device 0"]
    assert (line.status, line.remedy) == (Status.LIMITED, "see the line on IMEX channels")


def test_memory_that_cannot_be_shared_is_missing(gpus: Any) -> None:
    gpus(1, ("MULTICAST",))
    line = by_name(looked()[0].findings)["memory of device 0"]
    assert line.status is Status.MISSING
    assert "vGPU" in line.remedy


def test_memory_that_cannot_be_made_is_missing_with_the_drivers_words(gpus: Any) -> None:
    fake = gpus(1, ("POSIX_FILE",))
    fake.fail["cuMemCreate"] = [real.CUresult.CUDA_ERROR_OUT_OF_MEMORY]
    line = by_name(looked()[0].findings)["memory of device 0"]
    assert line.status is Status.MISSING
    assert "CUDA_ERROR_OUT_OF_MEMORY" in line.found
    assert fake.handles == set()


def test_a_segment_that_cannot_be_exported_is_given_back(gpus: Any) -> None:
    fake = gpus(1, ("POSIX_FILE",))
    fake.fail["cuMemExportToShareableHandle"] = [REFUSED]
    assert by_name(looked()[0].findings)["memory of device 0"].status is Status.MISSING
    assert fake.handles == set()


def test_one_gpu_has_no_links_to_measure(gpus: Any) -> None:
    gpus(1)
    found, asked = looked()
    line = by_name(found.findings)["links"]
    assert line.status is Status.LIMITED
    assert line.found.startswith("not measured")
    assert asked == []


def test_gpus_that_do_not_reach_each_other_are_named_and_not_tested(gpus: Any) -> None:
    fake = gpus(3)
    fake.apart = {(0, 2), (2, 1)}
    found, asked = looked()
    line = by_name(found.findings)["P2P"]
    assert (line.status, line.found) == (Status.MISSING, "no access from GPU 0 to 2, 2 to 1")
    assert asked == []


def test_a_link_the_driver_says_nothing_about_is_still_tested(gpus: Any) -> None:
    fake = gpus(2)
    fake.fail["cuDeviceCanAccessPeer"] = [real.CUresult.CUDA_ERROR_INVALID_DEVICE]
    found, asked = looked()
    lines = by_name(found.findings)
    assert lines["links"].status is Status.LIMITED
    assert "CUDA_ERROR_INVALID_DEVICE" in lines["links"].found
    assert "P2P" not in lines
    assert asked == [("cuda", 2)]
    assert found.matrix[0][1] is None


def test_a_self_test_that_fails_is_missing(gpus: Any) -> None:
    gpus(2)
    found, _ = looked(Measured(False, "rank 1 reads 3 words wrong"))
    line = by_name(found.findings)["self-test"]
    assert (line.status, line.found) == (Status.MISSING, "rank 1 reads 3 words wrong")


def test_a_setting_that_hides_the_gpus_is_said(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    hidden = SimpleNamespace(driver="host", segment_size=64 << 20)
    monkeypatch.setattr(devices, "settings", lambda: hidden)
    assert by_name(looked()[0].findings)["driver setting"].found == "CUPY_ZC_DRIVER=host"


@pytest.mark.parametrize("passed", [True, False])
def test_without_a_gpu_the_host_driver_is_tested(
    passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(name: str) -> None:
        raise cupy_zc.DriverError("cuInit", "CUDA_ERROR_NO_DEVICE", 100, cause="plug one in")

    monkeypatch.setattr(devices, "select", none)
    found, asked = looked(Measured(passed, "words"))
    lines = by_name(found.findings)
    assert lines["GPUs"].status is Status.MISSING
    assert lines["GPUs"].found == "cuInit gave CUDA_ERROR_NO_DEVICE"
    assert lines["GPUs"].remedy == "plug one in"
    assert asked == [("host", 2)]
    assert (lines["self-test on the host"].status is Status.OK) is passed


# The self-test


def test_the_self_test_on_the_host_passes_in_a_process_without_multicast() -> None:
    measured = measure("host", 3)
    assert measured.passed, measured.words
    assert measured.words.startswith("3 ranks added up right")


@pytest.mark.multi_gpu
def test_the_self_test_on_gpus_passes() -> None:
    measured = measure("cuda", 2)
    assert measured.passed, measured.words


def replaced(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the self-test's process run ``code``."""
    run = subprocess.run

    def instead(command: list[str], **settings: Any) -> Any:
        assert settings["env"]["CUPY_ZC_MULTICAST"] == "off"
        return run([sys.executable, "-c", code], **settings)

    monkeypatch.setattr(peers.subprocess, "run", instead)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; print('note'); os._exit(5)", "ended with exit code 5: "),
        ("import sys; print('[]'); sys.exit('it broke')", "ended with exit code 1: it broke"),
        ("import time; time.sleep(60)", "did not end in 0.5 s"),
        ("""print('{"passed": false, "words": "rank 1"}')""", "rank 1"),
    ],
)
def test_a_self_test_that_dies_or_hangs_is_reported(
    code: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced(monkeypatch, code)
    assert measure("host", 2, patience=0.5 if "sleep" in code else 60.0) == Measured(False, words)


def test_a_wrong_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    comms = cupy_zc.Communicator.in_process(2, driver="host")
    with contextlib.ExitStack() as stack:
        for comm in comms:
            stack.enter_context(comm)
        pass_a_sum(comms, None)
        monkeypatch.setattr(peers, "copyto", lambda array, values: None)
        with pytest.raises(cupy_zc.Error, match=r"rank \d: [\d,]+ of 65,536 sums are wrong"):
            pass_a_sum(comms, None)


def test_a_communicator_that_cannot_be_made_is_a_failed_self_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers.main(["host", "0"])
    said = json.loads(capsys.readouterr().out)
    assert said["passed"] is False
    assert "expected" in said["words"]


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
    monkeypatch.setattr(doctor, "look_at_devices", lambda: found)
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
