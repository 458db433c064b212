"""How ranks get communicators of NCCL: each step in all of them, or in none.

Making one waits for the other ranks, in C. So that is done in a thread, with a deadline, and voted
on; what such a thread makes after all is aborted by it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from ..config import multicast_refusal, settings
from ..driver.api import Driver
from ..errors import Error, PeerTimeoutError
from ..group import Bootstrap, agree_equal, vote
from ..registration import MulticastStatus
from .nccl_library import Nccl, NotInTimeError, aside, in_time

__all__ = ["agreed_library", "kept_from_multicast", "make_comms", "together"]

_log = logging.getLogger("cupy_zc")

_ID_BYTES = 128

_T = TypeVar("_T")


def together(group: Bootstrap, name: str, do: Callable[[], _T], *, waits: int = 1) -> _T:
    """Something that all ranks do, or none keeps. Collective.

    Args:
        group: The ranks.
        name: What it is.
        do: It.
        waits: How often it may wait for ``settings().setup_timeout``.

    Raises:
        AgreementError: it failed on a rank; on all of them.
    """
    failure: Exception | None = None
    results: list[_T] = []
    try:
        results.append(do())
    except Exception as error:  # noqa: BLE001 - the vote raises it on every rank
        failure = error
    vote(group, name, failure, timeout=(1 + waits) * settings().setup_timeout)
    return results[0]


def agreed_library(group: Bootstrap, load: Callable[[], Nccl]) -> Nccl:
    """NCCL, of one version on all ranks. Collective.

    Raises:
        AgreementError: a rank has none that can be used; on all of them.
        MismatchError: ranks have different ones.
    """
    library = together(group, "load NCCL", load)
    agree_equal(group, "the version of NCCL", library.version)
    return library


@contextmanager
def kept_from_multicast(status: MulticastStatus, *, tried: bool) -> Iterator[None]:
    """A block in which NCCL makes communicators, and learns that multicast is off or does not work.

    It would try it by itself, and from 2.29 on fail where it does not work. It reads the variable
    once a process. A user who has set ``NCCL_NVLS_ENABLE`` has decided.

    Args:
        status: What this package knows of multicast on the node.
        tried: Whether it is unavailable because it failed, and not because nobody would use it.
    """
    name = "NCCL_NVLS_ENABLE"
    fails = tried and status.state == "unavailable"
    sets = name not in os.environ and bool(fails or multicast_refusal())
    if sets:
        os.environ[name] = "0"
    try:
        yield
    finally:
        if sets:  # it would switch multicast off for communicators that are made later
            os.environ.pop(name, None)


def make_comms(
    group: Bootstrap,
    library: Nccl,
    driver: Driver,
    device: int,
    count: int,
    *,
    sharp: bool,
    most_blocks: int | None,
) -> list[Any]:
    """Communicators of all ranks. Collective.

    Args:
        group: The ranks.
        library: NCCL.
        driver: Of the device.
        device: Of this rank.
        count: How many.
        sharp: Whether to ask for IB SHARP, unless the user has decided about it.
        most_blocks: Multiprocessors that a call may use; None: as NCCL likes.

    Raises:
        AgreementError: a rank could not be connected in time; on all of them, and what was made is
            aborted.
    """
    rank = group.rank

    def identify() -> bytes:
        return b"" if rank else b"".join(library.unique_id() for _ in range(count))

    made = together(group, "make an id of NCCL", identify)
    said = group.broadcast(made)
    identities = [said[at : at + _ID_BYTES] for at in range(0, len(said), _ID_BYTES)]
    asks = sharp and "NCCL_COLLNET_ENABLE" not in os.environ
    init = partial(library.init, group.size, rank=rank, sharp=asks, most_blocks=most_blocks)
    opening = _Opening(library, driver, device, [partial(init, each) for each in identities], rank)
    try:
        together(group, "connect with NCCL", opening.in_time)
    except BaseException:
        opening.abort()
        raise
    return opening.comms


class _Opening:
    """Communicators that a thread makes."""

    def __init__(
        self,
        library: Nccl,
        driver: Driver,
        device: int,
        inits: Sequence[Callable[[], Any]],
        rank: int,
    ) -> None:
        self.comms: list[Any] = []
        self._library, self._driver, self._device = library, driver, device
        self._inits, self._rank = inits, rank
        self._lock = threading.Lock()
        self._over = False

    def in_time(self) -> None:
        """Make them, or give up."""
        limit = settings().setup_timeout
        try:
            in_time("nccl init", self._make, limit)
        except NotInTimeError:
            raise PeerTimeoutError(
                f"rank {self._rank}: ncclCommInitRank did not end within {limit:g} s: a rank did "
                "not come, or cannot be reached; NCCL_DEBUG=INFO lets NCCL say more, and "
                "CUPY_ZC_SETUP_TIMEOUT gives it more time"
            ) from None

    def _make(self) -> None:
        with self._driver.use_device(self._device):
            for init in self._inits:
                comm = init()
                with self._lock:
                    wanted = not self._over
                    if wanted:
                        self.comms.append(comm)
                if not wanted:
                    self._abort(comm)
                    return

    def abort(self) -> None:
        """Nobody wants them any more."""
        with self._lock:
            self._over = True
        for comm in self.comms:
            aside("nccl abort", partial(self._abort, comm))

    def _abort(self, comm: Any) -> None:
        with self._driver.use_device(self._device):
            try:
                self._library.abort(comm)
            except Error as error:  # nobody can mend it
                _log.warning("rank %d: %s", self._rank, error)
