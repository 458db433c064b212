"""The only place that talks to a driver. ``select`` picks the one to use."""

from __future__ import annotations

import functools
import logging
import os

from ..config import settings
from ..errors import DriverError, InvalidTypeError, InvalidValueError
from .api import Driver

__all__ = ["Driver", "select"]

_log = logging.getLogger("cupy_zc")


@functools.cache
def _host() -> Driver:
    from .host import HostDriver

    return HostDriver()


@functools.cache
def _cuda() -> Driver:
    from .cuda import CudaDriver

    return CudaDriver()


@functools.cache
def _auto() -> Driver:
    try:
        return _cuda()
    except DriverError as error:
        level = logging.WARNING if _speaks_for_the_machine() else logging.DEBUG
        _log.log(level, "no usable GPU, so the host driver is used: %s", error)
        return _host()


def _speaks_for_the_machine() -> bool:
    """Whether this is the first of the processes that an MPI launcher started on the machine."""
    launchers = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")  # MPICH; Open MPI
    return all(os.environ.get(name, "0") == "0" for name in launchers)


def select(driver: str | Driver | None = None) -> Driver:
    """The driver to use; one instance a process for each name.

    Args:
        driver: ``"cuda"``, ``"host"``, ``"auto"`` or None (both: ``CUPY_ZC_DRIVER``, and without
            it CUDA where there is a GPU, else host), or a driver, which is returned.

    Raises:
        DriverError: ``"cuda"`` was asked for and there is no usable GPU.
        InvalidValueError: another name. InvalidTypeError: neither a name nor a driver.
    """
    if driver is None or driver == "auto":
        driver = settings().driver
    if not isinstance(driver, str):
        if hasattr(driver, "create") and hasattr(driver, "name"):
            return driver
        raise InvalidTypeError("driver", "driver", driver, 'None, "auto", "cuda" or "host"')
    pick = {"auto": _auto, "cuda": _cuda, "host": _host}.get(driver)
    if pick is None:
        raise InvalidValueError("driver", "driver", driver, 'None, "auto", "cuda" or "host"')
    return pick()
