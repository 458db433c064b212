"""Kernels of ``cuda/`` as functions of this process: shared libraries, made by g++.

Sources that are compiled for one element type and operation are one library together, and so are
those that are compiled for none: most of the time goes into the headers of the emulation.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from emulated import COMMON, ROOT, CompileError, compiler, included

from cupy_zc.driver.api import KernelName

__all__ = ["EmulatedKernel", "KernelLibrary"]

_FLAGS = [
    "-O1", "-DEMULATION_GRIDS", "-shared", "-fPIC", "-fvisibility=hidden",
    "-Wall", "-Wextra", "-Wno-unknown-pragmas",
]  # fmt: skip
_NAMED = re.compile(
    r"(?:CUPY_ZC_KERNEL(?:_OF)?\(|__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?)(\w+)[,()]"
)
_MOST_PARAMETERS = 8
#: What a source has that is compiled for an element type and an operation.
_TYPED = "Selected"
#: Sources that are a library of their own: its types are global, it is compiled for more, or for
#: a type alone.
_ALONE = {
    "divide.cu", "pattern.cu", "multimem_all_reduce.cu", "multimem_ll.cu", "multimem_move.cu",
    "multimem_probe.cu", "multimem_reduce_scatter.cu",
}  # fmt: skip


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
        self._libraries: dict[tuple[tuple[str, ...], tuple[str, ...]], ctypes.CDLL] = {}
        self._sources = {
            path.name: path.read_text()
            for path in sorted(
                [*(ROOT / "cuda").glob("*.cu*"), *(ROOT / "tests/emulation").iterdir()]
            )
        }

    def load(self, name: KernelName) -> EmulatedKernel:
        """A kernel, compiled where these very sources never were."""
        key = (self._together(name.source), name.defines)
        with self._lock:
            library = self._libraries.get(key)
            if library is None:
                library = self._libraries[key] = ctypes.CDLL(str(self._build(*key)))
        return EmulatedKernel(name, library)

    def prepare(self, names: Iterable[KernelName]) -> None:
        """Compile kernels, two at a time, which are loaded later."""
        with ThreadPoolExecutor(2) as workers:
            keys = {(self._together(name.source), name.defines) for name in names}
            list(workers.map(lambda key: self._build(*key), sorted(keys)))

    def _together(self, source: str) -> tuple[str, ...]:
        """The sources of the library that a source is in."""
        if source in _ALONE:
            return (source,)
        typed = _TYPED in self._sources[source]
        return tuple(
            other
            for other, text in self._sources.items()
            if other.endswith(".cu") and other not in _ALONE and (_TYPED in text) == typed
        )

    def _build(self, sources: tuple[str, ...], defines: tuple[str, ...]) -> Path:
        needed = included(self._sources, "grid.h").union(
            *(included(self._sources, source) for source in sources)
        )
        texts = {file: self._sources[file] for file in sorted(needed)}
        lines = ['#include "grid.h"', ""]
        for source in sources:
            functions = _NAMED.findall(self._sources[source])
            lines += [f'#include "{source}"', *map("EMULATED_KERNEL({})".format, functions)]
        texts["kernel.cpp"] = "\n".join(lines) + "\n"
        command = [compiler(), *COMMON, *_FLAGS, *(f"-D{define}" for define in defines)]
        identity = repr((texts, command))
        place = (
            self._cache / f"{sources[0]}-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
        )
        if place.exists():
            os.utime(place)
            return place
        with tempfile.TemporaryDirectory(dir=self._cache) as folder:
            for file, content in texts.items():
                (Path(folder) / file).write_text(content)
            done = subprocess.run(
                [*command, "kernel.cpp", "-o", "kernel.so"],
                cwd=folder, capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            if done.returncode or "warning:" in done.stderr:
                raise CompileError(done.stderr[:4000])
            (Path(folder) / "kernel.so").rename(place)
        return place
