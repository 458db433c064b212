"""What the benchmark of collectives is made of, part by part, without a GPU or a second process."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_zc.cli.bench import data, libraries, report
from cupy_zc.cli.bench.api import COLLECTIVES, DTYPES, OPS, Case, Unavailable, places
from cupy_zc.cli.bench.engines import ENGINES, load
from cupy_zc.cli.bench.nccl import letters
from cupy_zc.cli.bench.platforms import CudaPlatform, HostPlatform, driver_version


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), ("64K", 65536), ("16MiB", 1 << 24), ("1gb", 1 << 30)]
)
def test_sizes_are_read(text, size):
    assert report.number_of_bytes(text) == size


@given(st.integers(1, 1 << 40))
def test_sizes_are_shown_as_they_are_read(size):
    assert report.number_of_bytes(report.show_bytes(size).replace(" ", "")) == size


@pytest.mark.parametrize("text", ["", "-1", "0K", "1T", "1.5K", "K", "\u0661K"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        report.number_of_bytes(text)


def test_a_figure_is_the_median_of_the_slowest_ranks():
    case = Case("all_reduce", 1 << 20, "float32", "sum", 2)
    row = report.figure(case, "nccl", "device_us", [[1.0, 9.0, 5.0], [2.0, 3.0, 8.0]], 20)
    assert (row["us"], row["least_us"], row["most_us"], row["rounds"]) == (8.0, 2.0, 9.0, 3)
    assert row["bus_gbps"] == round((1 << 20) / 8e3, 2)
    assert row["op"] == "sum"


def test_the_table_marks_where_a_peer_is_faster():
    def row(engine, size, us):
        case = Case("all_gather", size, "float32", "sum", 2)
        return report.figure(case, engine, "device_us", [[us]], 20)

    rows = [row("cupy-zc", 1024, 2.0), row("nccl", 1024, 4.0), row("nccl4py", 1024, 5.0)]
    rows += [row("cupy-zc", 1 << 20, 6.2), row("nccl", 1 << 20, 6.0)]
    rows += [row("cupy-zc", 1 << 24, 300.0), row("nccl", 1 << 24, 299.0)]
    rows += [row("nccl", 1 << 30, 2000.0)]
    rows.append(report.ceiling("copy engine push", 256 << 20, 394.0, 390.0))
    lines = [line.split() for line in report.tables(rows).splitlines()]
    assert lines[0] == ["all_gather,", "us"]
    assert lines[1][:3] == ["cupy-zc", "nccl", "nccl4py"]
    assert lines[2] == ["1", "KiB", "2.00", "4.00", "5.00", "0.50"]
    assert lines[3] == ["1", "MiB", "6.20", "6.00", "-", "1.03", "!"]
    assert lines[4] == ["16", "MiB", "300", "299", "-", "1.00"]
    assert lines[5] == ["1", "GiB", "-", "2000", "-", "-"]
    assert lines[-1] == ["copy", "engine", "push", "394", "390"]


def reference(case, inputs, rank):
    """What a rank gets, with NumPy on the whole inputs."""
    mine = slice(rank * case.part, (rank + 1) * case.part)
    fold = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[case.op]
    if case.reduces:
        total = inputs[0]
        for array in inputs[1:]:
            total = fold(total, array)
        return total[mine] if case.collective == "reduce_scatter" else total
    return {
        "all_gather": lambda: np.concatenate(inputs),
        "gather": lambda: np.concatenate(inputs),
        "scatter": lambda: inputs[case.root][mine],
        "broadcast": lambda: inputs[case.root],
        "send_recv": lambda: inputs[rank ^ 1],
        "all_to_all": lambda: np.concatenate([array[mine] for array in inputs]),
    }[case.collective]()


@given(
    st.sampled_from(COLLECTIVES), st.sampled_from(DTYPES), st.sampled_from(OPS),
    st.sampled_from([2, 4, 6, 8]), st.integers(1, 700), st.data(),
)  # fmt: skip
def test_the_reference_is_what_numpy_says(collective, dtype, op, ranks, part, draw):
    case = Case(collective, 0, dtype, op, ranks)
    root = draw.draw(st.integers(0, ranks - 1))
    case = Case(collective, part * ranks * case.type.itemsize, dtype, op, ranks, root)
    inputs = [np.empty(case.send_count, case.type) for _ in range(ranks)]
    for rank, array in enumerate(inputs):
        data.fill(np, case, rank, array)
    rank = draw.draw(st.sampled_from([rank for rank in range(ranks) if case.gets(rank)]))
    output = reference(case, inputs, rank).copy()
    assert output.size == case.recv_count
    assert data.mistake(np, case, rank, output) == (0, "")
    at = draw.draw(st.integers(0, output.size - 1))
    output.view(f"u{case.type.itemsize}")[at] ^= 1
    count, words = data.mistake(np, case, rank, output)
    assert count == 1
    assert words.startswith(f"1 wrong elements, the first at {at:,}:")
    data.poison(np, output)
    count, words = data.mistake(np, case, rank, output)
    assert count == output.size
    assert words.startswith(f"{output.size:,} wrong elements")


@pytest.mark.parametrize("collective", ["reduce", "gather"])
def test_only_the_root_has_an_output(collective):
    case = Case(collective, 64, "int32", "sum", 4, root=2)
    assert [case.gets(rank) for rank in range(4)] == [False, False, True, False]
    assert data.mistake(np, case, 0, np.zeros(case.recv_count, "i4")) == (0, "")
    assert data.mistake(np, case, 2, np.zeros(case.recv_count, "i4"))[0] == case.recv_count


def test_long_arrays_are_filled_and_compared_in_pieces(monkeypatch):
    case = Case("all_reduce", 400, "int32", "sum", 2)
    whole, pieces = np.empty(100, "i4"), np.empty(100, "i4")
    data.fill(np, case, 1, whole)
    monkeypatch.setattr(data, "_CHUNK", 7)
    data.fill(np, case, 1, pieces)
    assert (whole == pieces).all()
    right = data.expected(case, 1, np.arange(100)).astype("i4")
    assert data.mistake(np, case, 1, right) == (0, "")
    right[[50, 90]] -= 1  # in two pieces
    count, words = data.mistake(np, case, 1, right)
    assert count == 2
    assert words.startswith("2 wrong elements, the first at 50:")


def test_sizes_are_rounded_down_to_whole_parts():
    case = Case("reduce_scatter", 1000, "float64", "sum", 3)
    assert (case.count, case.part, case.nbytes) == (123, 41, 984)
    assert (case.send_count, case.recv_count) == (123, 41)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_in_place_input_and_output_are_one_array_or_a_part_of_it(collective):
    case = Case(collective, 96, "int32", "sum", 3, in_place=True)
    send, recv = (np.zeros(200, np.uint8) for _ in range(2))
    given, taken = places(case, 1, send, recv)
    assert (given.size, taken.size) == (case.send_count, case.recv_count)
    start, parts = recv.ctypes.data, 32 * (case.send_count != case.recv_count)
    shifts = [array.ctypes.data - start for array in (given, taken)]
    assert sorted(shifts) == [0, parts]  # a part is the rank's own
    whole, part = sorted((given, taken), key=lambda array: -array.size)
    assert whole.ctypes.data == start
    assert np.shares_memory(whole, part)


def _deliver(collective, ranks, root, in_place):
    """What NCCL's point-to-point calls move: outputs of all ranks."""
    case = Case(collective, ranks * 8, "int64", "sum", ranks, root, in_place)
    send, recv = ([np.zeros(ranks * 8, np.uint8) for _ in range(ranks)] for _ in range(2))
    views = [places(case, rank, send[rank], recv[rank]) for rank in range(ranks)]
    for rank, (source, target) in enumerate(views):
        data.poison(np, target)
        if case.gives(rank):
            data.fill(np, case, rank, source)
    before = [source.copy() for source, _ in views]
    letters_of = [letters(case, rank) for rank in range(ranks)]
    count = case.count if collective == "send_recv" else case.part
    for rank, (_, takes) in enumerate(letters_of):
        for peer, offset in takes:
            ((_, start),) = [letter for letter in letters_of[peer][0] if letter[0] == rank]
            values = before[peer][start // 8 :][:count]
            views[rank][1][offset // 8 :][:count] = values
    assert sum(len(gives) for gives, _ in letters_of) == sum(len(t) for _, t in letters_of)
    return [data.mistake(np, case, rank, taken) for rank, (_, taken) in enumerate(views)]


@pytest.mark.parametrize("root", [0, 3])
@pytest.mark.parametrize(
    ("collective", "in_place"),
    [("gather", False), ("gather", True), ("scatter", False), ("scatter", True),
     ("all_to_all", False), ("send_recv", False)],
)  # fmt: skip
def test_every_letter_of_nccl_has_a_reader_and_gives_what_must_come_out(collective, in_place, root):
    assert _deliver(collective, 4, root, in_place) == [(0, "")] * 4


def test_nccl_is_found_where_the_wheels_of_nvidia_put_it(tmp_path):
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    assert libraries.find([str(tmp_path)]) == "libnccl.so.2"
    (folder / "libnccl.so.2").touch()
    assert libraries.find(["", str(tmp_path)]) == str(folder / "libnccl.so.2")


def test_a_library_that_cannot_be_loaded_makes_its_engines_unavailable(monkeypatch, tmp_path):
    broken = tmp_path / "libnccl.so.2"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(libraries, "find", lambda path: str(broken))
    libraries.library.cache_clear()
    with pytest.raises(Unavailable, match="libnccl"):
        libraries.library()


class _Library:
    """Stands for NCCL."""

    @staticmethod
    def ncclGetErrorString(result):  # noqa: N802
        return b"invalid usage" if result == 5 else b"no error"

    @staticmethod
    def ncclCommRegister(comm):  # noqa: N802
        return comm


def test_a_result_of_nccl_becomes_an_error_that_names_the_call(monkeypatch):
    library = _Library()
    for name in ("ncclGetErrorString", "ncclCommRegister"):
        function = getattr(_Library, name)
        monkeypatch.setattr(library, name, lambda result, _f=function: _f(result), raising=False)
    monkeypatch.setattr(libraries, "library", lambda: library)
    libraries.call("ncclCommRegister", 0)
    with pytest.raises(RuntimeError, match="ncclCommRegister returned 5: invalid usage"):
        libraries.call("ncclCommRegister", 5)
    with pytest.raises(Unavailable, match="this NCCL has no ncclCommWindowRegister"):
        libraries.call("ncclCommWindowRegister")


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_complete_and_loads_without_its_library(name):
    assert not load(name).__abstractmethods__


@pytest.mark.parametrize("name", ["json:dumps", "json:nothing", "json"])
def test_what_is_no_engine_is_refused(name):
    with pytest.raises(Unavailable, match="is not an engine"):
        load(name)


def test_the_version_of_the_kernel_driver_is_read(tmp_path):
    file = tmp_path / "version"
    assert driver_version(file) == ""
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release\n"
    )
    assert driver_version(file) == "580.159.03"
    file.write_text("nothing")
    assert driver_version(file) == ""


def test_eager_calls_are_timed_until_the_stream_is_done():
    platform = CudaPlatform.__new__(CudaPlatform)
    platform.stream = SimpleNamespace(synchronize=lambda: time.sleep(0.002))
    assert platform.eager_microseconds(lambda: None) > 2000


def test_the_host_platform_repeats_calls_and_times_them():
    platform, calls = HostPlatform(), []
    replay = platform.capture(lambda: calls.append(time.sleep(0.001)), 5)
    assert calls == []
    assert platform.microseconds(replay) > 5000
    assert len(calls) == 5
