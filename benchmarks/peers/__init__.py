"""What ``benchmarks/collectives.py`` is made of: engines, the machine under them, and the harness.

An engine is a class that can enqueue collectives; :data:`ENGINES` names those that are measured.
"""

from __future__ import annotations

import importlib

from .api import Engine, Unavailable

__all__ = ["ENGINES", "load"]

#: Name on the command line -> ``module:class``. The order is that of the columns.
ENGINES: dict[str, str] = {
    "cupy-zc": "peers.own:Registered",
    "cupy-zc-plain": "peers.own:Plain",
    "nccl": "peers.nccl:Nccl",
    "nccl-registered": "peers.nccl:NcclRegistered",
    "nccl-window": "peers.nccl:NcclWindow",
    "nccl4py": "peers.nccl4py:Nccl4py",
    "torch-one-shot": "peers.torch_symmetric:OneShot",
    "torch-two-shot": "peers.torch_symmetric:TwoShot",
}


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
