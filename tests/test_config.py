"""Settings are read once from one table; the multicast guard cannot be undone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import cupy_zc
from cupy_zc import config

GUARDS = {
    "CUPY_ZC_MULTICAST": "off",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def run(code: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in GUARDS}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean | environment,
        check=True,
    )
    return result.stdout.strip()


SHOW = """
    from cupy_zc.config import multicast_refusal, settings
    print(settings().multicast, multicast_refusal())
    """


def test_multicast_is_auto_where_nothing_forbids_it():
    assert run(SHOW) == "auto None"


@pytest.mark.parametrize(("name", "value"), GUARDS.items())
def test_each_guard_turns_multicast_off(name, value):
    assert run(SHOW, **{name: value}) == f"off {name}={value}"


@pytest.mark.parametrize(("name", "value"), GUARDS.items())
def test_a_program_cannot_undo_a_guard(name, value):
    remove = f"""
    import os
    del os.environ[{name!r}]
    os.environ["CUPY_ZC_MULTICAST"] = "auto"
    """
    assert run(remove + SHOW, **{name: value}) == f"off {name}={value}"


@pytest.mark.parametrize(("name", "value"), GUARDS.items())
def test_a_guard_set_late_counts_too_and_stays(name, value):
    code = f"""
    import os
    os.environ[{name!r}] = {value!r}
    import cupy_zc.config
    del os.environ[{name!r}]
    """
    assert run(code + SHOW) == f"off {name}={value}"


@pytest.mark.parametrize(("name", "value"), GUARDS.items())
def test_a_guard_set_after_the_settings_were_read_still_refuses(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert config.multicast_refusal() is not None


@pytest.mark.parametrize(
    ("name", "value"), [("NCCL_NVLS_ENABLE", "1"), ("NVSHMEM_DISABLE_NVLS", "0")]
)
def test_other_values_are_no_guard(name, value):
    assert run(SHOW, **{name: value}) == "auto None"


def test_without_proc_the_present_environment_decides(monkeypatch):
    def missing(self):
        raise OSError

    monkeypatch.setattr(Path, "read_bytes", missing)
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    config._started_with.cache_clear()
    try:
        assert config._started_with()["NVSHMEM_DISABLE_NVLS"] == "1"
    finally:
        config._started_with.cache_clear()


def test_settings_are_one_frozen_value_read_once(monkeypatch):
    before = cupy_zc.config.settings()
    monkeypatch.setenv("CUPY_ZC_SEGMENT_SIZE", "1G")
    assert cupy_zc.config.settings() is before
    with pytest.raises(AttributeError):
        before.timeout = 1.0


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("64M", 64 << 20), ("2 GiB", 2 << 30), ("3kb", 3 << 10), ("1T", 1 << 40)],
)
def test_sizes_may_have_units(text, size):
    assert config._read({"CUPY_ZC_SEGMENT_SIZE": text}).segment_size == size


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CUPY_ZC_DRIVER", "rocm"),
        ("CUPY_ZC_MULTICAST", "on"),
        ("CUPY_ZC_SEGMENT_SIZE", "0"),
        ("CUPY_ZC_SEGMENT_SIZE", "-1M"),
        ("CUPY_ZC_TIMEOUT", "0"),
        ("CUPY_ZC_TIMEOUT", "inf"),
        ("CUPY_ZC_TIMEOUT", "soon"),
        ("CUPY_ZC_HOST_DEVICES", "65"),
        ("CUPY_ZC_HOST_DEVICES", "two"),
        ("CUPY_ZC_HOST_GRANULARITY", "3M"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(variable, value):
    with pytest.raises(cupy_zc.InvalidValueError, match=f"{variable}.*expected"):
        config._read({variable: value})


def test_the_table_and_the_values_have_the_same_fields():
    fields = [row.field for row in config.TABLE]
    assert sorted(fields) == sorted(config.Settings.__dataclass_fields__)
    assert len({row.variable for row in config.TABLE}) == len(config.TABLE)


def test_the_readme_lists_every_setting():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for row in config.TABLE:
        assert f"`{row.variable}` | `{row.default}`" in readme
