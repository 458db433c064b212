"""The engines that can be measured: classes that enqueue collectives, by name."""

from __future__ import annotations

import importlib

from .api import Engine, Unavailable

__all__ = ["ENGINES", "GROUPS", "load"]

#: Name on the command line -> ``module:class``. The order is that of the columns.
ENGINES: dict[str, str] = {
    "cupy-zc": "cupy_zc.cli.bench.own:Registered",
    "cupy-zc-plain": "cupy_zc.cli.bench.own:Plain",
    "nccl": "cupy_zc.cli.bench.nccl:Nccl",
    "nccl-registered": "cupy_zc.cli.bench.nccl:NcclRegistered",
    "nccl-window": "cupy_zc.cli.bench.nccl:NcclWindow",
    "nccl4py": "cupy_zc.cli.bench.nccl4py:Nccl4py",
    "torch-one-shot": "cupy_zc.cli.bench.torch_symmetric:OneShot",
    "torch-two-shot": "cupy_zc.cli.bench.torch_symmetric:TwoShot",
    "mpi": "cupy_zc.cli.bench.mpi:Mpi",
}
#: Names for several of them.
GROUPS: dict[str, tuple[str, ...]] = {"torch": ("torch-one-shot", "torch-two-shot")}


def load(name: str) -> type[Engine]:
    """The class behind a name of :data:`ENGINES`, or behind ``module:class`` of any other module.

    Raises:
        Unavailable: a library that the module needs is not installed, or the class is no engine.
    """
    module, _, attribute = ENGINES.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise Unavailable(str(error).strip().splitlines()[0]) from error
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise Unavailable(f"{name} is not an engine")
    return found
