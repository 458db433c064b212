"""The order of a communicator's calls, graphs, how it is made and how it ends."""

from __future__ import annotations

import json
import threading
import time
import warnings
from typing import Any

import collective_workers as work
import cupy
import numpy as np
import pytest

import cupy_zc
from cupy_zc import (
    ClosedError,
    Communicator,
    Error,
    InvalidTypeError,
    InvalidValueError,
    MismatchError,
    PeerTimeoutError,
)
from cupy_zc.collectives import Transfer
from cupy_zc.collectives import communicator as communicator_module
from cupy_zc.collectives.opening import Options, start
from cupy_zc.driver.host import HostDriver
from cupy_zc.group import in_process

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no NCCL here


def _sum(comm: Communicator, array: cupy.ndarray) -> int:
    cupy_zc.copyto(array, comm.rank + 1)
    comm.all_reduce(array, array)
    return int(cupy_zc.asnumpy(array)[0])


# Streams and graphs


def test_a_call_waits_for_its_stream_and_other_streams_for_the_call() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> list[int]:
            array = comm.empty(4, "i4")
            cupy_zc.copyto(array, 1)
            one, other = comm._driver.make_stream(), comm._driver.make_stream()
            comm.barrier()
            hold = one.hold()
            comm.all_reduce(array, array, stream=one)
            with other:
                comm.all_reduce(array, array, "prod")
            early = int(cupy_zc.view(array)[0])
            comm.check()
            hold.release()  # 1 + 1, and then 2 * 2; the other order gives 2
            comm.synchronize()
            comm.barrier()
            return [early, int(cupy_zc.asnumpy(array)[0])]

        assert work.run(comms, body) == [[1, 4]] * 2


def test_what_queued_work_raises_comes_at_synchronize() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            array, stream = comm.empty(4, "i4"), comm._driver.make_stream()
            comm.barrier()
            with stream.hold():
                comm.reduce(array, array, comm.rank, stream=stream)
            with pytest.raises(MismatchError, match="root=1"):
                comm.synchronize()
            assert _sum(comm, array) == 3

        work.run(comms, body)


def test_threads_take_turns_on_one_communicator() -> None:
    with work.communicators(1) as (comm,):
        arrays = [comm.empty(64, "i4") for _ in range(6)]
        errors: list[BaseException] = []

        def use(array: cupy.ndarray) -> None:
            try:
                for _ in range(50):
                    assert _sum(comm, array) == 1
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=use, args=(array,)) for array in arrays]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not errors


def test_a_captured_collective_is_replayed_with_the_data_of_each_time() -> None:
    with work.communicators(3) as comms:

        def body(comm: Communicator) -> None:
            given, taken = comm.empty(50, "i4"), comm.empty(50, "i4")
            cupy_zc.copyto(taken, 0)
            stream = comm._driver.make_stream()
            number = comm._line.counts.numbered
            stream.begin_capture()
            with stream:
                comm.all_reduce(given, taken)
                comm.broadcast(taken, 1)
                with pytest.raises(Error, match=r"barrier .*a capture cannot record"):
                    comm.barrier()
            graph = stream.end_capture()
            assert (cupy_zc.view(taken) == 0).all()
            assert comm._line.counts.numbered == number  # captured calls are not numbered
            for turn in range(100):
                cupy_zc.copyto(given, np.arange(50) + turn * comm.rank)
                graph.launch(stream)
                stream.synchronize()
                assert (cupy_zc.view(taken) == 3 * np.arange(50) + 3 * turn).all()
                if turn % 10 == 0:  # eager calls in between
                    assert _sum(comm, given) == 6
            comm.barrier()

        work.run(comms, body)


def test_a_stream_of_another_kind_is_refused() -> None:
    with work.communicators(1) as (comm,):
        array = comm.empty(4)
        with pytest.raises(InvalidTypeError, match="a stream of the host driver"):
            comm.all_reduce(array, array, stream="stream 7")
        with pytest.raises(cupy_zc.DriverError, match="another driver"):
            comm.all_reduce(array, array, stream=HostDriver().make_stream())
        comm.all_reduce(array, array, stream=comm._driver.current_stream())


# Parts, and the end


def test_parts_work_at_once_and_outlive_the_whole() -> None:
    with work.communicators(4) as comms:

        def body(comm: Communicator) -> tuple[int, int, int]:
            part = comm.split(comm.rank % 2, -comm.rank)
            nobody = comm.split(None if comm.rank else 5)
            assert (nobody is None) == (comm.rank > 0)
            assert part is not None
            comm.close()
            if nobody is not None:
                nobody.close()
            with part:
                array = part.zeros(10, "i4")
                for _ in range(40):
                    cupy_zc.copyto(array, comm.rank)
                    part.all_reduce(array, array)
                return part.rank, part.size, int(cupy_zc.asnumpy(array)[0])

        assert work.run(comms, body) == [(1, 2, 2), (1, 2, 4), (0, 2, 2), (0, 2, 4)]


def test_what_the_last_call_did_can_be_asked_after_close() -> None:
    with work.communicators(2) as comms:

        def body(comm: Communicator) -> None:
            array = comm.zeros(10, "i4")
            comm.all_reduce(array, array)
            comm.close()
            assert comm.last_transfer is not None
            assert comm.last_transfer.operation == "all_reduce"

        work.run(comms, body)


def test_at_exit_all_communicators_are_closed_though_one_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comms = [Communicator.in_process(1, driver=HostDriver())[0] for _ in range(3)]

    def refuse(force: bool = False) -> None:
        raise Error("not this one")

    monkeypatch.setattr(comms[1], "close", refuse)
    with pytest.raises(Error, match="not this one"):
        communicator_module._close_all()
    monkeypatch.undo()
    assert [comm._line.closed for comm in comms] == [True, False, True]
    comms[1].close()


def test_a_closed_communicator_refuses_every_call_and_closes_again() -> None:
    with work.communicators(1) as (comm,):
        array = comm.empty(4, "i4")
        assert repr(comm) == "<Communicator, rank 0 of 1, host engine>"
        assert comm.leases() == ()
        assert comm.backend == "host"
        comm.stop()
        comm.close()
        assert "closed" in repr(comm)
        for call in (
            lambda: comm.all_reduce(array, array),
            lambda: comm.send(array, 0),
            lambda: comm.empty(3),
            lambda: comm.register(array),
            lambda: comm.explain(array),
            comm.barrier, comm.collect, comm.check, comm.synchronize, lambda: comm.split(0),
        ):  # fmt: skip
            with pytest.raises(ClosedError, match=r"\(rank 0 of 1\): this communicator is closed"):
                call()
        assert cupy_zc.asnumpy(array).shape == (4,)  # arrays outlive it


def test_a_rank_that_stops_calling_is_named_at_the_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with work.communicators(3, timeout=0.6) as comms:

        def body(comm: Communicator) -> Any:
            array = comm.empty(4, "i4")
            for _ in range(2):
                _sum(comm, array)
            if comm.rank == 1:
                time.sleep(1)
            began = time.monotonic()
            with pytest.raises(PeerTimeoutError) as caught:
                comm.all_reduce(array, array)
            assert time.monotonic() - began < 3
            with pytest.raises(ClosedError, match="cannot be used since a call failed") as later:
                comm.all_reduce(array, array)
            assert later.value.__cause__ is caught.value
            with pytest.raises(ClosedError):
                comm.check()
            comm.close()
            return caught.value.ranks

        ranks = work.run(comms, body)
        assert ranks[0] == ranks[2] == (1,)
        assert set(ranks[1]) <= {0, 2}


def test_a_rank_that_closed_is_named_at_once_by_those_that_still_call() -> None:
    with work.communicators(3) as comms:

        def body(comm: Communicator) -> tuple[int, ...]:
            array = comm.empty(4, "i4")
            for _ in range(2):
                _sum(comm, array)
            if comm.rank == 2:
                comm.close()
                return ()
            began = time.monotonic()
            with pytest.raises(PeerTimeoutError, match="rank 2 has gone") as caught:
                comm.all_reduce(array, array)
            assert time.monotonic() - began < 5
            return caught.value.ranks

        assert work.run(comms, body) == [(2,), (2,), ()]


def test_a_rank_that_leaves_at_an_agreed_point_ends_the_communicator_too() -> None:
    with work.communicators(2) as comms:
        comms[1].close()
        array = cupy.ndarray(0, "i4", cupy_zc.MemoryPool(driver="host").malloc(0))
        with pytest.raises(PeerTimeoutError):
            comms[0].register(array)
        with pytest.raises(ClosedError, match="rank 1 has gone"):
            comms[0].barrier()


def test_nothing_is_left_of_a_communicator(resources: Any) -> None:
    for _ in range(3):
        with work.communicators(3, driver=HostDriver(granularity=1 << 12)) as comms:
            work.run(comms, lambda comm: _sum(comm, comm.empty(1000, "i4")))
    del comms


# Making one


def test_wrong_options_are_refused() -> None:
    make = Communicator.in_process
    with pytest.raises(InvalidValueError, match=r"backend='nccl' .* 'auto' or 'host'"):
        make(1, backend="nccl", driver="host")
    with pytest.raises(InvalidValueError, match="register='often'"):
        make(1, register="often", driver="host")
    with pytest.raises(InvalidValueError, match=r"timeout=0 .* positive"):
        make(1, timeout=0, driver="host")
    with pytest.raises(InvalidTypeError, match="strict"):
        make(1, strict="very", driver="host")  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match=r"n=0|size=0"):
        make(0, driver="host")
    with pytest.raises(InvalidValueError, match="devices"):
        make(2, devices=[0], driver="host")
    with pytest.raises(InvalidValueError, match="devices"):
        make(1, devices=[7], driver="host")
    with pytest.raises(InvalidValueError, match="rank=3"):
        cupy_zc.init_process_group(2, 3)

    class Other(HostDriver):
        name = "another"

    with pytest.raises(Error, match="no engine for the another driver"):
        make(1, driver=Other())


def test_ranks_that_choose_differently_all_get_a_mismatch() -> None:
    group = in_process(2)

    def body(rank: int) -> str:
        options = Options.of("x", driver="host", register=("auto", "manual")[rank])
        with pytest.raises(MismatchError) as caught:
            start(Communicator, group[rank], options)
        return str(caught.value)

    texts = work.workers.all_fine(work.workers.in_threads(2, body))
    assert texts[0] == texts[1]
    assert "'auto'" in texts[0]
    assert "'manual'" in texts[0]


def test_ranks_may_be_on_devices_of_their_own() -> None:
    driver = HostDriver(granularity=1 << 12, devices=2, memory=1 << 28)
    with work.communicators(2, driver=driver, devices=[1, 0]) as comms:

        def body(comm: Communicator) -> int:
            return _sum(comm, comm.empty(4, "i4"))

        assert work.run(comms, body) == [3, 3]
        pool = cupy_zc.MemoryPool(driver=driver)
        with driver.use_device(0):
            array = cupy.ndarray(4, "f4", pool.malloc(16))
        with pytest.raises(InvalidValueError, match=r"an array of device 0.* device 1"):
            comms[0].all_reduce(array, array)


def test_transfer_is_plain_data() -> None:
    transfer = Transfer("all_reduce", "two_shot", True, "", 8)
    assert json.loads(json.dumps([transfer.operation, transfer.bytes])) == ["all_reduce", 8]
    with pytest.raises(AttributeError):
        transfer.bytes = 9  # type: ignore[misc]
