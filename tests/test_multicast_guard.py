"""Who may use multicast: switches that nothing overrules, devices, and what users may ask for."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import cupy
import multicast_workers as work
import numpy as np
import pytest
from multicast_workers import (
    GRANULE,
    ON,
    arrays,
    bindings,
    casting,
    each,
    fine,
    group_workers,
    multicast,
    off,
    one_status,
    register,
    workers,
)
from probes import clean_environment, run

from cupy_zc import (
    Communicator,
    InvalidValueError,
    MemoryPool,
    MismatchError,
    MulticastUnavailableError,
    NotZeroCopyError,
    asnumpy,
    copyto,
)
from cupy_zc.collectives import opening
from cupy_zc.config import MULTICAST_GUARDS, multicast_refusal
from cupy_zc.driver.host import HostDriver
from cupy_zc.group import in_process
from cupy_zc.registration import MulticastStatus

SWITCHES = [("CUPY_ZC_MULTICAST", "off"), *MULTICAST_GUARDS.items()]


@pytest.mark.skipif(multicast_refusal() is None, reason="multicast is not switched off here")
def test_the_rest_of_this_file() -> None:
    work.run_elsewhere(__file__)


# Switches

_COUNTED = """
    import os, sys
    import cupy_zc
    from cupy_zc import Communicator, MulticastUnavailableError
    from cupy_zc.driver.host import HostDriver
    name, value = sys.argv[1:3]
    asked = []
    for call in ("multicast_create", "multicast_import", "multicast_add_device", "multicast_bind"):
        def counted(self, *arguments, call=call, real=getattr(HostDriver, call)):
            asked.append(call)
            return real(self, *arguments)
        setattr(HostDriver, call, counted)
    driver = HostDriver(devices=3, granularity=1 << 16, memory=256 << 20)
    def make(**options):
        return Communicator.in_process(3, devices=[0, 1, 2], driver=driver, **options)
"""


@pytest.mark.parametrize(("name", "value"), SWITCHES)
def test_a_switch_in_the_environment_means_that_no_object_is_asked_for(
    name: str, value: str
) -> None:
    code = (
        _COUNTED
        + """
    os.environ.pop(name)  # too late to overrule it
    comms = make()
    (status,) = {comm.multicast for comm in comms}
    assert status.state == "off", status
    assert f"{name}={value} on ranks 0, 1, 2" in status.reason, status
    try:
        make(multicast="require")
    except MulticastUnavailableError as error:
        assert f"{name}={value}" in str(error), error
    else:
        raise AssertionError("it was overruled")
    print(len(asked), driver.multicast_objects_created)
    """
    )
    environment = {**clean_environment(), name: value}
    assert run(code, name, value, environment=environment) == "0 0"


@pytest.mark.parametrize(("name", "value"), SWITCHES)
def test_a_switch_that_is_set_later_lets_no_further_object_be_made(name: str, value: str) -> None:
    code = (
        _COUNTED
        + """
    import threading, cupy, numpy
    comms = make()
    assert {comm.multicast.state for comm in comms} == {"on"}
    before = (len(asked), driver.multicast_objects_created)
    os.environ[name] = value
    def body(comm, device):
        with driver.use_device(device):
            array = cupy.ndarray(9, numpy.uint8, memptr=pool.malloc(9))
        comm.register(array)
    pool = cupy_zc.MemoryPool(driver=driver, segment_size=1 << 16)
    threads = [threading.Thread(target=body, args=(comm, at)) for at, comm in enumerate(comms)]
    for thread in threads: thread.start()
    for thread in threads: thread.join(20)
    (status,) = {comm.multicast for comm in comms}
    assert status.state == "on"  # what was made before is there
    assert f"{name}={value} on ranks 0, 1, 2" in dict(status.fallen)[1], status
    assert (len(asked), driver.multicast_objects_created) == before
    more = make()
    assert {comm.multicast.state for comm in more} == {"off"}
    assert (len(asked), driver.multicast_objects_created) == before
    for comm in comms + more: comm.close()
    print("fine")
    """
    )
    assert run(code, name, value, environment=clean_environment()).endswith("fine")


def _switched_off_on_one(rank: int, n: int, port: int) -> list[Any]:
    if rank == 1:
        os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
    with workers._process(rank, n, port) as me:
        work.begin(me, require=False)
        status = multicast(me).status
        return [status.state, status.reason, me.driver.calls["multicast_create"]]


@off
def test_a_switch_on_one_rank_is_one_for_all() -> None:
    port = group_workers.free_port()
    outcomes = group_workers.in_processes("forkserver", 3, _switched_off_on_one, port)
    for _, (state, reason, created) in outcomes:
        assert (state, created) == ("off", 0)
        assert reason.startswith("NVSHMEM_DISABLE_NVLS=1 on rank 1 switches it off; start every")


# Who can


@off
@pytest.mark.parametrize("require", [False, True])
def test_a_device_without_multicast_on_one_rank_is_none_for_all(require: bool) -> None:
    with workers.ranks(3) as made:
        info = dataclasses.replace(made[2].driver.device_info(0), multicast=False)
        made[2].driver.device_info = lambda device: info
        outcomes = each(made, lambda rank: work.begin(rank, require=require))
        words = "rank 2 has no multicast, as the devices say"
        if require:
            assert [type(each) for each in outcomes] == [MulticastUnavailableError] * 3
            assert all(words in str(error) for error in outcomes)
        assert one_status(made) == MulticastStatus("unavailable", words)
        assert [rank.driver.calls["multicast_create"] for rank in made] == [0] * 3


@off
def test_ranks_that_share_a_device_go_without() -> None:
    driver = HostDriver(granularity=GRANULE, devices=2)
    comms = Communicator.in_process(4, devices=[0, 1, 0, 0], driver=driver)
    words = "ranks 0, 2, 3 have a device in common, which can be part of a multicast object only"
    for comm in comms:
        assert comm.multicast.state == "unavailable"
        assert comm.multicast.reason.startswith(words)
        comm.close()
    with pytest.raises(MulticastUnavailableError, match=words):
        Communicator.in_process(4, devices=[0, 1, 0, 0], driver=driver, multicast="require")
    assert driver.multicast_objects_created == 0


@off
def test_an_engine_that_does_not_use_it_makes_no_object() -> None:
    with workers.ranks(3) as made:
        fine(made, lambda rank: multicast(rank).start(None, int, "test", require=False))
        status = one_status(made)
        assert status.state == "unavailable"
        assert status.reason == "ranks 0, 1, 2 have an engine that does not use multicast"


@off
def test_two_ranks_prefer_p2p_unless_multicast_is_required() -> None:
    with casting(2) as made:
        assert one_status(made).state == "off"
        assert "P2P moves fewer bytes" in one_status(made).reason
        register(made, arrays(made))
        assert [rank.driver.calls["multicast_create"] for rank in made] == [0, 0]
    with casting(2, require=True) as made:
        assert one_status(made) == ON
        register(made, arrays(made))
        assert list(bindings(made[1])) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("require", [False, True])
def test_one_rank_has_nobody_to_send_to(require: bool) -> None:
    with casting(1, require=require) as made:
        assert one_status(made) == MulticastStatus("off", "one rank has nobody to send to")


# What users ask for


@pytest.mark.parametrize("value", ["on", "off", True, None])
def test_other_values_are_refused_and_the_switch_is_named(value: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"multicast=.*CUPY_ZC_MULTICAST=off") as info:
        Communicator.in_process(2, multicast=value, driver="host")
    assert "Communicator.in_process" in str(info.value)


def test_ranks_must_ask_for_the_same() -> None:
    group = in_process(2)
    options = opening.Options.of("test", driver=HostDriver(devices=2))

    def body(rank: int) -> None:
        mine = dataclasses.replace(
            options, device=rank, threads=True, multicast=("auto", "require")[rank]
        )
        opening.start(Communicator, group[rank], mine)

    outcomes = group_workers.in_threads(2, body)
    assert [type(outcome) for outcome in outcomes] == [MismatchError] * 2
    assert "'require'" in str(outcomes[0])


def _comms(n: int = 3, **options: Any) -> list[Communicator]:
    driver = HostDriver(devices=n, granularity=GRANULE)
    return Communicator.in_process(
        n, devices=list(range(n)), driver=driver, multicast="require", **options
    )


def _on_all(comms: list[Communicator], body: Any) -> list[Any]:
    def guarded(rank: int) -> Any:
        driver: Any = comms[rank]._driver
        with driver.use_device(rank):
            return body(comms[rank])

    return group_workers.in_threads(len(comms), guarded)


#: Each collective that multicast carries, with the shapes of its arrays for three ranks.
CARRIED = {
    "all_reduce": ((6,), (6,), ()),
    "reduce_scatter": ((6,), (2,), (2,)),
    "all_gather": ((2,), (6,), (2,)),
    "broadcast": ((6,), (6,), (1,)),
}


def _call(comm: Communicator, call: str, source: cupy.ndarray, target: cupy.ndarray) -> None:
    if call == "broadcast":
        comm.broadcast(target, *CARRIED[call][2])
    else:
        getattr(comm, call)(source, target, *CARRIED[call][2])
    comm.synchronize()


@off
@pytest.mark.parametrize("call", CARRIED)
def test_strict_calls_with_arrays_at_one_offset_are_carried(call: str) -> None:
    comms = _comms(strict=True)

    def body(comm: Communicator) -> None:
        source, target = (comm.zeros(shape, "f4") for shape in CARRIED[call][:2])
        copyto(source, np.ones(source.shape, "f4"))
        _call(comm, call, source, target)
        assert comm.explain(target)[-1].passed

    group_workers.all_fine(_on_all(comms, body))
    for comm in comms:
        comm.close()


@off
@pytest.mark.parametrize("call", CARRIED)
@pytest.mark.parametrize("which", ["input", "output"])
def test_strict_calls_with_arrays_at_different_offsets_are_refused_on_all_ranks(
    call: str, which: str
) -> None:
    needed = {"reduce_scatter": ("input",), "all_reduce": (which,)}.get(call, ("output",))
    comms = _comms(strict=True)

    def body(comm: Communicator) -> None:
        shapes = CARRIED[call][:2]
        pairs = [[comm.zeros(shape, "f4") for _ in range(2)] for shape in shapes]
        uneven = comm.rank == 1
        source = pairs[0][which == "input" and uneven]
        target = pairs[1][which == "output" and uneven]
        copyto(target, np.full(target.shape, 7, "f4"))
        if which not in needed:
            _call(comm, call, source, target)
            return
        with pytest.raises(NotZeroCopyError) as info:
            _call(comm, call, source, target)
        text = str(info.value)
        assert f"multicast is required, and the {which} cannot be reached by it" in text
        assert "is at different places" in text
        assert "arena 0, offset" in text
        assert (asnumpy(target) == 7).all()  # nothing was written
        _call(comm, call, pairs[0][0], pairs[1][0])  # and the ranks are in step

    group_workers.all_fine(_on_all(comms, body))
    for comm in comms:
        comm.close()


@off
def test_strict_calls_with_what_is_registered_but_not_bound_are_refused_on_all_ranks() -> None:
    comms = _comms(strict=True)

    def body(comm: Communicator) -> None:
        pool = MemoryPool(driver=comm._driver, segment_size=GRANULE)
        size = GRANULE * (1 + (comm.rank == 2))  # the same offset, another size
        array = cupy.ndarray(6, "f4", memptr=pool.malloc(size))
        with comm.register(array), pytest.raises(NotZeroCopyError, match="a segment of the same"):
            comm.all_reduce(array, array)
            comm.synchronize()
        comm.barrier()

    group_workers.all_fine(_on_all(comms, body))
    for comm in comms:
        comm.close()


@off
def test_calls_that_multicast_does_not_carry_are_none_of_its_business() -> None:
    comms = _comms(strict=True)

    def body(comm: Communicator) -> None:
        arrays = [comm.zeros((3, 2), "f4") for _ in range(4)]
        uneven = comm.rank == 1
        comm.all_to_all(arrays[uneven], arrays[2 + uneven])
        comm.synchronize()

    group_workers.all_fine(_on_all(comms, body))
    for comm in comms:
        comm.close()


@off
def test_without_strict_an_array_elsewhere_is_fine() -> None:
    comms = _comms()

    def body(comm: Communicator) -> float:
        arrays = [comm.zeros(6, "f4") for _ in range(2)]
        mine = arrays[comm.rank == 1]
        copyto(mine, np.ones(6, "f4"))
        comm.all_reduce(mine, mine)
        comm.synchronize()
        return float(asnumpy(mine)[0])

    assert group_workers.all_fine(_on_all(comms, body)) == [3.0] * 3
    for comm in comms:
        comm.close()
