"""Registration without asking, and what ``explain`` says."""

from __future__ import annotations

import gc
import logging
import mmap

import cupy
import group_workers
import numpy as np
import pytest
import registration_workers as workers
from registration_workers import GRANULE, UNKNOWN, each, fine

import cupy_zc
from cupy_zc import AgreementError, MismatchError
from cupy_zc.memory.pool import reap
from cupy_zc.registration import Rule


@pytest.fixture(autouse=True)
def _nothing_is_left_open():
    with group_workers.flat_descriptors():
        yield
        gc.collect()
        reap()


def touch(rank, array):
    location = rank.registry.locate(array)
    assert not location.registered
    assert "not registered" in location.reason
    rank.registry.touched(location.segment)


def test_what_was_touched_is_registered_at_the_next_agreed_call_without_a_pin():
    def body(rank):
        if rank.rank == 0:
            rank.array(3 * GRANULE)
        array = rank.array(fill=60 + rank.rank)
        touch(rank, array)
        rank.registry.at_call(3)
        assert not rank.registry.locate(array).registered
        rank.registry.at_call(4)
        location = rank.registry.locate(array)
        assert location.registered
        segment = array.data.mem.segment
        assert segment.pins == 0
        assert segment.registered  # what pool.segments() shows
        place = f"{location.arena} {location.offset}".encode()
        places = [tuple(map(int, p.split())) for p in rank.channel.all_gather(place)]
        assert [rank.read(peer, places[peer]) for peer in range(3)] == [b"<", b"=", b">"]
        rank.channel.all_gather(b"")
        rank.registry.close()
        assert not segment.registered

    with workers.ranks(3) as made:
        fine(made, body)


def test_agreed_calls_are_the_powers_of_two_and_every_1024th():
    def body(rank):
        agreed = []
        for number in range(1, 3100):
            before = rank.channel._step
            rank.registry.at_call(number)
            if rank.channel._step > before:
                agreed.append(number)
        return agreed

    with workers.ranks(2) as made:
        expected = [1 << bit for bit in range(12)] + [3072]
        assert fine(made, body) == [expected, expected]


def test_an_automatic_registration_ends_when_the_pool_gives_the_segment_back():
    def body(rank):
        array = rank.array(GRANULE, fill=1)
        touch(rank, array)
        rank.registry.at_call(1)
        place = rank.registry.locate(array)[:2]
        if rank.rank == 0:
            del array
            rank.pool.free_all_blocks()
            assert rank.pool.total_bytes() == 0
            array = rank.array(GRANULE, fill=2)  # the same place, another segment
            assert not rank.registry.locate(array).registered
            touch(rank, array)
        rank.channel.all_gather(b"")
        if rank.rank == 1:
            assert rank.read(0, place) == b"\1"  # mapped, so it lives
        rank.registry.at_call(2)
        assert rank.registry.locate(array)[:3] == (*place, True)
        if rank.rank == 1:
            assert rank.read(0, place) == b"\2"
        rank.channel.all_gather(b"")

    with workers.ranks(2) as made:
        fine(made, body)


def test_what_was_touched_and_is_gone_or_never_qualified_is_passed_over():
    def body(rank):
        with rank.driver.use_device(1):
            elsewhere = rank.array()
        rank.registry.touched(elsewhere.data.mem.segment)
        array = rank.array(GRANULE)
        touch(rank, array)
        del array
        rank.pool.free_all_blocks()
        rank.registry.at_call(1)
        assert rank.registry._published == {}
        assert not rank.registry._touched

    with workers.ranks(2, devices=2) as made:
        fine(made, body)


def test_an_automatic_registration_outlives_an_explicit_one():
    def body(rank):
        array = rank.array()
        touch(rank, array)
        rank.registry.at_call(1)
        with rank.registry.register(array):
            pass
        rank.registry.collect()
        assert rank.registry.locate(array).registered

    with workers.ranks(2) as made:
        fine(made, body)


@pytest.mark.parametrize("step", ["export_segment", "import_segment", "set_access"])
def test_a_failure_of_automatic_registration_is_logged_and_no_error(step, caplog):
    with workers.ranks(3) as made:
        arrays = [rank.array() for rank in made]
        for rank, array in zip(made, arrays, strict=True):
            touch(rank, array)
        before = [rank.state() for rank in made]
        made[1].driver.fail[step] = [UNKNOWN]
        with caplog.at_level(logging.WARNING, "cupy_zc"):
            fine(made, lambda rank: rank.registry.at_call(1))
        assert len([r for r in caplog.records if "collectives stage them" in r.message]) == 3
        assert f"rank 1: DriverError: {step}" in caplog.text
        assert [rank.state() for rank in made] == before
        for rank, array in zip(made, arrays, strict=True):
            touch(rank, array)
        fine(made, lambda rank: rank.registry.at_call(2))
        assert all(r.registry.locate(a).registered for r, a in zip(made, arrays, strict=True))


def test_a_failure_to_collect_is_an_error_on_all_ranks():
    with workers.ranks(2) as made:
        for registration in fine(made, lambda rank: rank.registry.register(rank.array())):
            registration.deregister()
        made[0].driver.fail["unmap"] = [UNKNOWN]
        errors = each(made, lambda rank: rank.registry.collect())
        assert [type(error) for error in errors] == [AgreementError] * 2
        del errors
        fine(made, lambda rank: rank.registry.collect())


def test_different_call_numbers_are_a_mismatch_on_all_ranks():
    with workers.ranks(2) as made:
        errors = each(made, lambda rank: rank.registry.at_call(1 + rank.rank))
        assert [type(error) for error in errors] == [MismatchError] * 2
        assert "collective call 2" in str(errors[0])


# Explain

NAMES = (
    "memory of a pool",
    "can be shared",
    "size of the segment",
    "address of the segment",
    "device",
    "contiguous",
    "registered on this rank",
    "registered on every rank",
    "same offset on every rank",
    "multicast",
)


def verdicts(rank, array):
    rules = rank.registry.explain(array)
    assert tuple(rule.name for rule in rules) == NAMES
    for rule in rules:
        assert isinstance(rule, Rule)
        assert rule.detail
        assert bool(rule.remedy) == (not rule.passed)
    return {rule.name: rule for rule in rules}


def passed(rules):
    return "".join({True: "+", False: "-", None: "?"}[rule.passed] for rule in rules.values())


def test_explain_of_an_array_from_creation_to_release():
    def body(rank):
        array = rank.array()
        assert passed(verdicts(rank, array)) == "++++++-??-"
        touch(rank, array)
        rank.registry.at_call(1)
        assert passed(verdicts(rank, array)) == "+++++++??-"
        with rank.registry.register(array):
            assert passed(verdicts(rank, array)) == "+++++++++-"
            rank.channel.all_gather(b"")
        assert passed(verdicts(rank, array)) == "+++++++??-"

    with workers.ranks(2) as made:
        fine(made, body)


def test_explain_names_the_ranks_that_registered_something_else():
    def body(rank):
        history = rank.array(GRANULE) if rank.rank == 2 else None
        array = rank.array(0 if rank.rank == 1 else 100)
        rank.registry.register(array)
        if rank.rank == 1:
            rules = rank.registry.explain(array)
            assert [(rule.name, rule.passed) for rule in rules] == [("bytes", True)]
            return None
        rules = verdicts(rank, array)
        assert passed(rules) == "+++++++---"
        assert rules["registered on every rank"].detail == "not on rank 1"
        del history
        return rules["same offset on every rank"].detail

    with workers.ranks(3) as made:
        assert fine(made, body) == [
            "another place on ranks 1, 2",
            None,
            "another place on ranks 0, 1",
        ]


def test_explain_notices_that_a_peer_let_go_as_last_agreed():
    def body(rank):
        array = rank.array()
        registration = rank.registry.register(array)
        if rank.rank == 0:
            registration.deregister()
        rank.registry.collect()
        return passed(verdicts(rank, array))

    with workers.ranks(2) as made:
        assert fine(made, body) == ["++++++-??-", "+++++++-+-"]


def test_explain_of_foreign_memory_and_other_shapes():
    with workers.ranks(2, devices=2) as made, mmap.mmap(-1, 4096) as memory:
        rank = made[0]
        address = np.frombuffer(memory, np.uint8).ctypes.data
        foreign = cupy.cuda.UnownedMemory(address, 4096, None, 1)
        array = cupy.ndarray((8, 8), np.uint8, memptr=cupy.cuda.MemoryPointer(foreign, 0))
        rules = verdicts(rank, array[:, ::2])
        assert passed(rules)[:9] == "-------??"
        assert "UnownedMemory" in rules["memory of a pool"].detail
        assert "cupy_zc.install()" in rules["registered on this rank"].remedy
        assert rules["device"].detail == "the array is on device 1; rank 0 has device 0"
        assert "ascontiguousarray" in rules["contiguous"].remedy
        fortran = rank.array(64).reshape(8, 8, order="F")
        assert verdicts(rank, fortran)["contiguous"].detail == "in F order"
        stranger = cupy_zc.MemoryPool(driver=made[1].driver)
        array = cupy.ndarray(3, np.uint8, memptr=stranger.malloc(3))
        assert "another driver" in verdicts(rank, array)["memory of a pool"].detail
        with pytest.raises(cupy_zc.InvalidTypeError, match=r"explain.*expected a cupy\.ndarray"):
            rank.registry.explain(np.zeros(3))


def test_explain_names_the_switch_that_turns_multicast_off(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")

    def body(rank):
        array = rank.array()
        rank.registry.register(array)
        rank.registry.multicast.start(None, lambda size: size, "test", require=False)
        return verdicts(rank, array)["multicast"]

    with workers.ranks(3) as made:
        rule = fine(made, body)[0]
        assert not rule.passed
        assert rule.detail.startswith("multicast is off: ")
        assert " on ranks 0, 1, 2 switches it off" in rule.detail
