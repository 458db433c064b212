"""Ranks that MPI started: any mpi4py communicator.

Only host bytes travel (NumPy arrays of bytes, by the buffer calls), never a device pointer and
never a pickle. MPI knows no deadlines, so every message is a non-blocking one, polled with a
back-off. And MPI's collectives cannot say who is missing, so a gather is made of messages between
pairs: the one that has not come names its rank. A gather is small and rare; that is cheap enough.

All groups split from one communicator share one duplicate of it and are told apart by tags.

A program that ends while a peer hangs may wait in ``MPI_Finalize`` for ever, whatever this module
does; ``python -m mpi4py script.py`` makes an uncaught exception end the whole job instead.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import Error, InvalidTypeError
from .bootstrap import Bootstrap, Offer
from .waiting import Wait
from .wire import pack_offer, unpack_offer

__all__ = ["from_mpi"]

_TAG = struct.Struct("!q")
_DIGEST = 8
#: What a rank tells of what it gives: bytes, and a digest.
_HEAD = struct.Struct(f"!I{_DIGEST}s")
_SHORTEST_PAUSE = 20e-6
_LONGEST_PAUSE = 2e-3

#: A request: the rank it concerns (None: unknown), whether it receives, and MPI's object.
_Request = tuple[int | None, bool, Any]

#: Requests (and their buffers) that a failed wait left unfinished: MPI may still use the memory.
_abandoned: list[object] = []


def _load() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise Error(
            "from_mpi needs mpi4py, which is not installed; pip install 'cupy-zc[mpi]' brings it "
            "with an MPI, or use the TCP store (init_process_group without use_mpi)"
        ) from error
    return MPI


def _finish(requests: Sequence[_Request], buffers: object, wait: Wait) -> None:
    """Poll requests until all are done. On failure take back what can be."""
    pause = _SHORTEST_PAUSE
    pending = requests
    try:
        while pending := [each for each in pending if not each[2].Test()]:
            wait.check({rank for rank, _, _ in pending if rank is not None})
            time.sleep(min(pause, wait.slice()))
            pause = min(1.5 * pause, _LONGEST_PAUSE)
    except BaseException:
        for _, receives, request in requests:
            if receives and not request.Test():
                request.Cancel()
        unfinished = [request for _, _, request in requests if not request.Test()]
        if unfinished:
            _abandoned.append((unfinished, buffers))
        raise


class _Shared:
    """The duplicated communicator, freed when the last group on it is closed."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi = mpi
        self.comm = comm
        self.users = 0
        self.broken = False
        self.next_tag = 1

    def drop(self) -> None:
        self.users -= 1
        # With unfinished requests MPI must keep it. After MPI_Finalize there is nothing to free.
        if self.users == 0 and not self.broken and not self.mpi.Is_finalized():
            self.comm.Free()


class _MpiBootstrap(Bootstrap):
    def __init__(self, shared: _Shared, members: Sequence[int], tag: int) -> None:
        """``members``: the ranks of this group, as ranks of the shared communicator."""
        super().__init__(members.index(shared.comm.Get_rank()), len(members))
        self._shared = shared
        self._members = tuple(members)
        self._tag = tag
        shared.users += 1

    def _gather(self, offer: Offer, wait: Wait) -> list[Offer]:
        packed = pack_offer(offer)
        head = _HEAD.pack(len(packed), hashlib.blake2b(packed, digest_size=_DIGEST).digest())
        peers = [rank for rank in range(self.size) if rank != self.rank]
        try:
            heads = {peer: np.zeros(_HEAD.size, np.uint8) for peer in peers}
            self._swap(head, heads, wait)
            # Who gives the same as this rank does neither sends it nor gets it.
            parts = {
                peer: np.zeros(_HEAD.unpack(other.tobytes())[0], np.uint8)
                for peer, other in heads.items()
                if other.tobytes() != head
            }
            self._swap(packed, parts, wait)
        except self._shared.mpi.Exception as error:
            self._shared.broken = True
            raise Error(f"{wait.what}: MPI failed: {error}; a rank may have died") from error
        except BaseException:
            self._shared.broken = True
            raise
        return [
            unpack_offer(parts[rank].tobytes()) if rank in parts else offer
            for rank in range(self.size)
        ]

    def _swap(self, data: bytes, parts: Mapping[int, Any], wait: Wait) -> None:
        """Send ``data`` to the ranks of ``parts``, and receive these.

        MPI keeps the order of messages between two ranks with one tag, so that calls match up.
        """
        comm, byte = self._shared.comm, self._shared.mpi.BYTE
        own = np.frombuffer(data, np.uint8)
        requests: list[_Request] = [
            (peer, True, comm.Irecv([part, byte], self._members[peer], self._tag))
            for peer, part in parts.items()
        ]
        requests += [
            (peer, False, comm.Isend([own, byte], self._members[peer], self._tag)) for peer in parts
        ]
        _finish(requests, (own, parts), wait)

    def _join(self, members: Sequence[int], timeout: float | None) -> Bootstrap | None:
        # A tag that no rank here has used: then no two groups that share two ranks share a tag.
        offers = self._call("split(), tags", _TAG.pack(self._shared.next_tag), timeout)
        tag = max(_TAG.unpack(offer)[0] for offer in offers)
        self._shared.next_tag = tag + 1
        if not members:
            return None
        return _MpiBootstrap(self._shared, [self._members[rank] for rank in members], tag)

    def _leave(self, *, owner: bool) -> None:
        if owner:
            self._shared.drop()


def from_mpi(mpi_comm: Any = None, *, timeout: float | None = None) -> Bootstrap:
    """The ranks of an mpi4py communicator. Collective over it.

    The communicator is duplicated, so that no message of the program can be mistaken for one of
    ours; the duplicate is freed by ``close()``, which every rank calls.

    Args:
        mpi_comm: An ``mpi4py.MPI.Intracomm``; None for ``MPI.COMM_WORLD``.
        timeout: Seconds for the duplication; None for ``settings().setup_timeout``.

    Raises:
        InvalidTypeError: not an intra-communicator.
        PeerTimeoutError: not all ranks came to duplicate it. MPI does not tell which, so ``ranks``
            is empty in this one error.
        Error: mpi4py is not installed.
    """
    mpi = _load()
    comm = mpi.COMM_WORLD if mpi_comm is None else mpi_comm
    if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
        raise InvalidTypeError("from_mpi", "mpi_comm", mpi_comm, "an mpi4py intra-communicator")
    wait = Wait(f"rank {comm.Get_rank()} of {comm.Get_size()}: from_mpi (MPI_Comm_idup)", timeout)
    duplicate, request = comm.Idup()
    _finish([(None, False, request)], duplicate, wait)
    return _MpiBootstrap(_Shared(mpi, duplicate), range(comm.Get_size()), 0)
