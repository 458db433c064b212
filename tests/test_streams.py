"""Work of one's own on streams of either driver."""

from __future__ import annotations

from typing import Any

import cupy
import pytest

import cupy_zc
from cupy_zc.driver import select


def test_work_is_done_in_the_order_of_its_stream() -> None:
    stream, done = select("host").make_stream(), []
    hold = stream.hold()
    cupy_zc.enqueue(lambda: done.append(1), stream)
    assert done == []
    hold.release()
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        cupy_zc.enqueue(lambda: 1 / 0, stream)


def test_work_on_a_capturing_stream_is_done_in_each_replay() -> None:
    stream, done = cupy_zc.Stream(driver="host"), []
    stream.begin_capture()
    cupy_zc.enqueue(lambda: done.append(1), stream)
    graph = stream.end_capture()
    assert done == []
    graph.launch(stream)
    graph.launch(stream)
    assert done == [1, 1]


def test_on_a_stream_of_cupy_work_is_done_now_with_that_stream_as_the_current_one() -> None:
    class Stream:
        ptr, inside = 1, False

        def __enter__(self) -> None:
            self.inside = True

        def __exit__(self, *error: object) -> None:
            self.inside = False

    stream, seen = Stream(), []
    cupy_zc.enqueue(lambda: seen.append(stream.inside), stream)
    assert seen == [True]


@pytest.mark.parametrize("wrong", [None, 7, "stream"])
def test_what_is_no_stream_is_refused(wrong: Any) -> None:
    with pytest.raises(cupy_zc.InvalidTypeError, match="a stream of CuPy or the host driver"):
        cupy_zc.enqueue(lambda: None, wrong)


@pytest.mark.gpu
def test_kernels_go_to_the_stream_and_into_its_graph() -> None:
    stream, array = cupy_zc.Stream(driver="cuda", non_blocking=True), cupy.zeros(10)
    cupy_zc.enqueue(lambda: array.__iadd__(1), stream)
    stream.synchronize()
    stream.begin_capture()
    cupy_zc.enqueue(lambda: array.__iadd__(1), stream)
    graph = stream.end_capture()
    assert float(array[0]) == 1
    graph.launch(stream)
    stream.synchronize()
    assert float(array[0]) == 2
