"""One rank of many, for `setup_model.py`: the code of the package, and others made up for it.

The rank runs the client of the TCP store, and all that is above it. What it sends is answered here,
as rank 0's store would: what the others say follows from what this rank said and from where they
are. Nodes have the ranks in order.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args
from unittest import mock

from cupy_zc.collectives import nccl_setup, opening
from cupy_zc.collectives.acts import Order, World
from cupy_zc.collectives.local import Rows
from cupy_zc.group import Across, Bootstrap, Channel, NodeIdentity, Topology, bootstrap_tcp, vote
from cupy_zc.group.bootstrap import Offer
from cupy_zc.group.tcp_store import Store
from cupy_zc.group.wire import (
    HANDSHAKE_LIMIT,
    NONCE,
    FrameReader,
    Kind,
    frame,
    pack_items,
    pack_offers,
    proof,
    unpack_offer,
)

__all__ = ["LOCAL", "Gather", "Job", "Plan", "open_channels", "set_up", "together"]

LOCAL = 8
#: Bytes of the id by which the ranks of an NCCL communicator find each other.
UNIQUE_ID = 128
#: Communicators of NCCL: all ranks have two for point-to-point calls.
COMMS = {"rail": 1, "all": 3}
#: Bytes of a frame that a rank takes.
LIMIT = 1 << 40

_Group = Literal["all", "node", "rail"]


class Gather(NamedTuple):
    """A word with the store and its answer, as a rank sees them: bytes, with those of frames."""

    #: Of a gather; handshakes have none.
    call: str
    sent: int
    received: int


class _Counting(bootstrap_tcp._Connection):
    """A connection that writes down what goes through it."""

    log: list[Gather]
    said = ("", 0)

    def send(self, kind: Kind, payload: bytes, seconds: float) -> None:
        call = unpack_offer(payload).call.decode() if kind is Kind.GATHER else ""
        self.said = (call, len(frame(kind, payload)))
        super().send(kind, payload, seconds)

    def receive(self, seconds: float) -> tuple[Kind, bytes] | None:
        answer = super().receive(seconds)
        if answer is not None:
            self.log.append(Gather(*self.said, len(frame(*answer))))
        return answer


@dataclass(slots=True)
class Job:
    """What the other ranks of a communicator say to one of them."""

    ranks: int
    rank: int = 0
    local: int = LOCAL
    #: Whether nodes are pretended, on this machine.
    pretend: bool = False
    #: By group.
    log: dict[_Group, list[Gather]] = field(default_factory=dict)
    #: Frames with which the stores answer, kept for the next time.
    answers: dict[tuple[_Group, int], bytes] = field(default_factory=dict)
    #: The group that is made, or was made last. A communicator makes that of its node first.
    group: _Group = "all"

    def members(self, rank: int) -> list[int]:
        """The ranks of the group that one joins."""
        if self.group == "all":
            return list(range(self.ranks))
        if self.group == "rail":
            return list(range(rank % self.local, self.ranks, self.local))
        return list(range(rank - rank % self.local, rank - rank % self.local + self.local))

    def host(self, rank: int) -> str:
        """Where a rank is: addresses that a store of this process can listen at."""
        node = rank // self.local
        return "127.0.0.1" if self.pretend else f"127.101.{100 + node // 100}.{100 + node % 100}"

    def meet(self) -> Bootstrap:
        """All ranks."""
        self.group = "all"
        self.log.clear()
        return bootstrap_tcp._open(None, "", 0, self.rank, self.ranks, b"", None)

    def connect(self, *arguments: Any) -> _Acted:
        """In the place of the function of that name: to the store of a group."""
        _, _, rank, size, secret, wait = arguments
        connection = _Acted(self, secret)
        assert connection.members == self.members(self.rank)
        assert (len(connection.members), connection.members[rank]) == (size, self.rank)
        bootstrap_tcp._shake_hands(connection, rank, size, secret, wait)
        connection.reader.limit = LIMIT
        return connection

    @contextmanager
    def playing(self) -> Iterator[None]:
        """A block in which connections lead here."""
        with mock.patch.object(bootstrap_tcp, "_connect", self.connect):
            yield


class _Acted(_Counting):
    """A connection to a store that knows what the ranks of a job say."""

    def __init__(self, job: Job, secret: bytes) -> None:
        self.job, self.group, self.secret = job, job.group, secret
        self.members = job.members(job.rank)
        self.log = job.log.setdefault(job.group, [])
        self.reader = FrameReader(HANDSHAKE_LIMIT)
        self.hello, self.calls = b"", 0
        self.raw = mock.Mock(
            getsockname=lambda: (job.host(job.rank), 0), sendall=self.take, recv=self.give
        )
        self.given = memoryview(b"")

    def take(self, said: bytes) -> None:
        """Bytes for the store, a frame at a time."""
        ((kind, payload),) = FrameReader(LIMIT).feed(said)
        if kind is Kind.HELLO:
            self.hello = payload
            answer = frame(Kind.CHALLENGE, bytes(NONCE))
        elif kind is Kind.PROOF:
            known = proof(self.secret, b"store", self.hello, bytes(NONCE))
            answer = frame(Kind.WELCOME, known)
        else:
            assert kind is Kind.GATHER
            answer = self.gathered(*unpack_offer(payload))
        self.given = memoryview(answer)

    def gathered(self, call: bytes, payload: bytes) -> bytes:
        """The answer to this rank's part of a gather."""
        if call == b"split(), addresses":
            self.job.group = "node" if self.job.group == "all" else "rail"
        self.calls += 1
        key = (self.group, self.calls)
        if key not in self.job.answers:
            name = call.decode()
            offers = [Offer(call, self.says(name, rank, payload)) for rank in self.members]
            self.job.answers[key] = frame(Kind.RESULT, pack_offers(offers))
        return self.job.answers[key]

    def says(self, call: str, rank: int, own: bytes) -> bytes:
        """What a rank gives to a gather."""
        job = self.job
        if rank == job.rank:
            return own
        if call == "all_gather('identity')":
            node, here = rank // job.local, NodeIdentity.here()
            away = node != job.rank // job.local and not job.pretend
            return (replace(here, machine=node.to_bytes(16, "big")) if away else here).to_bytes()
        if call == "all_gather('devices of the ranks')":
            return opening._DEVICES.pack(_Gpu(rank).uuid, LOCAL)
        if call == "split(), addresses":
            leads = job.members(rank)[0] == rank
            secret = bytes(NONCE - 4) + rank.to_bytes(4, "big")
            return pack_items([job.host(rank).encode(), b"54321", secret]) if leads else b""
        if call == "broadcast(root=0)":
            return bytes(UNIQUE_ID * COMMS[self.group]) if rank == self.members[0] else b""
        return own

    def give(self, most: int) -> bytes:
        """Bytes of the store."""
        data, self.given = bytes(self.given[:most]), self.given[most:]
        return data


class _Gpu:
    """As much of a driver as set-up asks for before there are arrays: a GPU for each rank."""

    name = "cuda"

    def __init__(self, rank: int) -> None:
        self.uuid = rank.to_bytes(16, "big")
        self.device_info = lambda _: self
        self.device_count = lambda: LOCAL

    @contextmanager
    def use_device(self, _: int) -> Iterator[None]:
        """Nothing: there is no device."""
        yield


class Plan:
    """A communicator, as far as other nodes are concerned: what it asks of them, and keeps.

    NCCL connects nobody.
    """

    def __init__(
        self, bootstrap: Bootstrap, topology: Topology, options: opening.Options, stack: ExitStack
    ) -> None:
        self.groups = [bootstrap]
        self.topology = topology
        if options.engine == "hierarchical":
            self.world = World.of(topology)
            for ranks in (topology.node_ranks, self.world.rail):
                self.groups.append(stack.enter_context(bootstrap.part(ranks)))
            rail = self.groups[2]
            self.across = Across(rail, self.world.rail, 60.0, "a node", topology.node_ranks)
            self.tables = [Rows(self.world.order(name)) for name in get_args(Order)]
            self._connect(rail, COMMS["rail"], options)
            self._connect(bootstrap, COMMS["all"], options)
        vote(bootstrap, "start the engine")

    @staticmethod
    def _connect(group: Bootstrap, comms: int, options: opening.Options) -> None:
        """As ``NcclEngine.connect``."""
        nccl: Any = mock.Mock(
            version=22907, unique_id=lambda: bytes(UNIQUE_ID), init=lambda *_, **__: None
        )
        library = nccl_setup.agreed_library(group, lambda: nccl)
        nccl_setup.make_comms(
            group, library, options.driver, 0, comms, sharp=False, most_blocks=None
        )
        nccl_setup.together(group, "add up with NCCL", lambda: None)

    def close(self) -> None:
        """Leave the groups."""
        for group in reversed(self.groups):
            group.close()


def set_up(bootstrap: Bootstrap) -> Plan:
    """Make a communicator of a rank with a GPU of its own."""
    gpu: Any = _Gpu(bootstrap.rank)
    kind: Any = Plan
    options = opening.Options(gpu, 0, "auto", None, False, False, "auto", "auto", spread=True)
    plan: Any = opening.start(kind, bootstrap, options)
    made: Plan = plan
    return made


def together(ranks: int, do: Callable[[Bootstrap], object]) -> list[list[Gather]]:
    """What goes through the connections of each rank, where all do something on a real store."""
    mine = threading.local()

    def counting(raw: socket.socket) -> _Counting:
        connection = _Counting(raw)
        connection.log = mine.log
        return connection

    def body(rank: int) -> list[Gather]:
        mine.log = []
        kept = store if rank == 0 else None
        with bootstrap_tcp._open(kept, "127.0.0.1", store.port, rank, ranks, b"", None) as group:
            do(group)
        log: list[Gather] = mine.log
        return log

    store = Store("127.0.0.1", 0, ranks, b"")
    with (
        mock.patch.object(bootstrap_tcp, "_Connection", counting),
        ThreadPoolExecutor(ranks) as pool,
    ):
        return list(pool.map(body, range(ranks)))


def open_channels(node: Bootstrap) -> None:
    """What the ranks of a node say over their store: for the two channels of a node."""
    for _ in range(2):
        Channel.open(node, Topology(node.rank, (0,) * node.size)).close()
