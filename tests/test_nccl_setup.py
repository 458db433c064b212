"""How ranks get communicators of NCCL, and what is left where they do not."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from device_ranks import device
from emulated_driver import EmulatedDriver
from fake_nccl import FakeNccl
from nccl_engines import (
    PLACES,
    SETUP,
    careless,
    engines_of,
    eventually,
    nccl,
    opened,
    short_setup,
    watchers,
    within,
)

from cupy_zc import AgreementError, Communicator, Error, MismatchError
from cupy_zc.collectives import nccl as engine
from cupy_zc.collectives import nccl_setup
from cupy_zc.collectives.nccl import RAIL_BLOCKS
from cupy_zc.registration import MulticastStatus

__all__ = ["careless", "device", "nccl"]  # fixtures

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("resources")]

places = pytest.mark.parametrize(
    ("backend", "node_of"), PLACES.values(), ids=[name.replace(" ", "-") for name in PLACES]
)


def all_fail(outcomes: Sequence[Any], kind: type[Error], *texts: str) -> None:
    """On all ranks with one class, in the same words, and every thread goes away."""
    for each in outcomes:
        assert type(each) is kind, outcomes
        assert all(text in str(each) for text in texts), str(each)
        each.__traceback__ = None
    eventually(lambda: not watchers())


@places
def test_what_is_opened_can_be_closed_and_leaves_nothing(
    device: EmulatedDriver, nccl: FakeNccl, backend: str, node_of: tuple[int, ...]
) -> None:
    comms = opened(device, node_of, backend)
    several = backend == "hierarchical"
    assert len(nccl.world.alive) == len(node_of) * (4 if several else 3)
    for comm in comms:
        assert isinstance(comm, Communicator), comm
        blocks = [each._comm.most_blocks for each in engines_of(comm)]
        assert blocks == ([RAIL_BLOCKS, None] if several else [None])
        sharp = [each._comm.sharp for each in engines_of(comm)]
        one_each = len(set(node_of)) == len(node_of)
        assert sharp == ([True, False] if several else [one_each])
    for comm in comms:
        comm.close()
    assert not nccl.world.alive
    eventually(lambda: not watchers())


@places
def test_nccl_that_is_missing_on_one_rank_is_an_error_on_all(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl, backend: str,
    node_of: tuple[int, ...],
) -> None:  # fmt: skip
    turns = itertools.count()

    def load() -> FakeNccl:
        if next(turns) == 1:
            raise Error("libnccl cannot be loaded")
        return nccl

    monkeypatch.setattr(engine, "load_nccl", load)
    with within(5):
        outcomes = opened(device, node_of, backend)
    all_fail(outcomes, AgreementError, "libnccl cannot be loaded")
    assert not nccl.world.alive


@places
def test_versions_of_nccl_that_differ_are_a_mismatch(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl, backend: str,
    node_of: tuple[int, ...],
) -> None:  # fmt: skip
    turns = itertools.count()

    def load() -> FakeNccl:
        if next(turns) != len(node_of) - 1:
            return nccl
        other = FakeNccl(nccl.world)
        other.version = 22903
        return other

    monkeypatch.setattr(engine, "load_nccl", load)
    outcomes = opened(device, node_of, backend)
    kind = AgreementError if backend == "hierarchical" else MismatchError  # told to the node
    all_fail(outcomes, kind, "22809", "22903")
    assert not nccl.world.alive


#: By name: a function of NCCL, the rank where it fails, and in which turn.
FAILS = {
    "init of the first one": ("init", 1, 0),
    "init of a later one": ("init", 0, 1),
    "the sum": ("all_reduce", 1, 0),
    "the first message": ("all_to_all", 0, 1),
}


def _failures() -> Iterator[Any]:
    """All in all places, of which every run has all in two and one in all."""
    for (name, failure), (place, where) in itertools.product(FAILS.items(), PLACES.items()):
        often = name == "init of the first one" or place in ("uneven", "2 x 2")
        marks = [] if often else [pytest.mark.slow]
        identity = f"{name}-{place.replace(' ', '-')}"
        yield pytest.param(*failure, *where, id=identity, marks=marks)


@pytest.mark.parametrize(("function", "rank", "turn", "backend", "node_of"), [*_failures()])
def test_a_call_that_fails_on_one_rank_is_an_error_on_all(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl, backend: str,
    node_of: tuple[int, ...], function: str, rank: int, turn: int,
) -> None:  # fmt: skip
    short_setup(monkeypatch)
    nccl.world.failures[function, rank] = [None] * turn + ["SystemError"]
    with within(10 * SETUP):
        outcomes = opened(device, node_of, backend)
    nccl.world.stop()  # where others wait in init
    all_fail(outcomes, AgreementError, "SystemError", "the test wants it")
    eventually(lambda: not nccl.world.alive)


@places
def test_an_id_that_cannot_be_made_is_an_error_on_all(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl, backend: str,
    node_of: tuple[int, ...],
) -> None:  # fmt: skip
    def unique_id() -> bytes:
        raise Error("there is no network")

    monkeypatch.setattr(nccl, "unique_id", unique_id)
    all_fail(opened(device, node_of, backend), AgreementError, "there is no network")
    assert not nccl.world.alive


@places
def test_a_rank_that_hangs_in_init_ends_the_set_up_of_all_in_time(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl, backend: str,
    node_of: tuple[int, ...],
) -> None:  # fmt: skip
    short_setup(monkeypatch)
    nccl.world.hanging.add(1)
    with within(6 * SETUP):
        outcomes = opened(device, node_of, backend)
    assert {type(each) for each in outcomes} == {AgreementError}, outcomes
    assert all("did not end within 0.5 s" in str(each) for each in outcomes)
    assert watchers()  # it still hangs
    nccl.world.release(nccl.world.hanging)
    eventually(lambda: not nccl.world.alive)
    all_fail(outcomes, AgreementError)
    assert nccl.world.made  # and what came of it after all was aborted


def test_of_what_one_rank_made_in_time_nothing_is_kept(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl
) -> None:
    short_setup(monkeypatch)
    real, turns = nccl.init, itertools.count()
    hangs = threading.Event()

    def init(size: int, identity: bytes, rank: int, **options: Any) -> Any:
        made = real(size, identity, rank, **options)
        if rank and next(turns) == 1:  # rank 0 has gone on to the third one
            hangs.wait(20)
        return made

    monkeypatch.setattr(nccl, "init", init)
    outcomes = opened(device, (0, 1), "nccl")
    states = [comm.rank for comm in nccl.world.alive]
    assert 1 in states  # what hangs
    hangs.set()
    eventually(lambda: not nccl.world.alive)
    nccl.world.stop()  # rank 0 waits for the third one
    all_fail(outcomes, AgreementError, "did not end within")
    assert {comm.state for comm in nccl.world.made} == {"aborted"}


@places
def test_a_sum_that_is_wrong_is_an_error_on_all(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl, backend: str,
    node_of: tuple[int, ...],
) -> None:  # fmt: skip
    read = device.read

    def wrong(address: int, size: int) -> bytes:
        return (7).to_bytes(4, "little") if size == 4 else read(address, size)

    monkeypatch.setattr(device, "read", wrong)
    outcomes = opened(device, node_of, backend)
    all_fail(outcomes, AgreementError, "NCCL added", "ones up to 7")
    assert not nccl.world.alive


@places
def test_a_sum_that_does_not_end_is_an_error_on_all_in_time(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl, backend: str,
    node_of: tuple[int, ...],
) -> None:  # fmt: skip
    short_setup(monkeypatch)
    real = nccl.all_reduce

    def all_reduce(*arguments: Any) -> None:
        if arguments[-2].rank != 1:
            real(*arguments)

    monkeypatch.setattr(nccl, "all_reduce", all_reduce)
    with within(12 * SETUP):
        outcomes = opened(device, node_of, backend)
    all_fail(outcomes, AgreementError)
    eventually(lambda: not nccl.world.alive)


def test_ranks_that_disagree_about_the_backend_are_told(
    device: EmulatedDriver, nccl: FakeNccl
) -> None:
    outcomes = opened(device, (0, 1), ("nccl", "hierarchical"))
    all_fail(outcomes, MismatchError, "nccl", "hierarchical")
    assert not nccl.world.alive


# What NCCL is told


@pytest.mark.parametrize("tried", [False, True])
@pytest.mark.parametrize("state", ["on", "off", "unavailable"])
@pytest.mark.parametrize("refused", [None, "CUPY_ZC_MULTICAST=off"])
@pytest.mark.parametrize("chosen", [None, "0", "1", "2"])
def test_nccl_is_kept_from_multicast_where_that_is_off_and_the_user_has_not_decided(
    monkeypatch: pytest.MonkeyPatch,
    state: Any,
    refused: str | None,
    chosen: str | None,
    tried: bool,
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", chosen or "")
    if chosen is None:
        monkeypatch.delenv("NCCL_NVLS_ENABLE")
    monkeypatch.setattr(nccl_setup, "multicast_refusal", lambda: refused)
    status = MulticastStatus(state, "")
    kept = (tried and state == "unavailable") or refused is not None
    with nccl_setup.kept_from_multicast(status, tried=tried):
        assert os.environ.get("NCCL_NVLS_ENABLE") == (chosen or ("0" if kept else None))
    assert os.environ.get("NCCL_NVLS_ENABLE") == chosen  # for communicators that come later


@pytest.mark.parametrize("asked", ["0", "1"])
def test_a_user_decides_about_collnet(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl, asked: str
) -> None:
    monkeypatch.setenv("NCCL_COLLNET_ENABLE", asked)
    comms = opened(device, (0, 1), "hierarchical")
    assert not any(comm.sharp for comm in nccl.world.made)
    for comm in comms:
        comm.close()


def test_what_nccl_reads_is_set_while_its_communicators_are_made(
    device: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl
) -> None:
    said: list[str | None] = []
    init = nccl.init

    def noting(*arguments: Any, **options: Any) -> Any:
        said.append(os.environ.get("NCCL_NVLS_ENABLE"))
        return init(*arguments, **options)

    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.setattr(nccl, "init", noting)
    monkeypatch.setattr(nccl_setup, "multicast_refusal", lambda: "CUPY_ZC_MULTICAST=off")
    for comm in opened(device, (0, 1), "nccl"):
        comm.close()
    assert set(said) == {"0"}
    assert "NCCL_NVLS_ENABLE" not in os.environ
