"""What a rank has registered with NCCL, and why the rest is not.

Registration is by whole segments: of ``register()`` and of the symmetric heap, never of what calls
happen to touch. NCCL leaves open what happens where some ranks pass registered buffers and others
do not, so that must be the choice of the program, on all ranks in one call.

A segment is deregistered when nothing asks for it any more: no registration, and no graph in which
a call with it was captured. NCCL must not do that beside a call that may use it, so it happens
behind the calls that were made by then, at the next call, and the segment stays pinned until then.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from ..errors import Error
from ..group import Bootstrap, Channel, vote
from ..memory.blocks import Segment
from ..registration import Registration, pin
from .nccl_library import WINDOWS_FROM, Nccl

__all__ = ["Mode", "NcclRegistrations"]

_log = logging.getLogger("cupy_zc")

#: By ``ncclCommRegister``; by ``ncclCommWindowRegister``; by NCCL itself when the call was
#: captured; not at all.
Mode: TypeAlias = Literal["local", "window", "graph", "none"]


@dataclass(slots=True)
class _Entry:
    """A registered segment."""

    segment: Segment
    handle: Any
    mode: Mode
    #: Registrations, and lanes of graphs.
    holders: set[object] = field(default_factory=set)


class NcclRegistrations:
    """The registered segments of one rank, on one communicator of NCCL.

    Args:
        group: The ranks of the communicator; stays the caller's.
        library: NCCL.
        comm: The communicator.
        idle: Whether every eager call is over.
        calling: A block that calls NCCL, which may hang; it raises where all has been aborted.
        timeout: Seconds to wait for a rank.
    """

    def __init__(
        self,
        group: Bootstrap,
        library: Nccl,
        comm: Any,
        idle: Callable[[], bool],
        calling: Callable[[], AbstractContextManager[None]],
        timeout: float,
    ) -> None:
        self._group = group
        self._library = library
        self._comm = comm
        self._idle = idle
        self._calling = calling
        self._timeout = timeout
        self._entries: dict[Segment, _Entry] = {}
        #: Holders that are gone. Appended to by any thread.
        self._gone: list[object] = []
        #: Another one whenever something is registered or let go of.
        self.version = 0

    @property
    def stale(self) -> bool:
        """Whether there may be something to deregister."""
        return bool(self._gone)

    # What is registered

    def register(self, registration: Registration) -> None:
        """Register the segments of all ranks. Collective.

        Raises:
            AgreementError: it failed on a rank; on all of them, and nothing is kept.
        """
        self.sweep()
        fresh = [each for each in registration.segments if each not in self._entries]
        for mode in self._modes(fresh):
            declined = self._try(fresh, mode, registration)
            if not declined:
                break
        registration.at_end(partial(self._gone.append, registration))

    def adopt(self, segment: Segment, node: Channel) -> None:
        """Register a segment that all ranks have, until the end. Collective for those of the node.

        Args:
            segment: Of the symmetric heap, which only grows.
            node: The ranks of this rank's node.

        Raises:
            AgreementError: it failed on a rank of the node; on all of them.
        """
        if segment in self._entries:  # on all ranks of the node
            return
        failure: Exception | None = None
        made = [_Entry(each, None, "local", {self}) for each in pin([segment])]
        try:
            for entry in made:
                entry.handle = self._handle(entry.segment, "local")
        except Exception as error:  # noqa: BLE001 - the vote raises it on every rank
            failure = error
        try:
            vote(node, "register the symmetric heap with NCCL", failure, timeout=self._timeout)
        except BaseException:
            self._drop(made)
            raise
        self._entries.update((entry.segment, entry) for entry in made)
        self.version += 1

    def _modes(self, fresh: Sequence[Segment]) -> Sequence[Mode]:
        """How to try, in order, the same on all ranks."""
        if self._library.version < WINDOWS_FROM:
            return ("local",)
        sizes = json.dumps([segment.size for segment in fresh]).encode()
        said = self._group.all_gather(sizes, tag="register with NCCL", timeout=self._timeout)
        return ("window", "local") if len(set(said)) == 1 and fresh else ("local",)

    def _try(self, fresh: Sequence[Segment], mode: Mode, registration: Registration) -> bool:
        """Register in one way; whether NCCL made no windows somewhere, and nothing was done."""
        made: list[_Entry] = []
        failure: Exception | None = None
        declined = False
        try:
            for segment in pin(fresh):
                entry = _Entry(segment, None, mode)
                made.append(entry)
                entry.handle = self._handle(segment, mode)
                declined = declined or entry.handle is None
        except Exception as error:  # noqa: BLE001 - the vote raises it on every rank
            failure = error
        try:  # the others may be in NCCL until it is aborted
            vote(self._group, "register with NCCL", failure, timeout=2 * self._timeout)
            if mode == "window":
                said = self._group.all_gather(
                    bytes([declined]), tag="windows of NCCL", timeout=self._timeout
                )
                declined = any(one[0] for one in said)
        except BaseException:
            self._drop(made)
            raise
        if declined:
            self._drop(made)
            return True
        self._entries.update((entry.segment, entry) for entry in made)
        for segment in registration.segments:
            if segment in self._entries:  # unless its pool gave it back meanwhile
                self._entries[segment].holders.add(registration)
        self.version += 1
        return False

    def _handle(self, segment: Segment, mode: Mode) -> Any:
        register = self._library.register_window if mode == "window" else self._library.register
        with self._calling():
            return register(self._comm, segment.address, segment.size)

    def hold(self, holder: object, arrays: Iterable[Any]) -> None:
        """A call in a graph has these arrays; what is registered of them stays so with it."""
        for array in arrays:
            entry = self._of(array)
            if entry is not None:
                entry.holders.add(holder)

    def let_go(self, holder: object) -> None:
        """A graph is gone. Local, from any thread."""
        self._gone.append(holder)

    def _of(self, array: Any) -> _Entry | None:
        return self._entries.get(getattr(array.data.mem, "segment", None))  # type: ignore[arg-type]

    def mode(self, array: Any, *, captured: bool) -> tuple[Mode, str]:
        """How an array is registered for a call, and if not, why not.

        Args:
            array: It.
            captured: Whether the call is recorded into a graph.
        """
        entry = self._of(array)
        if entry is not None:
            return entry.mode, ""
        if not isinstance(getattr(array.data.mem, "segment", None), Segment):
            memory = type(array.data.mem).__name__
            return "none", f"its memory is a {memory}, not of a cupy_zc.MemoryPool"
        if not captured:
            return "none", "it is not registered: call register(array) on every rank"
        if os.environ.get("NCCL_GRAPH_REGISTER") == "0":
            return "none", "NCCL_GRAPH_REGISTER=0 keeps NCCL from registering it in the capture"
        return "graph", ""

    # Letting go

    def sweep(self, *, everything: bool = False) -> None:
        """Deregister what nothing holds any more, where no call can be using it.

        Args:
            everything: Whatever holds it; the communicator ends.
        """
        if not everything and not (self._gone and self._idle()):
            return
        gone = self._gone[:]
        del self._gone[: len(gone)]
        for entry in self._entries.values():
            entry.holders.difference_update(gone)
        dropped = [each for each in self._entries.values() if everything or not each.holders]
        for entry in dropped:
            del self._entries[entry.segment]
        if dropped:
            self.version += 1
            self._drop(dropped)

    def _drop(self, entries: Sequence[_Entry]) -> None:
        with ExitStack() as stack:
            for entry in entries:
                stack.callback(entry.segment.home.pool.supply.unpin, [entry.segment])
                if entry.handle is not None:
                    stack.callback(self._deregister, entry)

    def _deregister(self, entry: _Entry) -> None:
        window = entry.mode == "window"
        end = self._library.deregister_window if window else self._library.deregister
        try:
            with self._calling():
                end(self._comm, entry.handle)
        except Error as error:  # nobody can mend it, and the others are in a call
            _log.warning("a segment stays registered with NCCL: %s", error)

    def close(self, *, aborted: bool) -> None:
        """The communicator ends; if it was aborted, its registrations went with it."""
        if aborted:
            for entry in self._entries.values():
                entry.handle = None
        self.sweep(everything=True)
