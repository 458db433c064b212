"""What carries out a plan: its kernel, compiled for a type; and launches of any kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ..driver.api import KernelDriver, KernelName
from .call import Call
from .device_plan import Launch, Machine
from .dtypes import DTYPES
from .plan import REDUCTIONS

__all__ = ["kernel_of", "launch_with"]

#: Element types of ``cuda/select.cuh``, in the order of ``DTYPES``.
_ELEMENTS = (
    "Bool", "signed char", "u8", "short", "u16", "int", "u32", "long long", "u64",
    "Half", "Bfloat", "float", "double", "Complex<float>", "Complex<double>",
)  # fmt: skip
assert len(_ELEMENTS) == len(DTYPES)


def kernel_of(call: Call, plan: Launch, machine: Machine) -> KernelName:
    """The kernel of a planned call."""
    defines: tuple[str, ...] = ()
    if plan.typed:
        element = _ELEMENTS[call.code]
        operation = REDUCTIONS[call.reduction].capitalize()
        defines = (f"CUPY_ZC_ELEMENT={element}", f"CUPY_ZC_OPERATION={operation}")
    if plan.algorithm in ("multimem", "multimem_ll"):
        defines += (f"CUPY_ZC_MULTIMEM={machine.multicast.capitalize()}",)
    return KernelName(plan.source, plan.function, defines)


def launch_with(
    driver: KernelDriver,
    function: int,
    blocks: int,
    threads: int,
    stream: Any,
    values: Sequence[Any],
) -> None:
    """Launch with ctypes values as arguments; where microseconds do not matter."""
    parameters = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    driver.launch(function, blocks, threads, stream, ctypes.addressof(parameters))
