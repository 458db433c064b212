"""The multicast guard, as the host driver keeps it: off is off, whenever it was said."""

from __future__ import annotations

import pytest
from probes import clean_environment, run

from cupy_zc.config import MULTICAST_GUARDS


@pytest.mark.parametrize(
    ("name", "value"), [("CUPY_ZC_MULTICAST", "off"), *MULTICAST_GUARDS.items()]
)
@pytest.mark.parametrize("when", ["before", "later"])
def test_a_switch_forbids_objects_whenever_it_is_set(name, value, when):
    code = """
        import os, sys
        from cupy_zc import MulticastUnavailableError
        from cupy_zc.driver.host import HostDriver
        name, value, when = sys.argv[1:]
        if when == "later":
            os.environ[name] = value
        else:
            os.environ.pop(name)
        with HostDriver() as driver:
            for call in (
                lambda: driver.multicast_create(1, 2 << 20),
                lambda: driver.multicast_import(0, 1, 2 << 20),
            ):
                try:
                    call()
                except MulticastUnavailableError as error:
                    assert f"{name}={value}" in str(error), error
                    assert error.result == "CUDA_ERROR_NOT_SUPPORTED"
                else:
                    raise AssertionError("it was made")
            print(driver.multicast_objects_created)
    """
    environment = clean_environment()
    if when == "before":
        environment[name] = value
    assert run(code, name, value, when, environment=environment) == "0"
