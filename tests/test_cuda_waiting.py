"""Waiting for a device by freeing memory: what threads that wait at once leave behind."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from group_workers import in_threads

from cupy_zc.driver import cuda_waiting
from cupy_zc.driver.cuda_waiting import SPARE, Waiting


class Memory:
    """What is allocated; to free something waits for the other threads to be at it, too."""

    def __init__(self, threads: int) -> None:
        self.live: set[int] = set()
        self._numbers = itertools.count()
        self._meeting = threading.Barrier(threads, timeout=20)

    def call(self, name: str, *arguments: Any, detail: str) -> Any:
        assert detail.startswith("device=3")
        if name == "cuMemAlloc":
            assert arguments == (SPARE,)
            number = next(self._numbers)
            self.live.add(number)
            return number
        assert name == "cuMemFree"
        self._meeting.wait()
        self.live.remove(arguments[0])
        return None


class Contexts:
    @contextlib.contextmanager
    def current(self, device: int) -> Iterator[None]:
        assert device == 3
        yield


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_that_wait_at_once_again_and_again_keep_a_piece_each_at_most(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends: each wait beside another one forgot what the other had put back, 2 MiB a time."""
    memory = Memory(threads)
    monkeypatch.setattr(cuda_waiting, "call", memory.call)
    monkeypatch.setattr(cuda_waiting, "relaxed_capture", contextlib.nullcontext)
    waiting = Waiting(Contexts())  # type: ignore[arg-type]
    waiting.prepare(3)
    start = threading.Barrier(threads, timeout=20)

    def wait(_: int) -> None:
        for _ in range(20):
            start.wait()
            waiting.wait(3)

    for outcome in in_threads(threads, wait):
        assert outcome is None
    assert 1 <= len(memory.live) <= threads
