"""NCCL by nccl4py: what is refused when it is loaded, errors of calls, and waits that end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.pathfinder import DynamicLibNotFoundError
from fake_nccl_bindings import FakeNcclBindings, NCCLError, install
from fake_nccl_data import TYPES

from cupy_zc.collectives.nccl_library import (
    OLDEST,
    Nccl,
    NotInTimeError,
    _Bindings,
    in_time,
    load_nccl,
)
from cupy_zc.errors import DriverError, Error

pytestmark = pytest.mark.timeout(60)

INSTALL = "install nccl4py, and nvidia-nccl-cu13 (or -cu12)"


@pytest.fixture(autouse=True)
def _loaded_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("NCCL_COMM_BLOCKING", raising=False)
    load_nccl.cache_clear()
    yield
    load_nccl.cache_clear()


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> FakeNcclBindings:
    made = FakeNcclBindings()
    install(monkeypatch, made)
    return made


@pytest.fixture
def nccl(bindings: FakeNcclBindings) -> Nccl:
    return load_nccl()


# Loading


def test_it_is_loaded_once(bindings: FakeNcclBindings) -> None:
    assert load_nccl() is load_nccl()
    assert load_nccl().version == bindings.version


def test_without_nccl4py_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nccl", "nccl.bindings", "nccl.bindings.nccl"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Error, match="nccl4py, which cannot be imported") as caught:
        load_nccl()
    assert INSTALL in str(caught.value)


@pytest.mark.parametrize(
    "missing",
    [
        DynamicLibNotFoundError('Failure finding "libnccl.so.2"'),
        OSError('Failure finding "libnccl.so.2"'),
    ],
    ids=["found nowhere", "not loadable"],
)
def test_without_libnccl_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: Exception
) -> None:
    install(monkeypatch, FakeNcclBindings(load=missing))
    with pytest.raises(Error, match=r"cannot be loaded: Failure finding .libnccl") as caught:
        load_nccl()
    assert INSTALL in str(caught.value)
    assert caught.value.__cause__ is missing


def test_what_was_missing_can_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl.bindings", None)
    with pytest.raises(Error):
        load_nccl()
    install(monkeypatch, FakeNcclBindings())
    assert load_nccl().version == 22809


def test_an_nccl4py_without_a_function_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(NCCLError=NCCLError, get_version=lambda: 22809)
    install(monkeypatch, old)
    with pytest.raises(Error, match=r"nccl4py is too old: .*all_reduce.*; 0.3 or later"):
        load_nccl()


def test_a_first_call_that_fails_is_an_error_of_that_call(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNcclBindings(load=NCCLError(1)))
    with pytest.raises(DriverError, match="ncclGetVersion"):
        load_nccl()


@pytest.mark.parametrize("version", [22706, OLDEST - 1, OLDEST, 23203])
def test_an_nccl_without_all_functions_is_too_old(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    install(monkeypatch, FakeNcclBindings(version))
    if version >= OLDEST:
        assert load_nccl().version == version
        return
    with pytest.raises(Error, match=rf"NCCL {version} is too old: {OLDEST} \(2.28\)") as caught:
        load_nccl()
    assert INSTALL in str(caught.value)


@pytest.mark.parametrize("value", ["0", "1"])
def test_calls_that_do_not_wait_are_refused(
    bindings: FakeNcclBindings, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("NCCL_COMM_BLOCKING", value)
    if value == "1":
        assert load_nccl()
        return
    with pytest.raises(Error, match=r"NCCL_COMM_BLOCKING=0 .*unset it"):
        load_nccl()


# Calls

CALLS = {
    "all_reduce": "ncclAllReduce", "reduce_scatter": "ncclReduceScatter", "reduce": "ncclReduce",
    "broadcast": "ncclBroadcast", "gather": "ncclGather", "scatter": "ncclScatter",
    "all_gather": "ncclAllGather", "all_to_all": "ncclAlltoAll", "send": "ncclSend",
    "recv": "ncclRecv", "group_start": "ncclGroupStart", "group_end": "ncclGroupEnd",
    "register": "ncclCommRegister", "deregister": "ncclCommDeregister",
    "register_window": "ncclCommWindowRegister", "deregister_window": "ncclCommWindowDeregister",
    "destroy": "ncclCommDestroy", "abort": "ncclCommAbort", "unique_id": "ncclGetUniqueId",
    "async_error": "ncclCommGetAsyncError",
}  # fmt: skip
ARGUMENTS: dict[str, tuple[int, ...]] = {
    "register_window": (7, 64, 4096), "async_error": (7,), "unique_id": (),
}  # fmt: skip
#: Where the bindings have another name than we.
THEIRS = {
    "all_to_all": "allto_all", "register": "comm_register", "deregister": "comm_deregister",
    "register_window": "comm_window_register", "deregister_window": "comm_window_deregister",
    "destroy": "comm_destroy", "abort": "comm_abort", "unique_id": "get_unique_id",
    "async_error": "comm_get_async_error",
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_an_error_has_the_name_of_the_call_and_of_the_result(
    bindings: FakeNcclBindings, nccl: Nccl, call: str
) -> None:
    bindings.results[THEIRS.get(call, call)] = NCCLError(4)
    with pytest.raises(DriverError) as caught:
        getattr(nccl, call)(*ARGUMENTS.get(call, (1, 2, 3)))
    error = caught.value
    assert (error.call, error.result, error.code) == (CALLS[call], "InvalidArgument", 4)
    assert error.cause == "invalid argument (run with NCCL_DEBUG=WARN for details)"
    assert isinstance(error.__cause__, NCCLError)


def test_an_error_without_a_remedy_gets_one(bindings: FakeNcclBindings, nccl: Nccl) -> None:
    bindings.results["send"] = NCCLError(6)
    with pytest.raises(DriverError, match=r"RemoteError \(6\): .*NCCL_DEBUG=WARN lets NCCL say"):
        nccl.send(1, 2, 3)


def test_what_is_no_error_of_nccl_stays_what_it_is(bindings: FakeNcclBindings, nccl: Nccl) -> None:
    bindings.results["send"] = TypeError("an integer is required")
    with pytest.raises(TypeError, match="an integer is required"):
        nccl.send(1, 2, 3)


@pytest.mark.parametrize("call", set(CALLS) - {"register_window", "async_error", "unique_id"})
def test_arguments_are_passed_on_as_they_are(
    bindings: FakeNcclBindings, nccl: Nccl, call: str
) -> None:
    getattr(nccl, call)(5, 6, 7)
    assert bindings.calls == [(THEIRS.get(call, call), (5, 6, 7))]


def test_an_identity_is_the_bytes_of_nccl(bindings: FakeNcclBindings, nccl: Nccl) -> None:
    def made() -> Any:
        identity = bindings.UniqueId()
        identity.content.raw = bytes(range(128))
        return identity

    bindings.results["get_unique_id"] = made
    assert nccl.unique_id() == bytes(range(128))


@pytest.mark.parametrize(
    ("sharp", "most_blocks", "fields"),
    [
        (False, None, {"blocking": 1}),
        (True, None, {"blocking": 1, "collnet_enable": 1}),
        (False, 4, {"blocking": 1, "max_ctas": 4}),
        (True, 1, {"blocking": 1, "collnet_enable": 1, "max_ctas": 1}),
    ],
)
def test_a_communicator_is_configured(
    bindings: FakeNcclBindings,
    nccl: Nccl,
    sharp: bool,
    most_blocks: int | None,
    fields: dict[str, int],
) -> None:
    bindings.results["comm_init_rank_config"] = 77
    made = nccl.init(3, bytes(range(128)), 2, sharp=sharp, most_blocks=most_blocks)
    assert made == 77
    ((name, (size, identity, rank, config)),) = bindings.calls
    assert (name, size, rank) == ("comm_init_rank_config", 3, 2)
    assert bytes(identity.content) == bytes(range(128))
    assert vars(config) == fields


def test_a_communicator_that_cannot_be_made_is_an_error(
    bindings: FakeNcclBindings, nccl: Nccl
) -> None:
    bindings.results["comm_init_rank_config"] = NCCLError(1)
    with pytest.raises(DriverError, match=r"ncclCommInitRankConfig.*UnhandledCudaError"):
        nccl.init(1, bytes(128), 0, sharp=False, most_blocks=None)


@pytest.mark.parametrize("null", [0, None, SimpleNamespace(handle=0)], ids=str)
def test_a_null_window_is_none(bindings: FakeNcclBindings, nccl: Nccl, null: object) -> None:
    bindings.results["comm_window_register"] = null
    assert nccl.register_window(5, 64, 4096) is None
    no_promise = 0  # of equal offsets on all ranks
    assert bindings.calls == [("comm_window_register", (5, 64, 4096, no_promise))]


@pytest.mark.parametrize("window", [0x70, SimpleNamespace(handle=0x70)], ids=str)
def test_another_window_is_what_nccl_gave(
    bindings: FakeNcclBindings, nccl: Nccl, window: object
) -> None:
    bindings.results["comm_window_register"] = window
    assert nccl.register_window(5, 64, 4096) is window


@pytest.mark.parametrize(
    ("code", "last", "text"),
    [
        (0, "never mind", ""),
        (7, "never mind", ""),
        (6, "a cable was cut", "a cable was cut (ncclResult_t 6)"),
        (6, "", "remote (ncclResult_t 6)"),
    ],
    ids=["none", "in progress", "in words", "by number"],
)
def test_errors_of_the_background_are_texts(
    bindings: FakeNcclBindings, nccl: Nccl, code: int, last: str, text: str
) -> None:
    bindings.results |= {
        "comm_get_async_error": code, "get_last_error": last, "get_error_string": "remote",
    }  # fmt: skip
    assert nccl.async_error(5) == text


# The real bindings

#: Parameters that nccl4py gives calls, by its names, without their types.
PARAMETERS = {
    "all_reduce": "sendbuff recvbuff count datatype op comm stream",
    "reduce_scatter": "sendbuff recvbuff recvcount datatype op comm stream",
    "reduce": "sendbuff recvbuff count datatype op root comm stream",
    "broadcast": "sendbuff recvbuff count datatype root comm stream",
    "gather": "sendbuff recvbuff count datatype root comm stream",
    "scatter": "sendbuff recvbuff count datatype root comm stream",
    "all_gather": "sendbuff recvbuff sendcount datatype comm stream",
    "allto_all": "sendbuff recvbuff count datatype comm stream",
    "send": "sendbuff count datatype peer comm stream",
    "recv": "recvbuff count datatype peer comm stream",
    "comm_init_rank_config": "nranks comm_id rank config",
    "comm_register": "comm buff size",
    "comm_deregister": "comm handle",
    "comm_window_register": "comm buff size win_flags",
    "comm_window_deregister": "comm win",
    "comm_get_async_error": "comm",
    "comm_destroy": "comm",
    "comm_abort": "comm",
    "get_last_error": "comm",
    "get_error_string": "result",
}


@pytest.fixture
def real() -> Any:
    return pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")


def test_all_that_is_called_is_there(real: Any) -> None:
    asked = FakeNcclBindings()
    nccl = _Bindings(asked)
    nccl.init(1, bytes(128), 0, sharp=True, most_blocks=1)
    asked.results["comm_get_async_error"] = 6
    nccl.async_error(5)
    assert {"all_reduce", "get_error_string", "comm_init_rank_config"} <= asked.names
    assert not [name for name in asked.names if not hasattr(real, name)]
    assert set(PARAMETERS) == asked.names - {
        "get_version", "get_unique_id", "group_start", "group_end",
    }  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_calls_take_what_they_are_given(real: Any, name: str) -> None:
    words = getattr(real, name).__doc__.partition("(")[2].partition(")")[0].split(",")
    assert [word.split()[-1] for word in words] == PARAMETERS[name].split()


def test_numbers_and_structures_are_those_of_the_bindings(real: Any) -> None:
    names = {each.value: each.name.lower() for each in real.DataType}
    assert [names[number] for number in range(10)] == [kind.name for kind in TYPES]
    assert [real.RedOp(number).name for number in range(5)] == ["Sum", "Prod", "Max", "Min", "Avg"]
    assert (int(real.Result.Success), int(real.Result.InProgress)) == (0, 7)
    config = real.Config()
    config.blocking = config.collnet_enable = config.max_ctas = 1
    assert (config.blocking, config.collnet_enable, config.max_ctas) == (1, 1, 1)
    assert real.unique_id_dtype.itemsize == 128
    assert issubclass(real.NCCLError, Exception)


# Waits


def test_what_ends_in_time_gives_its_result() -> None:
    assert in_time("test", lambda: threading.current_thread().name, 10) == "cupy-zc test"
    assert in_time("test", lambda: None, 10) is None


def test_what_fails_in_time_raises() -> None:
    def fail() -> None:
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        in_time("test", fail, 10)


def test_what_does_not_end_in_time_goes_on() -> None:
    go, done = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def work() -> bool:
        threads.append(threading.current_thread())
        go.wait(10)
        done.set()
        return True

    with pytest.raises(NotInTimeError, match="test"):
        in_time("test", work, 0.05)
    assert threads[0].daemon
    assert not done.is_set()
    go.set()
    assert done.wait(10)
    threads[0].join(10)
