"""``Communicator``: the ranks of a group, and the calls between them."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from ..driver.api import Driver
from ..errors import Error, LiveGraphsError
from ..group import Bootstrap, Topology, from_mpi, vote
from ..registration import (
    LeaseInfo,
    MulticastStatus,
    Registration,
    Rule,
)
from . import opening
from .assembly import assemble
from .call import BARRIER, Call, Transfer
from .calls import Calls
from .checks import Checker
from .ordering import Line
from .point_to_point import Letter
from .symmetric import SymmetricArrays

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Communicator"]

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


class Communicator(Calls, SymmetricArrays):
    """A group of ranks, one a process (or a thread), that call collectives together.

    Made by :func:`~cupy_zc.init_process_group`, :meth:`from_mpi`, :meth:`in_process` or
    :meth:`split`. Collective calls are made by all ranks in the same order. A communicator may be
    used by several threads of a process, whose calls take turns, and on several streams: work on
    one waits for the work enqueued on another one before.

    A call on a stream that is capturing is recorded into the graph: capturing is as collective as
    calling, and then the ranks meet when they replay. Its arrays are registered, and their memory
    is kept, for as long as the graph lives. A graph has a lane of its own: replays on one stream
    and calls on another one do not wait for each other.

    Large collectives use most of a GPU. Communicators that share GPUs must therefore be used in the
    same order on all of them: on one stream, or on streams that wait for each other. Otherwise one
    can keep the kernels of the other from running, until both time out.

    A context manager; :meth:`close` is local. Where an error leaves the block, and at exit of the
    process, live graphs do not keep it from being closed.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        topology: Topology,
        options: opening.Options,
        stack: ExitStack,
    ) -> None:
        """For the functions of :mod:`cupy_zc.collectives.opening`. Collective.

        Args:
            bootstrap: The ranks; owned from here on.
            topology: Where they are.
            options: What the user chose.
            stack: Closes what was made, if this fails on the way.
        """
        self._options = options
        self._driver: Driver = options.driver
        self._device = options.device
        self._timeout = options.wait
        self._bootstrap = bootstrap
        self._parted = False
        #: Number of this rank, from 0.
        self.rank = bootstrap.rank
        #: How many ranks there are.
        self.size = bootstrap.size
        host = self._driver.name == "host"
        self._checker = Checker(self.rank, self.size, self._device, host, options.refuses)
        self._parts = assemble(
            bootstrap, topology, options, self._checker, self._part, self._interrupted, stack
        )
        self._node, self._engine = self._parts.node, self._parts.engine
        self._talk, self._registry = self._node.talk, self._node.registry
        self._heap = self._node.heap
        self._across = self._parts.across
        #: Which engine it uses.
        self.backend = self._engine.name
        self._line = Line(
            self._checker, self._driver, self._registry, self._engine,
            automatic=options.register == "auto", threads=options.threads,
            strict=options.strict, timeout=self._timeout, across=self._across,
        )  # fmt: skip
        self._registry.multicast.start(
            self._engine.multicast_probe, self._heap.reserve_private, "Communicator",
            require=options.multicast == "require", insist=options.insists,
            prove=self._engine.prove_multicast,
        )  # fmt: skip
        self._engine.connect()
        vote(bootstrap, "start the engine")  # no rank posts a semaphore that is not set up yet
        _open.add(self)

    @classmethod
    def from_mpi(
        cls,
        mpi_comm: Any = None,
        *,
        backend: str = "auto",
        timeout: float | None = None,
        deterministic: bool = False,
        strict: bool = False,
        register: str = "auto",
        multicast: str = "auto",
        driver: str | Driver | None = None,
    ) -> Communicator:
        """The ranks of an mpi4py communicator. Collective over it; MPI is used for set-up only.

        A rank has the current device. Where all ranks of a node have the same one, and see more of
        them, each rank gets another one, which is made current.

        Args:
            mpi_comm: An ``mpi4py.MPI.Intracomm``; None for ``MPI.COMM_WORLD``.
            backend: "auto": "device" on the GPUs of a node, "host" on the host driver; on several
                nodes "hierarchical", or "nccl" where they have different numbers of ranks.
            timeout: Seconds to wait for a rank in a call; None for ``settings().timeout``.
            deterministic: Results bitwise equal from run to run: sums of floats stay out of the
                switch. Without multicast they always are.
            strict: Raise :class:`~cupy_zc.NotZeroCopyError` where this rank would copy its data
                through scratch. ``send`` always copies and is not concerned.
            register: "auto": the ranks register at calls 1, 2, 4, 8, ... what their collectives
                used; "manual": only :meth:`register` does.
            multicast: "auto": used by more than two ranks where all can; "require": an error where
                they cannot, and with ``strict`` for a call that cannot. Neither overrules a switch.
            driver: None: that of the installed pool, else as ``MemoryPool(driver=None)``.

        Raises:
            InvalidTypeError, InvalidValueError: an argument.
            MismatchError: the ranks chose differently.
            MulticastUnavailableError: multicast is required, and off or absent on a rank.
            PeerTimeoutError, AgreementError: a rank did not come, or could not.
            Error: there is no engine for the driver, or none that reaches all ranks.
        """
        options = opening.Options.of(
            "Communicator.from_mpi", driver=driver, backend=backend, timeout=timeout,
            deterministic=deterministic, strict=strict, register=register, multicast=multicast,
            spread=True,
        )  # fmt: skip
        return opening.start(cls, from_mpi(mpi_comm), options)

    @classmethod
    def in_process(
        cls,
        n: int,
        *,
        devices: Sequence[int] | None = None,
        backend: str = "auto",
        timeout: float | None = None,
        deterministic: bool = False,
        strict: bool = False,
        register: str = "auto",
        multicast: str = "auto",
        driver: str | Driver | None = None,
    ) -> list[Communicator]:
        """``n`` ranks in this process, in a list; use each in a thread of its own.

        ``devices`` names the device of each rank; None is the current one for all. The other
        arguments, and the errors, are those of :meth:`from_mpi`.

        Threads share the null stream, in which a rank could not wait for another one behind it. So
        a rank uses a stream of its own where it would use that one. For the same reason a rank that
        shares its device must not wait for the *device* while others call collectives; a pool does
        when it gives memory back to the driver.
        """
        options = opening.Options.of(
            "Communicator.in_process", driver=driver, backend=backend, timeout=timeout,
            deterministic=deterministic, strict=strict, register=register, multicast=multicast,
        )  # fmt: skip
        return opening.start_threads(cls, n, devices, options)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Part the ranks into groups of equal ``color``, ordered by ``(key, rank)``. Collective.

        Returns:
            The group of this rank, with the options of this one; None for ``color=None``, which
            takes no part. It outlives this one.

        Raises:
            As :meth:`from_mpi`; InvalidValueError: ``color`` or ``key`` does not fit 64 bits.
        """
        with self._line.turn("split"):
            part = self._bootstrap.split(color, key, timeout=self._timeout)
            return None if part is None else opening.start(type(self), part, self._options)

    # Memory

    @property
    def xp(self) -> Any:
        """The module that computes on ``cupy_zc.view`` of the arrays: numpy on the host driver."""
        return np if self._driver.name == "host" else cupy

    def register(self, target: Any) -> Registration:
        """Let the peers reach an array, or all segments of a pool. Collective.

        Args:
            target: A ``cupy.ndarray`` or a :class:`~cupy_zc.MemoryPool`; each rank gives its own.

        Returns:
            A context manager; ``deregister()`` is local.

        Raises:
            AgreementError: a rank could not; on all of them, and everything is as before.
            PeerTimeoutError, MismatchError, ClosedError: as every collective.
        """
        registration: Registration | None = None
        with self._line.turn("register"):
            try:
                with self._everywhere("register"):
                    registration = self._registry.register(target)
                self._engine.register(registration)
            except BaseException:
                if registration is not None:
                    registration.deregister()
                raise
            return registration

    def explain(self, array: Any) -> tuple[Rule, ...]:
        """Every rule that decides about zero-copy for an array, and what to do. Local."""
        with self._line.turn("explain"):
            rules = self._registry.explain(array)
            return rules + self._engine.rules(array) if array.nbytes else rules

    def collect(self) -> None:
        """Carry out what was deregistered, on all ranks. Collective. Errors: :meth:`register`."""
        with self._line.turn("collect"), self._everywhere("collect"):
            self._registry.collect()
            self._engine.collect()

    def leases(self) -> tuple[LeaseInfo, ...]:
        """What this communicator holds for graphs that live, oldest first. Local."""
        with self._line.turn("leases"):
            live = self._registry.leases.live()
            return tuple(lease.info(self._engine.lane_bytes) for lease in live)

    @property
    def multicast(self) -> MulticastStatus:
        """Whether multicast is used, and if not, which switch or words of the driver say so."""
        return self._registry.multicast.status

    @property
    def last_transfer(self) -> Transfer | None:
        """What the last call that ran did; None before the first one."""
        return self._engine.last(ended=self._line.is_idle())

    def barrier(self) -> None:
        """Return when all ranks have called it and this communicator's work before it is done.

        Raises:
            Error: the current stream is capturing. Otherwise as every collective.
        """
        with self._line.turn("barrier"):
            stream = self._line.stream("barrier", None)
            if self._line.capturing(stream):
                name = self._checker.name("barrier")
                raise Error(f"{name}: it waits for the ranks, which a capture cannot record")
            self._line.enqueue("barrier", BARRIER, stream)
        self._engine.wait(stream)
        self._engine.check("Communicator.barrier")

    def synchronize(self) -> None:
        """Wait for all calls enqueued here; what went wrong in one is raised.

        A ``send`` is done, as far as this goes, when its array was copied.
        """
        with self._line.turn("synchronize"):
            point = self._line.point
        if point is not None:
            self._engine.wait(point)
        self.check()

    def check(self) -> None:
        """Raise if the communicator cannot be used any more. Local, without waiting.

        Raises:
            ClosedError: it is closed, or a former call failed, which is the ``__cause__``.
        """
        with self._line.turn("check"):
            pass

    def close(self, force: bool = False) -> None:
        """Leave the group. Local, allowed twice. Calls still enqueued are waited for.

        Args:
            force: Close although graphs live that call this communicator. Replays under way are
                waited for; those that come later do nothing, but for copies by copy
                engines, and raise ClosedError.

        Raises:
            LiveGraphsError: there are such graphs; the communicator can still be used. One that
                cannot since a call failed is closed.
            DriverError: the first thing that went wrong; everything else was done all the same.
            Error: another thread is inside a call, or a replay does not end, within the timeout.
        """
        if os.getpid() != self._line.owner:  # a forked child, where a lock may be held for ever
            return
        with self._line.held("close"):
            if self._line.closed:
                return
            over = self._talk.closed  # since a call failed; then replays fail anyway
            if not (force or over) and (graphs := self._registry.leases.lasting()):
                raise LiveGraphsError(self._checker.name("close"), graphs)
            if self._registry.leases.live():
                self._engine.invalidate()
            self._line.closed = True
            _open.discard(self)
            with ExitStack() as stack:
                stack.callback(self._bootstrap.close)
                for group in self._parts.groups:
                    stack.callback(group.close)
                stack.callback(self._heap.close)
                stack.callback(self._engine.close)
                stack.callback(self._registry.close)  # waits for the device, and with it for ...
                stack.callback(self._part)  # ... ranks of the same device that wait for this one
                self._line.wait()
                self._engine.leave()

    def stop(self) -> None:
        """:meth:`close`, by the name that ``cupyx.distributed`` has for it."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(force=error is not None)

    def __repr__(self) -> str:
        state = ", closed" if self._line.closed else ""
        return f"<Communicator, rank {self.rank} of {self.size}, {self.backend} engine{state}>"

    # How a call is made

    def _again(self, key: tuple[Any, ...], source: Any, target: Any, stream: Any) -> bool:
        return self._line.again(key, source, target, stream)

    def _collective(
        self, call: Call, stream: Any, key: tuple[Any, ...], source: Any, target: Any
    ) -> None:
        with self._line.turn(call.operation.call):
            self._line.enqueue(call.operation.call, call, stream)
            self._line.keep(key, source, target)

    def _mail(self, letter: Letter, stream: Any, key: tuple[Any, ...]) -> None:
        with self._line.turn(letter.call):
            self._line.enqueue(letter.call, letter, stream)
            arrays = [part.array for part in (letter.given, letter.taken) if part is not None]
            self._line.keep(key, arrays[0], arrays[-1])

    def _interrupted(self, awaited: Collection[int], number: int, call: Call) -> None:
        """An eager call waits for ranks that may be capturing instead."""
        self._line.answer_captures(awaited, number, call)

    def _part(self) -> None:
        """Let the peers know that this rank makes no further calls."""
        self._node.part()
        if not self._parted:  # an engine that is told so may say it again
            self._parted = True
            self._parts.part()

    def _everywhere(self, step: str) -> AbstractContextManager[None]:
        """A block that fails on all nodes where it fails on one."""
        return nullcontext() if self._across is None else self._across.step(step)


def _close_all() -> None:
    with ExitStack() as stack:
        for each in list(_open):
            stack.callback(each.close, force=True)
            stack.callback(each._part)  # a thread that waits for other ranks is not waited for


atexit.register(_close_all)
