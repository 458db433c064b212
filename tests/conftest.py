"""What all tests share: hypothesis profiles, GPU markers, drivers, and a look for leaks."""

from __future__ import annotations

import functools
import gc
import os
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

# Before CuPy looks for CUDA: streams of ranks that share a GPU must not share one of its 8 queues.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Hundreds of tests start processes, each of which would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import cupy
import group_workers

from cupy_zc.driver import select
from cupy_zc.driver.host import HostDriver
from cupy_zc.memory import MemoryPool
from cupy_zc.memory.graphs import settle
from cupy_zc.memory.pool import reap

_SLOW = [hypothesis.HealthCheck.too_slow]  # two cores, shared

hypothesis.settings.register_profile("dev", deadline=None, suppress_health_check=_SLOW)
hypothesis.settings.register_profile(
    "ci", deadline=None, suppress_health_check=_SLOW, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile(
    "thorough",
    deadline=None,
    suppress_health_check=_SLOW,
    max_examples=1000,
    stateful_step_count=100,
)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)


@functools.cache
def _gpus() -> tuple[int, str]:
    """How many GPUs there are, and why there are no more."""
    try:
        import cuda.bindings.driver as cuda

        (result,) = cuda.cuInit(0)
        count = 0
        if result == cuda.CUresult.CUDA_SUCCESS:
            result, count = cuda.cuDeviceGetCount()
    except (ImportError, RuntimeError) as error:  # no cuda-bindings, or no libcuda
        return 0, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return count, f"the CUDA driver said {result.name} and shows {count} GPUs"


def _freeze() -> None:
    """Take all that there is out of the garbage collector's sight.

    Most of it stays until the end: modules, thousands of tests, and what pytest keeps of each that
    ran. Each look for leaks went through it all, and that was most of the time of tests that look.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Freezes between files, where fixtures of the last one are gone."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        _freeze()
    return result


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = max(
        (count for name, count in (("gpu", 1), ("multi_gpu", 2)) if item.get_closest_marker(name)),
        default=0,
    )
    if needed:
        count, reason = _gpus()
        if count < needed:
            pytest.skip(f"needs {needed} CUDA GPU{'s' * (needed > 1)}: {reason}")


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def driver(request):
    """Each driver in turn; the host driver a new one for each test.

    It is not closed here: arrays may outlive the test, and their pools are released later.
    """
    return HostDriver() if request.param == "host" else _cuda()


@functools.cache
def _cuda():
    """The CUDA driver, past its first use, for which CUDA allocates and opens things of its own."""
    driver = select("cuda")
    granule = driver.granularity(0, 1).size
    segment, address = driver.create(0, granule), driver.reserve(granule, granule)
    driver.map(address, segment)
    driver.set_access(address, granule, 0)
    driver.write(address, b"first use")
    driver.unmap(address, granule)
    driver.free_range(address, granule)
    driver.release(segment)
    return driver


@pytest.fixture
def host():
    """A host driver with small granules and two devices, closed after the test."""
    with HostDriver(granularity=1 << 16, devices=2, memory=64 << 16) as driver:
        yield driver


@pytest.fixture
def pool(driver):
    """A pool on each driver in turn."""
    return MemoryPool(driver=driver)


@pytest.fixture
def host_pool():
    """A pool on a host driver of its own."""
    return MemoryPool(driver=HostDriver())


@pytest.fixture
def allocator():
    """``allocator(pool)`` makes CuPy allocate from a pool until the test ends."""
    before = cupy.cuda.get_allocator()
    yield lambda pool: cupy.cuda.set_allocator(pool.malloc)
    cupy.cuda.set_allocator(before)


@dataclass(frozen=True)
class Resources:
    """What a process holds of the system."""

    #: Open descriptors by what they are of. Those of GPU devices are the CUDA driver's business.
    descriptors: Counter[str]
    #: Mappings of segments of the host driver.
    segments: int
    #: Mappings of any kind. Others than ours come and go, so compare with some slack.
    mappings: int

    @classmethod
    def now(cls, *, collect: bool = True) -> Resources:
        if collect:
            for _ in range(2):  # what goes in the first turn may have held something else
                gc.collect()
                settle()  # of graphs that are gone
                reap()  # pools that were dropped are released when another one is at work
        targets: list[str] = []
        for entry in Path("/proc/self/fd").iterdir():
            try:
                targets.append(str(entry.readlink()))
            except FileNotFoundError:  # the descriptor of this very listing
                continue
        maps = Path("/proc/self/maps").read_text().splitlines()
        return cls(
            Counter(target for target in targets if not target.startswith("/dev/nvidia")),
            sum("/memfd:cupy-zc" in line for line in maps),
            len(maps),
        )

    def assert_same(self, *, slack: int | None = None, collect: bool = True) -> None:
        """Descriptors and segments are what they were; so are mappings, but for ``slack``."""
        now = Resources.now(collect=collect)
        assert now.descriptors == self.descriptors
        assert now.segments == self.segments
        if slack is not None:
            assert now.mappings <= self.mappings + slack


@pytest.fixture
def resources():
    """Checks after the test that descriptors and mapped segments are what they were before."""
    before = Resources.now()
    yield before
    before.assert_same()


@pytest.fixture
def nothing_left_open():
    """Checks after the test that descriptors are what they were, when pools are released too."""
    with group_workers.flat_descriptors():
        yield
        gc.collect()
        reap()
