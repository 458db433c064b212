"""What carries out a plan: its kernel, compiled for a type; and launches of any kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..driver.api import KernelDriver, KernelName
from .device_multimem import refuse_multimem
from .device_plan import Launch, Machine, device_plan
from .dtypes import DTYPES, ITEMSIZES
from .plan import REDUCTIONS, Operation

__all__ = ["element_of", "kernel_of", "kernels_of", "launch_with", "load_all"]

#: Element types of ``cuda/select.cuh``, in the order of ``DTYPES``.
_ELEMENTS = (
    "Bool", "signed char", "u8", "short", "u16", "int", "u32", "long long", "u64",
    "Half", "Bfloat", "float", "double", "Complex<float>", "Complex<double>",
)  # fmt: skip
assert len(_ELEMENTS) == len(DTYPES)


#: Kernels that are compiled side by side.
_LOADERS = 8
#: Rows up to 2 ** 40 bytes: all that a plan may depend on is a power of two.
_SIZES = tuple(size for power in range(41) for size in ((1 << power), (1 << power) + 1))


def element_of(code: int) -> str:
    """What a kernel is compiled with for an element type by number."""
    return f"CUPY_ZC_ELEMENT={_ELEMENTS[code]}"


def kernel_of(code: int, reduction: int, plan: Launch, machine: Machine) -> KernelName:
    """The kernel of a plan, for an element type and a reduction by number."""
    defines: tuple[str, ...] = ()
    if plan.typed:
        operation = REDUCTIONS[reduction].capitalize()
        defines = (element_of(code), f"CUPY_ZC_OPERATION={operation}")
    if plan.algorithm in ("multimem", "multimem_ll"):
        defines += (f"CUPY_ZC_MULTIMEM={machine.multicast.capitalize()}",)
    return KernelName(plan.source, plan.function, defines)


def kernels_of(code: int, reduction: int, machine: Machine) -> set[KernelName]:
    """The kernels of all collectives of an element type and a reduction, at any size."""
    itemsize = ITEMSIZES[code]
    in_switch = bool(machine.multicast) and not refuse_multimem(code, reduction)
    plans = {
        device_plan(operation, max(1, size // itemsize), itemsize, machine, in_switch=in_switch)
        for operation in Operation
        for size in _SIZES
    }
    return {kernel_of(code, reduction, plan, machine) for plan in plans if plan.source}


def load_all(driver: KernelDriver, device: int, names: Iterable[KernelName]) -> None:
    """Load kernels, several at a time.

    Raises:
        DriverError: one does not compile, or cannot be loaded; the others are.
    """
    with ThreadPoolExecutor(_LOADERS, "cupy-zc kernels") as pool:
        loading = [pool.submit(driver.load, device, name) for name in names]
    for each in loading:
        each.result()


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
