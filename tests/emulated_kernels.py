"""Kernels of ``cuda/`` as functions of this process: one shared library for each, by g++."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import re
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from emulated import COMMON, ROOT, CompileError, compiler, included

from cupy_zc.driver.api import KernelName

__all__ = ["EmulatedKernel", "KernelLibrary"]

_FLAGS = ["-O1", "-DEMULATION_GRIDS", "-shared", "-fPIC", "-fvisibility=hidden"]
_NAMED = re.compile(
    r"(?:CUPY_ZC_KERNEL\(|__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?)(\w+)[()]"
)
_MOST_PARAMETERS = 8


class EmulatedKernel:
    """One kernel, loaded.

    Args:
        name: Which it is.
        library: Where it is.
    """

    def __init__(self, name: KernelName, library: ctypes.CDLL) -> None:
        self.name = name
        sizes = (ctypes.c_uint64 * _MOST_PARAMETERS)()
        count = getattr(library, f"{name.function}_parameters")(sizes)
        self._sizes = sizes[:count]
        self._run = getattr(library, f"{name.function}_run")
        self._run.argtypes = (ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint64)
        self._run.restype = None

    def arguments(self, parameters: int) -> list[bytes]:
        """What a launch passes, by the address of an array of addresses."""
        addresses = (ctypes.c_void_p * len(self._sizes)).from_address(parameters)
        return [
            ctypes.string_at(address, size)
            for address, size in zip(addresses, self._sizes, strict=True)
        ]

    def run(self, blocks: int, threads: int, arguments: Sequence[bytes], seed: int) -> None:
        """Run a grid in this thread, to its end; other Python threads run beside it."""
        values = [ctypes.create_string_buffer(value, len(value)) for value in arguments]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        self._run(blocks, threads, ctypes.addressof(addresses), seed)


class KernelLibrary:
    """Compiles and loads kernels, each for the definitions it is asked for.

    Args:
        cache: A directory that outlives the test run.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._libraries: dict[tuple[str, tuple[str, ...]], ctypes.CDLL] = {}
        self._works = itertools.count()
        self._sources = {
            path.name: path.read_text()
            for path in sorted(
                [*(ROOT / "cuda").glob("*.cu*"), *(ROOT / "tests/emulation").iterdir()]
            )
        }

    def load(self, name: KernelName) -> EmulatedKernel:
        """A kernel, compiled where these very sources never were."""
        key = (name.source, name.defines)
        with self._lock:
            library = self._libraries.get(key)
            if library is None:
                library = self._libraries[key] = ctypes.CDLL(str(self._build(*key)))
        return EmulatedKernel(name, library)

    def _build(self, source: str, defines: tuple[str, ...]) -> Path:
        needed = included(self._sources, source) | included(self._sources, "grid.h")
        texts = {file: self._sources[file] for file in needed}
        functions = _NAMED.findall(self._sources[source])
        text = f'#include "grid.h"\n\n#include "{source}"\n\n'
        text += "".join(f"EMULATED_KERNEL({function})\n" for function in functions)
        flags = [*COMMON, *_FLAGS, *(f"-D{define}" for define in defines)]
        identity = repr((text, texts, flags, compiler()))
        place = self._cache / f"{source}-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
        if place.exists():
            os.utime(place)
            return place
        work = self._cache / f"{place.stem}.{os.getpid()}.{next(self._works)}"
        work.mkdir(parents=True)
        for file, content in {**texts, "kernel.cpp": text}.items():
            (work / file).write_text(content)
        command = [compiler(), *flags, "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
        done = subprocess.run(
            [*command, "kernel.cpp", "-o", "kernel.so"],
            cwd=work, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        if done.returncode or "warning:" in done.stderr:
            raise CompileError(done.stderr[:4000])
        (work / "kernel.so").rename(place)
        return place
