"""Local work on a GPU: what the emulation cannot tell, which is arithmetic, sizes and captures."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from emulated_cases import DTYPES, values
from local_cases import DIVISIBLE, INT32, Bytes, check_copy, check_divide, special

from cupy_zc.collectives.dtypes import code_of
from cupy_zc.collectives.local import DeviceLocal, LocalWork, Rows, local_work
from cupy_zc.driver import select
from cupy_zc.driver.api import Driver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def gpu() -> Driver:
    return select("cuda")


@pytest.fixture(scope="module")
def work(gpu: Driver) -> Iterator[LocalWork]:
    made = local_work(gpu, 0)
    assert isinstance(made, DeviceLocal)
    made.preload(range(len(DTYPES)))
    yield made
    made.close()


@pytest.mark.parametrize("count", [1, 7, 5000])
def test_rows_of_any_width_and_alignment_are_permuted(
    gpu: Driver, work: LocalWork, count: int
) -> None:
    order = np.random.default_rng(count).permutation(count)
    rows = Rows(tuple((index, int(to)) for index, to in enumerate(order)))
    for width in (0, 1, 4, 15, 16, 24, 2047, 2048, 4100, *([1 << 20, 3_000_001] * (count < 10))):
        for offsets in ((0, 0), (3, 3), (4, 8), (1, 2)):
            check_copy(gpu, work, rows, width, (0, 0), offsets)
            check_copy(gpu, work, rows, width, (4, 12), offsets)


@pytest.mark.parametrize("code", DIVISIBLE, ids=[DTYPES[code].name for code in DIVISIBLE])
def test_an_array_of_every_type_is_divided_as_an_average_is(
    gpu: Driver, work: LocalWork, code: int
) -> None:
    assert code_of(DTYPES[code]) == code
    rng = np.random.default_rng(code)
    part = DTYPES[code].itemsize // (2 if DTYPES[code].kind == "c" else 1)
    for by in range(1, 10):
        check_divide(gpu, work, code, special(code), by)
        check_divide(gpu, work, code, values(rng, code, (100_003,)), by, by * part % 16)


def test_work_is_captured_and_done_again_in_every_replay(gpu: Driver, work: LocalWork) -> None:
    numbers = np.arange(-60_000, 60_000, dtype="i4")
    row = numbers.nbytes // 3
    source, target = Bytes(gpu, numbers.tobytes()), Bytes(gpu, bytes(numbers.nbytes))
    table = work.prepare(Rows(((0, 2), (1, 1), (2, 0))))
    stream = gpu.make_stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        work.copy_rows(table, target.address, row, source.address, row, row, stream)
        work.divide(target.address, len(numbers), INT32, 3, stream)
        graph = stream.end_capture()
    assert target.read() == bytes(numbers.nbytes)
    for turn in range(3):
        source.write((numbers * (turn + 1)).tobytes())
        graph.launch(stream)
        stream.synchronize()
        wanted = np.trunc(numbers.reshape(3, -1)[::-1] * (turn + 1) / 3).astype("i4")
        assert target.read() == wanted.tobytes()


@pytest.mark.slow
def test_counts_and_widths_may_need_more_than_32_bits(gpu: Driver, work: LocalWork) -> None:
    count, width, guard = (1 << 32) + 5, (1 << 32) + 3, 16
    source, target = gpu.plain_memory(count + guard), gpu.plain_memory(2 * width)
    stream = gpu.make_stream(non_blocking=True)
    gpu.fill(source.ptr, 9, count + guard, stream)
    gpu.fill(target.ptr, 0, 2 * width, stream)
    work.divide(source.ptr, count, DTYPES.index(np.dtype("i1")), 3, stream)
    table = work.prepare(Rows(((0, 1),)))
    work.copy_rows(table, target.ptr, width - 1, source.ptr, width, width, stream)
    stream.synchronize()
    assert gpu.read(source.ptr, 16) == gpu.read(source.ptr + count - 16, 16) == bytes([3] * 16)
    assert gpu.read(source.ptr + count, guard) == bytes([9] * guard)
    for place in (0, width // 2, width - 16):
        assert gpu.read(target.ptr + width - 1 + place, 16) == bytes([3] * 16)
    assert gpu.read(target.ptr + width - 17, 16) == bytes(16)
    assert gpu.read(target.ptr + 2 * width - 1, 1) == bytes(1)
