"""Collectives between real processes: started by mpiexec, or spawned with a TCP store."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import collective_processes as processes
import group_workers as workers
import pytest

import cupy_zc
from cupy_zc import Communicator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no NCCL here
    import cupyx.distributed
    from cupyx.distributed import NCCLBackend

ROOT = Path(__file__).parents[1]


def spawned(n: int, target: Any, *args: Any, killed: tuple[int, ...] = ()) -> list[Any]:
    port = workers.free_port()
    reports = workers.in_processes("spawn", n, target, port, *args, killed=killed)
    for report in reports:
        assert report is None or report[0] == "value", report
    return [None if report is None else report[1] for report in reports]


def test_ranks_of_mpi_do_everything_and_send_nothing_by_mpi_after_set_up(tmp_path: Path) -> None:
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    command = [mpiexec, "-n", "4", sys.executable, "-W", "error", processes.__file__, str(tmp_path)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUPY_ZC_DRIVER": "host"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["bytes"] == 0
        assert len(told["split"]) == 1
        assert told["split"][0] < 4096  # colors, keys, and addresses of sockets
        assert told["zero_copy"][-1]
        assert told["order"]
        assert told["first"] == 0
        assert "each another rank" in told["refused"]


@pytest.mark.parametrize("register", ["auto", "manual"])
def test_ranks_of_a_tcp_store_do_everything(register: str) -> None:
    for told in spawned(4, processes.everything_over_tcp, register):
        assert told["zero_copy"][-1] == (register == "auto")
        assert register == "auto" or not any(told["zero_copy"])


def test_an_unchanged_script_runs_after_its_first_line_was_changed() -> None:
    for rank, told in enumerate(spawned(4, processes.unchanged_script)):
        assert told["sums"] == [10.0, 10.0]
        assert told["rows"] == [400 * rank] * 2
        assert told["operation"] == "send_recv"
        assert told["zero_copy"]


def test_the_script_fits_the_signatures_of_both_libraries() -> None:
    called = set()
    for node in ast.walk(ast.parse(processes.SCRIPT)):
        if not isinstance(node, ast.Call):
            continue
        arguments = [None] * len(node.args)
        named = {str(keyword.arg): None for keyword in node.keywords}
        if isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "comm":
            called.add(node.func.attr)
            for kind in (Communicator, NCCLBackend):
                inspect.signature(getattr(kind, node.func.attr)).bind(None, *arguments, **named)
        elif isinstance(node.func, ast.Name) and node.func.id == "init_process_group":
            for library in (cupy_zc, cupyx.distributed):
                inspect.signature(library.init_process_group).bind(*arguments, **named)
    public = {name for name in vars(NCCLBackend) if not name.startswith("_")} | {"stop"}
    assert called == public


@pytest.mark.parametrize("where", ["collective", "before", "message"])
def test_a_rank_that_is_killed_is_named_at_once_on_all_others(where: str) -> None:
    began = time.monotonic()
    reports = spawned(4, processes.be_killed, 2, where, killed=(2,))
    for rank, told in enumerate(reports):
        if rank != 2:
            assert told["ranks"] == (2,)
            assert told["seconds"] < 5
    assert time.monotonic() - began < 25


def test_processes_that_differ_all_get_the_same_mismatch_and_go_on() -> None:
    reports = spawned(3, processes.differ)
    assert reports[0] == reports[1] == reports[2]
    assert len(reports[0]) == 12
    assert all("nothing was written" in text for text in reports[0])
    assert "rank 0 is at reduce(count=99" in reports[0][0]
    assert "rank 2 is at reduce(count=100, dtype=float32, op='sum', root=1)" in reports[0][-1]


def _python(code: str) -> float:
    """Seconds until a process that runs ``code`` has ended well."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUPY_ZC_DRIVER": "host"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return time.monotonic() - began


def test_a_process_ends_while_a_thread_of_it_still_waits_for_other_ranks() -> None:
    took = _python(
        """
        import contextlib, threading, time, cupy_zc
        comms = cupy_zc.Communicator.in_process(2)
        def wait():
            with contextlib.suppress(cupy_zc.PeerTimeoutError):
                comms[0].barrier()
        threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.3)
        """
    )
    assert took < 30


def test_a_forked_child_has_no_communicator_and_ends_at_once() -> None:
    _python(
        """
        import os, cupy_zc
        comm, = cupy_zc.Communicator.in_process(1)
        array = comm.empty(4)
        pid = os.fork()
        if pid == 0:
            try:
                comm.all_reduce(array, array)
            except cupy_zc.ClosedError as error:
                assert "parent of this process" in str(error)
                comm.close()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        comm.all_reduce(array, array)
        """
    )
