"""Every setting of the package, in one table, read once.

A setting is an environment variable; :data:`TABLE` says which, what it means and what is allowed,
and the documentation prints the same table. :func:`settings` gives the values.

The multicast guard
-------------------
``multicast`` is ``"off"`` when ``CUPY_ZC_MULTICAST=off``, or when the environment asks any of the
libraries of this field to keep away from it (:data:`MULTICAST_GUARDS`). ``off`` is absolute: the
environment the process was *started* with counts as well as the present one, so a program cannot
undo it by changing ``os.environ``. :func:`multicast_refusal` is asked by the driver module itself.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .errors import InvalidValueError

__all__ = [
    "MULTICAST_GUARDS",
    "TABLE",
    "Setting",
    "Settings",
    "multicast_refusal",
    "settings",
    "wants_ranges",
]

#: Variables of other libraries that mean "no multicast on this machine".
MULTICAST_GUARDS: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
_MULTICAST = "CUPY_ZC_MULTICAST"

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of all settings. Sizes in bytes, times in seconds."""

    driver: Literal["auto", "cuda", "host"]
    multicast: Literal["auto", "off"]
    segment_size: int
    timeout: float
    setup_timeout: float
    host_devices: int
    host_granularity: int
    host: str
    port: int
    #: Shown nowhere, neither in ``repr`` nor in an error.
    secret: str = field(repr=False)
    node_size: int
    nvtx: bool
    plan: str


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    field: str
    variable: str
    default: str
    allowed: str
    meaning: str
    parse: Callable[[str], Any]


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(text)
        return text.lower()

    return parse


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise ValueError(text)
    return int(match[1]) * _UNITS[match[2]]


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ValueError(text)
        return value

    return parse


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


_SIZE = "a positive size in bytes, with an optional suffix K, M, G or T"

TABLE: tuple[Setting, ...] = (
    Setting(
        "driver", "CUPY_ZC_DRIVER", "auto", "auto, cuda or host",
        "Which driver pools and communicators use. auto: cuda where there is a GPU, else host.",
        _choice("auto", "cuda", "host"),
    ),
    Setting(
        "multicast", _MULTICAST, "auto", "auto or off",
        "Whether NVLink SHARP may be used. off is absolute and cannot be overruled.",
        _choice("auto", "off"),
    ),
    Setting(
        "segment_size", "CUPY_ZC_SEGMENT_SIZE", "64M", _SIZE,
        "How much a pool asks of the driver at a time; rounded up to the granule.",
        _size,
    ),
    Setting(
        "timeout", "CUPY_ZC_TIMEOUT", "600", "a positive number of seconds",
        "How long to wait for a rank that user code can delay.",
        _seconds,
    ),
    Setting(
        "setup_timeout", "CUPY_ZC_SETUP_TIMEOUT", "60", "a positive number of seconds",
        "How long to wait for a rank in a step of set-up, which user code does not delay.",
        _seconds,
    ),
    Setting(
        "host_devices", "CUPY_ZC_HOST_DEVICES", "1", "1 to 64",
        "How many devices the host driver pretends to have.",
        _whole(1, 64),
    ),
    Setting(
        "host_granularity", "CUPY_ZC_HOST_GRANULARITY", "2M", _SIZE + "; a power of two",
        "The granule of the host driver.",
        _size,
    ),
    Setting(
        "host", "CUPYX_DISTRIBUTED_HOST", "127.0.0.1", "a name or address of rank 0's machine",
        "Where rank 0 keeps the TCP store through which ranks find each other.",
        str,
    ),
    Setting(
        "port", "CUPYX_DISTRIBUTED_PORT", "13333", "1 to 65535",
        "The port of that store.",
        _whole(1, 65535),
    ),
    Setting(
        "secret", "CUPY_ZC_SECRET", "", "any text, the same on all ranks",
        "What a rank must know to join the TCP store. Empty: whoever reaches the port may join.",
        str,
    ),
    Setting(
        "node_size", "CUPY_ZC_NODE_SIZE", "0", "0 to 65535",
        "Split each machine into pretend nodes of that many ranks, for tests. 0: real nodes.",
        _whole(0, 65535),
    ),
    Setting(
        "nvtx", "CUPY_ZC_NVTX", "0", "0 or 1",
        "NVTX ranges around the calls of communicators; looked at when the package is imported.",
        lambda text: bool(_whole(0, 1)(text)),
    ),
    Setting(
        "plan", "CUPY_ZC_PLAN", "", "the path of a file, the same on all ranks",
        "Thresholds between algorithms on GPUs, written by cupy-zc bench --tune. Empty: built in.",
        str,
    ),
)  # fmt: skip


@functools.cache
def _started_with() -> dict[str, str]:
    """The environment the process was started with, without what Python changed later."""
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:  # no /proc: the present environment is all there is
        return dict(os.environ)
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _refusal_in(environment: Mapping[str, str]) -> str | None:
    if environment.get(_MULTICAST, "").strip().lower() == "off":
        return f"{_MULTICAST}=off"
    for name, value in MULTICAST_GUARDS.items():
        if environment.get(name, "").strip() == value:
            return f"{name}={value}"
    return None


def multicast_refusal() -> str | None:
    """Which switch turns multicast off, as ``NAME=value``, or None where it may be tried.

    Looked up anew at each call in three places, any of which suffices: the environment at the
    start of the process, the environment when the settings were first read, and the present one.
    """
    return _refusal_in(_started_with()) or _first_refusal() or _refusal_in(os.environ)


@functools.cache
def _first_refusal() -> str | None:
    return _refusal_in(os.environ)


def _read(environment: Mapping[str, str]) -> Settings:
    values = {row.field: _value(row, environment) for row in TABLE}
    if values["host_granularity"] & (values["host_granularity"] - 1):
        granularity = values["host_granularity"]
        raise InvalidValueError(
            "settings", "CUPY_ZC_HOST_GRANULARITY", granularity, "a power of two"
        )
    if multicast_refusal() is not None:
        values["multicast"] = "off"
    return Settings(**values)


def wants_ranges() -> bool:
    """The setting ``nvtx``, which counts at import: too early for :func:`settings`.

    Raises:
        InvalidValueError: it has a value that is not allowed.
    """
    (row,) = (row for row in TABLE if row.field == "nvtx")
    return bool(_value(row, os.environ))


def _value(row: Setting, environment: Mapping[str, str]) -> Any:
    text = environment.get(row.variable, "").strip() or row.default
    try:
        return row.parse(text)
    except ValueError:
        raise InvalidValueError("settings", row.variable, text, row.allowed) from None


@functools.cache
def settings() -> Settings:
    """All settings as one frozen value, read from the environment at the first call.

    Raises:
        InvalidValueError: a variable holds a value that is not allowed.
    """
    return _read(os.environ)


_first_refusal()  # at import: the earliest moment there is
