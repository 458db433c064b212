"""The current stream of the caller stays, whatever this package does on streams of its own.

Regression: in CuPy ``with stream:`` forgets what ``stream.use()`` chose before, so a communicator
that was opened made all later work of the caller go to the null stream.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import collective_workers as work
import pytest
from collective_workers import Buffers
from emulated import build_directory
from emulated_driver import emulated_device

import cupy_zc
from cupy_zc import Communicator, MemoryPool
from cupy_zc.driver import host_stream
from cupy_zc.driver.api import using_stream
from cupy_zc.driver.host import HostDriver


@pytest.fixture(params=["host", "device, emulated"])
def any_driver(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "host":
        yield HostDriver()
    else:
        with emulated_device(build_directory(request.config)) as driver:
            yield driver


def calls(comm: Communicator) -> list[tuple[str, Callable[[], object]]]:
    buffers = Buffers.of(comm)
    pool = MemoryPool(driver=comm._driver)
    array = comm.zeros(64, "f4")
    cases = [case for case in work.cases(comm.size) if case.dtype == "f4" and case.op == "sum"]
    return [
        *((str(case), lambda case=case: work.check(comm, case, buffers)) for case in cases[::9]),
        ("last_transfer", lambda: comm.last_transfer),
        ("send_recv", lambda: comm.send_recv(array, array, comm.rank ^ 1)),
        ("register", lambda: comm.register(pool).deregister()),
        ("register", lambda: comm.register(array)),
        ("collect", comm.collect),
        ("explain", lambda: comm.explain(array)),
        ("barrier", comm.barrier),
        ("copyto", lambda: cupy_zc.copyto(array, 3)),
        ("asnumpy", lambda: cupy_zc.asnumpy(array)),
        ("enqueue", lambda: cupy_zc.enqueue(lambda: None, comm._driver.make_stream())),
        ("split", lambda: comm.split(0).close()),
        ("synchronize", comm.synchronize),
        ("close", comm.close),
        ("last_transfer", lambda: comm.last_transfer.operation),
    ]


def test_no_call_changes_the_current_stream(any_driver: Any) -> None:
    with work.communicators(2, driver=any_driver) as comms:

        def body(comm: Communicator) -> None:
            mine = any_driver.make_stream(non_blocking=True)
            mine.use()
            for name, call in calls(comm):
                call()
                assert any_driver.current_stream() is mine, name

        work.run(comms, body)


def test_a_block_on_another_stream_ends_with_the_stream_before_also_when_it_raises() -> None:
    with HostDriver() as driver:
        mine, other = driver.make_stream(), driver.make_stream()
        mine.use()
        with pytest.raises(ZeroDivisionError), using_stream(other, driver.current_stream):
            assert driver.current_stream() is other
            raise ZeroDivisionError
        assert driver.current_stream() is mine


SOURCES = sorted(Path(cupy_zc.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_module_enters_a_stream(source: Path) -> None:
    entered = [
        ast.unparse(item.context_expr)
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.With)
        for item in node.items
        if isinstance(item.context_expr, (ast.Name, ast.Attribute))
    ]
    assert not [name for name in entered if name.rpartition(".")[2].endswith(("stream", "side"))]


def test_a_finalizer_may_ask_for_the_stream_in_the_first_question_of_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ends: an AttributeError where the collector runs while a thread gets a state of its own."""
    driver = HostDriver()
    make = host_stream._ThreadState.__init__
    asked: list[tuple[Any, int]] = []

    def interrupted(state: Any, null: Any) -> None:
        asked.append((driver.current_stream(), driver.current_device()))
        make(state, null)

    monkeypatch.setattr(host_stream._ThreadState, "__init__", interrupted)
    with ThreadPoolExecutor(1) as pool:
        own = pool.submit(driver.current_stream).result(timeout=10)
    assert asked == [(own, 0)]
    assert own.ptr == 0
