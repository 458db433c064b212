"""What a rank does with its own memory: rows copied and arrays divided, on hosts and devices."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from emulated import build_directory
from emulated_cases import DTYPES, values
from emulated_driver import EmulatedDriver, emulated_device
from hypothesis import given, settings
from hypothesis import strategies as st
from local_cases import DIVISIBLE, INT32, Bytes, bits_of, check_copy, check_divide, special

from cupy_zc.collectives.dtypes import code_of
from cupy_zc.collectives.local import DeviceLocal, HostLocal, LocalWork, Rows, local_work
from cupy_zc.driver.api import Driver, KernelDriver, KernelName
from cupy_zc.driver.host import HostDriver
from cupy_zc.errors import DriverError

pytestmark = pytest.mark.timeout(120)

WIDTHS = st.one_of(st.integers(0, 80), st.sampled_from([255, 256, 2047, 2048, 2049, 4096, 7001]))


@pytest.fixture(scope="module")
def emulated(request: pytest.FixtureRequest) -> Iterator[EmulatedDriver]:
    with emulated_device(build_directory(request.config)) as driver:
        names = [KernelName("copy_rows.cu", "")]
        names += [
            KernelName("divide.cu", "", (f"CUPY_ZC_ELEMENT={element}",))
            for element in ("float", "Half", "long long")
        ]
        driver.library.prepare(names)
        yield driver


@pytest.fixture(scope="module", params=["host", "emulated"])
def driver(request: pytest.FixtureRequest) -> Driver:
    """Each driver that there is without a GPU."""
    if request.param == "host":
        return HostDriver()
    emulated: EmulatedDriver = request.getfixturevalue("emulated")
    return emulated


@pytest.fixture(scope="module")
def work(driver: Driver) -> Iterator[LocalWork]:
    made = local_work(driver, 0)
    yield made
    made.close()


# Rows


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    """No target twice, in any order; sources may be."""
    targets = draw(st.lists(st.integers(0, 12), max_size=12, unique=True))
    return Rows(tuple((draw(st.integers(0, 12)), target) for target in targets))


_sixteenth = st.sampled_from([0, 1, 2, 4, 8, 12, 15, 16, 24])


@settings(max_examples=150)
@given(
    rows=some_rows(),
    width=WIDTHS,
    gaps=st.tuples(_sixteenth, _sixteenth),
    offsets=st.tuples(st.integers(0, 15), st.integers(0, 15)),
)
def test_rows_of_any_pitch_width_and_alignment_are_copied(
    driver: Driver,
    work: LocalWork,
    rows: Rows,
    width: int,
    gaps: tuple[int, int],
    offsets: tuple[int, int],
) -> None:
    check_copy(driver, work, rows, width, gaps, offsets)


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_every_width_of_access_is_taken(
    driver: Driver, work: LocalWork, unit: int, offset: int
) -> None:
    rows = Rows(((0, 1), (1, 0)))
    for count in (1, 3, 130, 300):
        check_copy(driver, work, rows, unit * count, (unit, 3 * unit), (offset, 0))
        check_copy(driver, work, rows, unit * count, (unit, 3 * unit), (offset, offset))


@pytest.mark.parametrize(("count", "width"), [(1, 100_003), (3, 40_000), (3000, 5), (700, 16)])
def test_few_wide_rows_and_many_narrow_ones_are_permuted(
    driver: Driver, work: LocalWork, count: int, width: int
) -> None:
    order = np.random.default_rng(count).permutation(count)
    rows = Rows(tuple((index, int(to)) for index, to in enumerate(order)))
    check_copy(driver, work, rows, width)
    check_copy(driver, work, rows, width, (3, 1), (5, 5))


def test_no_rows_and_rows_of_no_bytes_copy_nothing(driver: Driver, work: LocalWork) -> None:
    check_copy(driver, work, Rows(()), 16)
    check_copy(driver, work, Rows(((0, 0), (1, 2))), 0, (8, 8))


@pytest.mark.parametrize(("row", "pitch"), [(1 << 33, 16), (3, 1 << 36), (1, 5 << 32)])
def test_row_numbers_and_pitches_may_need_more_than_32_bits(
    driver: Driver, work: LocalWork, row: int, pitch: int
) -> None:
    """Nothing but that one row of the two matrices is there."""
    target, source = Bytes(driver, bytes(64)), Bytes(driver, bytes(range(64)))
    stream = driver.make_stream(non_blocking=True)
    table = work.prepare(Rows(((row, row),)))
    away = row * pitch - 32
    where = (target.address - away, pitch, source.address - away, pitch, 16)
    work.copy_rows(table, *where, stream)
    stream.synchronize()
    assert target.read() == bytes(32) + source.read()[32:48] + bytes(16)


@pytest.mark.parametrize("blocks", [1, 2, 7, 40])
@pytest.mark.parametrize("threads", [32, 64, 160])
def test_a_grid_of_any_shape_copies_everything(
    emulated: EmulatedDriver, blocks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = emulated.launch
    monkeypatch.setattr(
        emulated,
        "launch",
        lambda function, b, t, stream, parameters: launch(
            function, blocks, threads, stream, parameters
        ),
    )
    local = DeviceLocal(emulated, 0)
    rows = Rows(((0, 2), (1, 0), (2, 1)))
    for width in (1, 16, 40, 4096, 9001):
        for offsets in ((0, 0), (7, 7), (1, 2)):
            check_copy(emulated, local, rows, width, (16, 0), offsets)
    check_divide(emulated, local, INT32, special(INT32), 3, 4)
    check_divide(emulated, local, INT32, np.arange(-3000, 3001, dtype="i4"), 7, 12)


# Division


@pytest.mark.parametrize("code", DIVISIBLE, ids=[DTYPES[code].name for code in DIVISIBLE])
def test_an_array_of_every_type_is_divided_as_an_average_is(
    driver: Driver, work: LocalWork, code: int
) -> None:
    assert code_of(DTYPES[code]) == code
    rng = np.random.default_rng(code)
    work.preload([code])
    for by in range(1, 10):
        check_divide(driver, work, code, special(code), by)
        check_divide(driver, work, code, values(rng, code, (int(rng.integers(2000)),)), by)


@settings(max_examples=60)
@given(
    code=st.sampled_from([9, 11, INT32, 14]),
    count=st.integers(0, 90),
    by=st.integers(1, 8),
    place=st.integers(0, 15),
    seed=st.integers(0, 1000),
)
def test_an_array_may_begin_anywhere(
    driver: Driver, work: LocalWork, code: int, count: int, by: int, place: int, seed: int
) -> None:
    dtype = DTYPES[code]
    unit = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    numbers = values(np.random.default_rng(seed), code, (count,))
    check_divide(driver, work, code, numbers, by, place * unit % 16)


def test_numbers_of_many_ranks_divide_exactly(driver: Driver, work: LocalWork) -> None:
    """16-bit floats hold no number above 2048 exactly: they are divided as float32."""
    stream = driver.make_stream(non_blocking=True)
    for code in (9, 10, 11, 7):
        numbers = special(code)
        for by in (257, 2049, 70_001, (1 << 31) - 1):
            memory = Bytes(driver, numbers.tobytes())
            work.divide(memory.address, len(numbers), code, by, stream)
            stream.synchronize()
            wide = numbers.astype("f4") if code in (9, 10) else numbers
            if code == 7:
                exact = [abs(int(each)) // by * (-1 if each < 0 else 1) for each in numbers]
                wanted = np.array(exact, "i8")
            else:
                with np.errstate(all="ignore"):
                    wanted = (wide / np.float32(by)).astype(numbers.dtype)
            found = np.frombuffer(memory.read(), numbers.dtype)
            np.testing.assert_array_equal(bits_of(found), bits_of(wanted), f"{by}")


def test_bool_has_no_kernel_and_is_passed_over_when_kernels_are_loaded(
    driver: Driver, work: LocalWork
) -> None:
    work.preload([0])


# Streams, captures, tables


def test_work_is_done_in_the_order_of_the_stream_and_again_in_every_replay(
    driver: Driver, work: LocalWork
) -> None:
    numbers = np.arange(-600, 600, dtype="i4")
    source, target = Bytes(driver, numbers.tobytes()), Bytes(driver, bytes(4800))
    table = work.prepare(Rows(((0, 2), (1, 1), (2, 0))))
    work.preload([INT32])
    stream = driver.make_stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        work.copy_rows(table, target.address, 1600, source.address, 1600, 1600, stream)
        work.divide(target.address, 1200, INT32, 3, stream)
        work.divide(target.address + 1600, 400, INT32, 2, stream)
        graph = stream.end_capture()
    assert target.read() == bytes(4800)
    for turn in range(3):
        source.write((numbers * (turn + 1)).tobytes())
        graph.launch(stream)
        stream.synchronize()
        wanted = np.trunc(numbers.reshape(3, 400)[::-1] * (turn + 1) / 3).astype("i4")
        wanted[1] = np.trunc(wanted[1] / 2)
        assert target.read() == wanted.tobytes()


def test_equal_rows_have_one_table(emulated: EmulatedDriver) -> None:
    local = DeviceLocal(emulated, 0)
    first = local.prepare(Rows(((1, 0),)))
    assert local.prepare(Rows(((1, 0),))) is first
    assert local.prepare(Rows(((0, 1),))) is not first
    local.close()


def test_a_table_is_made_beside_a_stream_that_does_not_move(emulated: EmulatedDriver) -> None:
    """It ends a set-up that waits for kernels of the caller, which may wait for this rank."""
    local = DeviceLocal(emulated, 0)
    with emulated.make_stream(non_blocking=True) as stream:
        hold = stream.hold()
        table = local.prepare(Rows(((3, 4), (5, 6))))
        assert emulated.current_stream() is stream
        words = ctypes.string_at(table.memory.ptr, 32)
        hold.release()
    assert np.frombuffer(words, "<u8").tolist() == [3, 4, 5, 6]


def test_a_table_lies_on_its_device(request: pytest.FixtureRequest) -> None:
    with emulated_device(build_directory(request.config), devices=2) as driver:
        table = DeviceLocal(driver, 1).prepare(Rows(((0, 0),)))
        assert table.memory.device_id == 1
        assert driver.current_device() == 0


def test_the_driver_says_which_kind_it_is(emulated: EmulatedDriver) -> None:
    assert isinstance(local_work(HostDriver(), 0), HostLocal)
    assert isinstance(emulated, KernelDriver)
    assert isinstance(local_work(emulated, 0), DeviceLocal)


def test_a_stream_of_another_driver_is_refused() -> None:
    one, other = HostDriver(), HostDriver()
    memory = Bytes(one, bytes(16))
    with pytest.raises(DriverError, match="another driver"):
        local_work(one, 0).divide(memory.address, 4, INT32, 2, other.make_stream())
