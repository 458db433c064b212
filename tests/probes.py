"""What several tests of the host driver and of the pool use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from cupy_zc import DriverError
from cupy_zc.config import MULTICAST_GUARDS
from cupy_zc.driver.host_result import Result


class Work:
    """Work for a stream: notes its name when it runs, and can be watched by a weak reference."""

    def __init__(self, log: list[str], name: str = "x") -> None:
        self.log, self.name = log, name

    def __call__(self) -> None:
        self.log.append(self.name)


def refused(call: str, result: Result, cause: str = "") -> Any:
    """Expects that ``call`` gives ``result``, with a cause that says ``cause``."""
    text = f"CUDA_ERROR_{result.name} ({result.value}): "
    return pytest.raises(
        DriverError, match=rf"^{call}\(.*{re.escape(text)}(?=\w).*{re.escape(cause)}"
    )


def run(
    code: str,
    *arguments: object,
    pass_fds: tuple[int, ...] = (),
    environment: dict[str, str] | None = None,
) -> str:
    """What a process wrote that runs ``code`` with warnings as errors; it must succeed."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        env=os.environ if environment is None else environment,
        pass_fds=pass_fds,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout.strip()


def clean_environment() -> dict[str, str]:
    """The present environment without what switches multicast off, and without GPUs."""
    switches = {"CUPY_ZC_MULTICAST", *MULTICAST_GUARDS}
    kept = {name: value for name, value in os.environ.items() if name not in switches}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "CUPY_ZC_DRIVER": "host"}


def wait_for_release(pool, settled):
    """The driver tells of a graph's end a moment after it."""
    done = threading.Event()
    for _ in range(200):
        pool.free_all_blocks()
        if settled():
            return
        done.wait(0.005)
    raise AssertionError("the memory of the graph never came back")
