"""NVTX ranges are around the calls where they were asked for, and nothing is wrapped elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import cupy_zc
from cupy_zc import ranges

CODE = """
import cupy.cuda, types
said = []
cupy.cuda.nvtx = types.SimpleNamespace(
    available=True, RangePush=lambda text: said.append(text), RangePop=lambda: said.append("pop")
)
import cupy_zc
(comm,) = cupy_zc.Communicator.in_process(1, driver="host")
with comm:
    array = comm.empty(4, "f4")
    for _ in range(3):
        comm.all_reduce(array, array)
print(said)
"""


def started(value: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE],
        env={**os.environ, "CUPY_ZC_NVTX": value},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_call_is_in_a_range_on_the_short_way_too() -> None:
    done = started("1")
    names = ["empty", *["all_reduce"] * 3, "close"]
    expected = [said for name in names for said in (f"cupy_zc.{name}", "pop")]
    assert done.stdout.strip() == str(expected), done.stderr


def test_nothing_is_wrapped_where_nobody_asked() -> None:
    assert started("0").stdout.strip() == "[]"
    for name in ranges.CALLS:
        assert not hasattr(getattr(cupy_zc.Communicator, name), "__wrapped__")


def test_another_value_is_refused_at_import() -> None:
    done = started("yes")
    assert "CUPY_ZC_NVTX='yes' is not allowed; expected 0 or 1" in done.stderr


def test_a_range_ends_with_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    nvtx = SimpleNamespace(
        available=True, RangePush=said.append, RangePop=lambda: said.append("pop")
    )
    monkeypatch.setattr("cupy.cuda.nvtx", nvtx)

    class Kind:
        def fails(self, value: int) -> Any:
            """Says why."""
            raise ValueError(value)

    assert ranges.wrap(Kind, ["fails"])
    assert Kind.fails.__doc__ == "Says why."
    with pytest.raises(ValueError, match="7"):
        Kind().fails(7)
    assert said == ["cupy_zc.fails", "pop"]


def test_a_cupy_without_nvtx_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cupy.cuda.nvtx", SimpleNamespace(available=False))
    assert not ranges.wrap(cupy_zc.Communicator)
    assert "CUPY_ZC_NVTX=1 has no effect" in caplog.text
