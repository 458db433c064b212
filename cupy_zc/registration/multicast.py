"""Multicast windows: what is stored there goes to all ranks, what is loaded is reduced over them.

One multicast object for each (communicator, arena), or a few where the arena is very large
(:mod:`.multicast_window`), and in it the segments that all ranks have registered at the same offset
(:mod:`.ledger`). All of it is set-up between the ranks:

1. :meth:`Multicast.start` asks every rank whether multicast may be used there. One switch on one
   rank, or one device without it, and none is made by anybody.
2. The first object, of the communicator's heap, is the *probe*: created by the first rank, imported
   by the others while that one holds it, every device added, bound, mapped, and used once
   (:mod:`.multicast_probe`). Each step is voted on. If one fails anywhere, the ranks go without
   multicast together, and keep the driver's words.
3. At each agreed point, segments that have become common are bound. If that fails, those segments
   and all later ones of that arena are reached by P2P, on all ranks. What was bound before stays:
   graphs may have captured it, and a base never moves.
4. A segment that a rank released is unbound on all ranks before any peer unmaps it. So the peers'
   mappings keep its memory until then, also where the pool gave it back to the driver long before.

The fabric may need a moment after a machine or a service was started (CUDA error 802). Then what
was done of the step is undone and it is tried again, on all ranks after the same pauses.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..config import multicast_refusal
from ..errors import AgreementError, MulticastUnavailableError
from ..group import Transaction, closing
from ..memory.blocks import Segment
from .ledger import Ledger, Place
from .multicast_probe import SPACING, Probe, Target, try_out
from .multicast_team import MulticastStatus, Team, form_team, switched_off
from .multicast_window import MulticastWindow

if TYPE_CHECKING:
    from .agreed import News
    from .published import Entry
    from .registry import Registry

__all__ = ["Multicast"]

_log = logging.getLogger("cupy_zc")

#: What the driver says while the fabric is not ready. The error of a vote has the words of the rank
#: that failed on all ranks, so all of them see it, and no further exchange is needed.
_NOT_READY = "CUDA_ERROR_SYSTEM_NOT_READY"
#: Seconds before the first attempt after that, doubled for each further one up to the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class Multicast:
    """The multicast windows of one communicator on one rank.

    For one thread at a time. Collective, but for :attr:`status`, :meth:`refusal` and :meth:`close`.
    """

    def __init__(self, registry: Registry, published: Mapping[Segment, Entry]) -> None:
        """For the registry; ``published`` is what this rank has, and changes."""
        self.status = MulticastStatus("off", "the communicator has not asked for it")
        #: Whether a call that cannot use it is an error.
        self.insists = False
        self._registry = registry
        self._published = published
        self._ledger = Ledger(registry.channel.ranks)
        self._windows: dict[int, MulticastWindow] = {}
        #: What is bound, at the same places on all ranks.
        self._bound: dict[Place, Segment] = {}
        self._team = Team(0, 1, 1, 0.0)
        self._probe: Callable[[Transaction, MulticastWindow], None] | None = None

    # What the communicator asks for

    def start(
        self,
        probe: Probe | None,
        spot: Callable[[int], int],
        call: str,
        *,
        require: bool,
        insist: bool = False,
        prove: Callable[[Callable[[int, int], bool]], str] = lambda _: "",
    ) -> None:
        """Decide together whether multicast is used, and try it. Collective, once.

        Args:
            probe: How the engine stores and reduces; None where it cannot.
            spot: Gives the offset, in arena 0, of so many bytes that nobody else uses. Collective;
                not called where nothing is tried.
            call: The public name, for errors.
            require: Whether there is to be an error where it cannot be used; equal on all ranks.
            insist: Whether there is to be one for each call that cannot use it then; equal as well.
            prove: Tries what the engine will do, given what is bound; says what is wrong, the same
                on all ranks. Collective.

        Raises:
            MulticastUnavailableError: it is required and cannot be used, on any of the ranks; on
                all of them, with the switch or the driver's words.
            PeerTimeoutError: a rank did not come.
        """
        size = self._registry.channel.size
        self.insists = insist and size > 1
        if size == 1:
            self.status = MulticastStatus("off", "one rank has nobody to send to")
            return
        if size == 2 and not require:
            self.status = MulticastStatus("off", "between two ranks P2P moves fewer bytes")
            return
        self.status, team = form_team(self._registry, able=probe is not None)
        if team is not None and probe is not None:
            self._team = team
            self._try(probe, spot(SPACING * size))
            wrong = prove(self._is_bound) if self.status.state == "on" else ""
            if wrong:
                _log.warning(
                    "rank %d: multicast is not used: %s", self._registry.channel.rank, wrong
                )
                self.status = MulticastStatus("unavailable", wrong)
        if require and self.status.state != "on":
            raise MulticastUnavailableError(
                call,
                "CUDA_ERROR_NOT_SUPPORTED",
                801,
                detail="multicast='require'",
                cause=f"{self.status.reason}; multicast='auto' goes without",
            )

    def _try(self, probe: Probe, spot: int) -> None:
        """Make the object of the heap, and use it."""

        def target(window: MulticastWindow, index: int) -> Target:
            offset = spot + SPACING * index
            handle, inside = window.object_at(offset)
            return Target(window.base + offset, offset, inside, handle)

        self._probe = lambda transaction, window: try_out(
            transaction, self._registry, probe, partial(target, window)
        )
        try:
            self._bind_new([0])
        finally:
            self._probe = None
        if self.status.state == "probing":  # nothing was bound, and nothing failed
            reason = "the ranks' heaps have no segment in common that one object could cover"
            self.status = MulticastStatus("unavailable", reason)
        self._bind_new()

    def refusal(self, arena: int, offset: int) -> str:
        """Why a registered byte of this rank is not in a multicast window; empty where it is.

        Local, and whether it is empty is the same on all ranks.
        """
        if self.status.state != "on":
            return f"multicast is {self.status.state}: {self.status.reason}"
        if self._is_bound(arena, offset):
            return ""
        fallen = dict(self.status.fallen).get(arena)
        if fallen is not None:
            return f"multicast is not used for its arena any more: {fallen}"
        segment = self.segment_at(arena, offset)
        if segment is not None and Place(arena, segment.offset) in self._ledger.common():
            return "its segment is not whole within one multicast object"
        return "not every rank has a segment of the same size registered at the same offset"

    def _is_bound(self, arena: int, offset: int) -> bool:
        return any(
            place.arena == arena and 0 <= offset - place.offset < segment.size
            for place, segment in self._bound.items()
        )

    def segment_at(self, arena: int, offset: int) -> Segment | None:
        """The segment with this byte that this rank has published."""
        for segment, entry in tuple(self._published.items()):
            if entry.name.arena == arena and 0 <= offset - segment.offset < segment.size:
                return segment
        return None

    # At agreed points

    def let_go(self, transaction: Transaction, tag: str, said: Mapping[int, News]) -> None:
        """Unbind what ranks released, before anybody unmaps it. A step that all ranks take.

        As with what is unmapped, it is not undone, and repeated where a rank failed in it.
        """
        self._ledger.release(said)
        common = self._ledger.common()
        leaving = [place for place in self._bound if place not in common]
        retired = {arena for news in said.values() for arena in news.retired}
        ending = sorted(retired & set(self._windows))
        if not leaving and not ending:
            return
        transaction.step(
            f"{tag}: unbind released segments", partial(self._take_back, leaving, ending)
        )
        for place in leaving:
            self._bound.pop(place).cast_by.discard(self)
        for arena in ending:
            del self._windows[arena]
            self._registry.windows.uncast(self._team.devices, arena)

    def _take_back(self, leaving: Sequence[Place], ending: Sequence[int]) -> None:
        self._registry.driver.synchronize(self._registry.device)  # unbinding does not wait
        by_arena = defaultdict(list)
        for place in leaving:
            by_arena[place.arena].append(place.offset)
        with ExitStack() as stack:
            for arena in ending:
                stack.callback(self._windows[arena].close)
            for arena, offsets in by_arena.items():
                stack.callback(self._windows[arena].unbind, offsets)

    def follow(self, said: Mapping[int, News]) -> None:
        """Bind what has become common at an agreed point that is over. Collective.

        A failure is no error, for P2P reaches the segments; it is logged and kept in the status.

        Raises:
            PeerTimeoutError: a rank did not come.
        """
        self._ledger.add(said)
        if self.status.state == "on":
            self._bind_new()

    def _bind_new(self, only: Sequence[int] | None = None) -> None:
        """Bind everything that is common, not bound yet, and of an arena that still takes it."""
        fallen = {arena for arena, _ in self.status.fallen}
        new: dict[int, list[int]] = defaultdict(list)
        for (arena, offset), size in self._ledger.common().items():
            room = self._ledger.room(arena)
            if (
                (arena, offset) not in self._bound
                and arena not in fallen
                and (only is None or arena in only)
                and MulticastWindow.fits(self._team, room, offset, size)
            ):
                new[arena].append(offset)
        for arena, offsets in new.items():
            if self.status.state in ("probing", "on"):
                self._bind_all(arena, offsets)

    def _bind_all(self, arena: int, offsets: Sequence[int]) -> None:
        """Bind the segments at these offsets of an arena on all ranks, or on none."""
        with self._pinned(arena, offsets) as segments:
            channel = self._registry.channel
            own = [multicast_refusal(), [each for each in offsets if each not in segments]]
            said = channel.all_gather(json.dumps(own).encode(), tag=f"bind in arena {arena}")
            switches, absent = zip(*map(json.loads, said), strict=True)
            off = switched_off(channel.ranks, switches)
            if off:
                self._fall(arena, off)
                return
            gone = {offset for each in absent for offset in each}  # by a pool, a moment ago
            there = [segments[offset] for offset in offsets if offset not in gone]
            if not there:
                return
            try:
                self._attempt(partial(self._extend, arena, there))
            except AgreementError as error:
                self._fall(arena, _words(error))
                return
            except BaseException as error:  # an interrupt of this rank, of which the others know
                self._fall(arena, _words(error))
                raise
        for each in there:
            self._bound[Place(arena, each.offset)] = each
            each.cast_by.add(self)
        if self.status.state == "probing":
            self.status = MulticastStatus("on", "")

    @contextmanager
    def _pinned(self, arena: int, offsets: Sequence[int]) -> Iterator[dict[int, Segment]]:
        """Those of the segments that their pool still has, by offset; it keeps them meanwhile."""
        pinned: dict[int, Segment] = {}
        try:
            for offset in offsets:
                segment = self.segment_at(arena, offset)
                if segment is not None and segment.home.pool.supply.pin([segment]):
                    pinned[offset] = segment
            yield pinned
        finally:
            for segment in pinned.values():
                segment.home.pool.supply.unpin([segment])

    def _attempt(self, action: Callable[[], None]) -> None:
        """Take a set of steps; again, on all ranks after equal pauses, while the fabric is not up.

        Raises:
            AgreementError: it failed, for another reason or until the patience was over.
        """
        waited, pause = 0.0, _FIRST_PAUSE
        while True:
            try:
                action()
            except AgreementError as error:
                if _NOT_READY not in str(error) or waited + pause > self._team.patience:
                    raise
                if not waited:
                    _log.warning(
                        "rank %d: the fabric is not ready for multicast; it is tried again for "
                        "%g s: %s", self._registry.channel.rank, self._team.patience, str(error),
                    )  # fmt: skip
            else:
                return
            time.sleep(pause)
            waited += pause
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _extend(self, arena: int, segments: Sequence[Segment]) -> None:
        """The steps that bind segments, and make what objects they need."""
        registry = self._registry
        with Transaction(registry.channel) as transaction:
            window = self._windows.get(arena)
            if window is None:
                room = self._ledger.room(arena)
                window = transaction.step(
                    "reserve a multicast window",
                    lambda: MulticastWindow(registry.driver, registry.device, self._team, room),
                    MulticastWindow.close,
                )
            pieces = window.missing(segments)
            for piece in pieces:
                self._make(transaction, window, piece)
            transaction.step(
                "bind segments to the multicast object",
                partial(window.bind, segments),
                lambda _: window.unbind([each.offset for each in segments]),
            )
            if pieces:
                transaction.step(
                    "map the multicast object",
                    partial(window.map, pieces),
                    lambda _: window.unmap(pieces),
                )
            if self._probe is not None:
                self._probe(transaction, window)
            transaction.commit()
        window.pieces.update(pieces)
        if arena not in self._windows:
            self._windows[arena] = window
            registry.windows.cast(self._team.devices, arena, window.base)

    def _make(self, transaction: Transaction, window: MulticastWindow, piece: int) -> None:
        """Have an object whose devices are all part of it. No device is ever taken out again."""
        channel = self._registry.channel
        maker = channel.rank == channel.ranks[0]
        with ExitStack() as stack:
            fds = transaction.step(
                "create the multicast object",
                lambda: [window.create(piece)] if maker else [],
                lambda _: window.release(piece),  # on every rank that has it by then
            )
            for fd in fds:
                stack.callback(os.close, fd)
            messages = channel.exchange(b"", fds, tag="multicast object")
            stack.enter_context(closing(messages))
            transaction.step(
                "join the multicast object", partial(window.join, piece, messages[0].fds)
            )

    def _fall(self, arena: int, words: str) -> None:
        """Go on without: the whole communicator where nothing ever worked, else the arena."""
        _log.warning(
            "rank %d: %s goes on without multicast: %s",
            self._registry.channel.rank,
            "the communicator" if self.status.state == "probing" else f"arena {arena}",
            words,
        )
        if self.status.state == "probing":
            self.status = MulticastStatus("unavailable", words)
        else:
            self.status = replace(self.status, fallen=(*self.status.fallen, (arena, words)))

    def close(self) -> None:
        """Unmap, unbind and release everything. Local; the device has finished by then.

        Raises:
            DriverError: something went wrong; everything else was done all the same.
        """
        self.status = MulticastStatus("off", "the communicator is closed")
        while self._bound:
            self._bound.popitem()[1].cast_by.discard(self)
        with ExitStack() as stack:
            while self._windows:
                stack.callback(self._windows.popitem()[1].close)


def _words(error: BaseException) -> str:
    """What went wrong, with what else went wrong when it was undone."""
    return "; ".join([str(error) or repr(error), *getattr(error, "__notes__", ())])
