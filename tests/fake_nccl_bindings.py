"""A fake of ``nccl.bindings.nccl`` of nccl4py: what was called, and errors with its texts."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

__all__ = ["FakeNcclBindings", "NCCLError", "UniqueId", "install"]

RESULTS = {
    1: ("UnhandledCudaError", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    4: ("InvalidArgument", "invalid argument (run with NCCL_DEBUG=WARN for details)"),
    6: ("RemoteError", "remote process exited or there was a network error"),
}


class NCCLError(Exception):
    """As nccl4py has it."""

    def __init__(self, status: int) -> None:
        self.status = status
        name, text = RESULTS[status]
        super().__init__(f"{name} ({status}): {text}")


class UniqueId:
    """128 bytes, which are others when the object is gone."""

    def __init__(self) -> None:
        self.content = (ctypes.c_char * 128)()
        _kept.append(self.content)  # to read from memory that was freed would be anybody's guess

    def __del__(self) -> None:
        ctypes.memset(self.content, 0, 128)

    @property
    def ptr(self) -> int:
        return ctypes.addressof(self.content)


_kept: list[Any] = []


class FakeNcclBindings:
    """Stands in for the module.

    Args:
        version: Of NCCL.
        load: What loading libnccl raises.
    """

    NCCLError = NCCLError
    UniqueId = UniqueId
    Config = SimpleNamespace

    def __init__(self, version: int = 22809, load: Exception | None = None) -> None:
        self.version = version
        self.load = load
        #: What calls were given, by name.
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        #: What they give back, or raise; or a function that makes it.
        self.results: dict[str, Any] = {}
        #: Every name that was asked for.
        self.names: set[str] = {"get_version"}

    def get_version(self) -> int:
        if self.load is not None:
            raise self.load
        return self.version

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self.names.add(name)

        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            result = self.results.get(name)
            if isinstance(result, Exception):
                raise result
            return result() if callable(result) else result

        return call


def install(patch: pytest.MonkeyPatch, bindings: Any) -> None:
    """Let ``from nccl.bindings import nccl`` give it."""
    package, middle = ModuleType("nccl"), ModuleType("nccl.bindings")
    vars(package)["bindings"], vars(middle)["nccl"] = middle, bindings
    patch.setitem(sys.modules, "nccl", package)
    patch.setitem(sys.modules, "nccl.bindings", middle)
    patch.setitem(sys.modules, "nccl.bindings.nccl", bindings)
