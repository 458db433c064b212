"""``cupy-zc doctor`` on machines with GPUs of every kind, without any, and its self-test."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as real
import pytest
from click.testing import CliRunner
from doctor_parts import by_name, fake_gpus, looked
from fake_bindings import FakeBindings

import cupy_zc
from cupy_zc.cli import doctor
from cupy_zc.cli.app import cli
from cupy_zc.cli.checks import (
    Devices,
    Finding,
    Status,
    devices,
    peers,
    switch,
)
from cupy_zc.cli.checks.peers import Measured, measure, pass_a_sum
from cupy_zc.cli.output import CannotError

REFUSED = real.CUresult.CUDA_ERROR_NOT_PERMITTED


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeBindings]:
    return fake_gpus(monkeypatch)


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "multicast_refusal", lambda: None)


def test_multicast_is_tried_where_that_is_asked_for(gpus: Any, unguarded: None) -> None:
    fake, tried = gpus(4), list[int]()
    found, _ = looked(probe=tried.append)
    line = by_name(found.findings)["probe"]
    assert (line.status, tried) == (Status.OK, [4])
    assert line.found == "4 ranks stored and added up through the switch"
    assert fake.handles == set()


def test_what_the_driver_says_of_multicast_is_in_the_report(gpus: Any, unguarded: None) -> None:
    def refuse(ranks: int) -> None:
        raise CannotError("multicast could not be tested: CUDA_ERROR_NOT_SUPPORTED (801)")

    gpus(2)
    line = by_name(looked(probe=refuse)[0].findings)["probe"]
    assert line.status is Status.LIMITED
    assert "CUDA_ERROR_NOT_SUPPORTED" in line.found


def test_multicast_is_not_tried_on_one_gpu_nor_where_a_switch_forbids_it(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, unguarded: None
) -> None:
    tried: list[int] = []
    gpus(1)
    assert "there is one GPU" in by_name(looked(probe=tried.append)[0].findings)["probe"].found
    gpus(2)
    monkeypatch.setattr(devices, "multicast_refusal", lambda: "NCCL_NVLS_ENABLE=0")
    assert "probe" not in by_name(looked(probe=tried.append)[0].findings)
    assert tried == []


def test_the_command_tries_multicast_with_its_flag_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(doctor, "look_at_devices", lambda probe: given.append(probe) or Devices(()))
    for words in ([], ["--multicast"]):
        CliRunner().invoke(cli, ["doctor", *words])
    assert given == [None, switch.probe]


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


@pytest.mark.gpu
def test_a_real_gpu_is_ok_and_no_multicast_object_is_made() -> None:
    driver = cupy_zc.MemoryPool(driver="cuda").driver
    before = driver.multicast_objects_created
    found, _ = looked()
    lines = by_name(found.findings)
    assert lines["memory of device 0"].status is Status.OK
    assert len(found.table) == driver.device_count()
    assert found.table[0]["total"] > found.table[0]["free"] > 0
    assert driver.multicast_objects_created == before


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


@pytest.mark.parametrize("call", ["cuDeviceGetName", "cuMemGetInfo", "cuMulticastGetGranularity"])
def test_a_device_that_does_not_answer_is_missing_and_the_others_are_shown(
    gpus: Any, call: str
) -> None:
    """Ends: one broken GPU made the whole report an error message."""
    fake = gpus(2)
    fake.fail[call] = [real.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE]
    found, _ = looked()
    lines = by_name(found.findings)
    assert lines["device 0"].status is Status.MISSING
    assert "CUDA_ERROR_ECC_UNCORRECTABLE" in lines["device 0"].found
    assert lines["memory of device 1"].status is Status.OK
    assert [row["device"] for row in found.table] == [1]
    assert not any(finding.topic == "multicast" for finding in look_alone(gpus, call))


def look_alone(gpus: Any, call: str) -> tuple[Finding, ...]:
    """What is found of the only GPU, which does not answer a call."""
    fake = gpus(1)
    fake.fail[call] = [real.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE] * 2
    return looked()[0].findings


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
