"""Work of one's own on streams of either driver."""

from __future__ import annotations

import contextlib
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


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_on_a_stream_of_cupy_work_is_done_now_with_that_stream_as_the_current_one(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    current: list[Any] = []

    class Stream:
        ptr = 1

        def use(self) -> None:
            current.append(self)

    before, stream, seen = Stream(), Stream(), []
    before.use()
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: current[-1])

    def work() -> None:
        seen.append(current[-1])
        if error is not None:
            raise error

    with pytest.raises(error) if error is not None else contextlib.nullcontext():
        cupy_zc.enqueue(work, stream)
    assert seen == [stream]
    assert current[-1] is before


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
