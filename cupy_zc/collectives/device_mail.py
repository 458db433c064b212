"""send, recv and send_recv on GPUs: messages through channels, one kernel for all three.

For each pair of ranks a channel lies in the memory of the one that receives (``cuda/mail.cuh``).
A ``recv`` empties it on the caller's stream, and a ``send_recv`` fills one and empties the other at
once. A ``send`` must not wait for its receiver: it copies the array, in the caller's stream, and
pushes the copy in a stream of its own, one for each peer, so the order of messages is kept.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ..driver.api import KernelDriver, KernelName, round_up
from ..registration import Registry, SymmetricHeap, SymmetricMemory
from .call import Transfer
from .checks import Checker
from .device_args import mix, nanoseconds, unmix
from .device_copies import Copies
from .device_lane import Records
from .device_plan import KEPT_FREE, LINE_DATA, THREADS
from .dtypes import DTYPES
from .own_mail import OwnMail, apart
from .point_to_point import Letter, Parcel

__all__ = ["DeviceMail", "MailArgs", "MailLaunch", "MailPart", "MailSizes"]

_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64

MAX_TRACKS = 64
#: What is worth a block, in bytes: of a chunk of slots, and of a letter, where eight threads of a
#: block have a line each.
LEAST_CHUNK, LEAST_SHEET = 8192, THREADS // 8 * LINE_DATA
#: A chunk that is not cut in two, so that one is drained while the next is filled.
FINE = 65536


class MailPart(ctypes.Structure):
    """What to push, or where to drain to; see ``cuda/mail.cuh``."""

    _fields_ = (
        ("array", _u64), ("bytes", _u64), ("fingerprint", _u64), ("area", _u64), ("peer", _u64),
        ("blocks", _u32), ("chunk", _u32),
    )  # fmt: skip


class MailArgs(ctypes.Structure):
    """The argument of the mail kernel; see ``cuda/mail.cuh``."""

    _fields_ = (
        ("push", MailPart), ("drain", MailPart),
        ("area", _u64), ("error", _u64), ("lane", _u64), ("budget", _u64),
        ("letter", _u64), ("slot", _u64),
        ("letters", _u32), ("slots", _u32), ("tracks", _u32), ("rank", _u32),
    )  # fmt: skip


class MailSizes(NamedTuple):
    """Capacities of a mail area, equal on all ranks. Bytes of a letter and of a slot."""

    letter: int
    letters: int
    slot: int
    slots: int
    tracks: int

    @classmethod
    def of(cls, ranks: int, blocks: int, *, whole_lines: bool) -> MailSizes:
        """For so many ranks and blocks of a launch: a track of either direction is a block.

        Args:
            ranks: How many.
            blocks: Of a launch, at most.
            whole_lines: Whether the links keep lines whole; else letters have no data.
        """
        tracks = max(1, min(MAX_TRACKS, blocks // 2))
        letter, slot = (1 << 20, 256 << 10) if ranks == 2 else (64 << 10, 64 << 10)
        return cls(letter if whole_lines else 0, 16, slot, 2, tracks)

    def area_bytes(self, ranks: int) -> int:
        """Bytes of an area: the fixed part, and a channel for each peer."""
        letters = self.letters * 128 * (1 + -(-self.letter // LINE_DATA))
        return 19584 + (ranks - 1) * (letters + self.tracks * self.slots * self.slot)

    def blocks(self, nbytes: int, most: int) -> int:
        """Blocks of one side of a message, which may have so many: each has a track of slots."""
        share = LEAST_SHEET if nbytes <= self.letter else self.chunk(nbytes)
        return max(1, min(most, -(-nbytes // share)))

    def chunk_of_block(self, nbytes: int, blocks: int) -> int:
        """``MailPart.chunk`` of a message that so many blocks pass."""
        if nbytes <= self.letter:
            return -(-nbytes // (blocks * LINE_DATA)) * LINE_DATA
        return self.chunk(nbytes)

    def chunk(self, nbytes: int) -> int:
        """Bytes of a chunk of slots; see ``chunk_of`` in ``cuda/mail.cuh``."""
        share = round_up(-(-nbytes // self.tracks), 128)
        share = min(share, max(FINE, round_up(-(-share // 2), 128)))
        return max(LEAST_CHUNK if self.slot > LEAST_CHUNK else 128, min(share, self.slot))


class MailLaunch(NamedTuple):
    """A launch of the kernel, which can be made again."""

    driver: KernelDriver
    function: int
    blocks: int
    #: Address of the array of addresses of parameters, and what keeps it.
    parameters: int
    keep: Any
    #: Whether what was pushed to the same peer before has arrived.
    in_turn: Callable[[], bool]

    def __call__(self, stream: Any) -> None:
        """Launch on a stream."""
        self.driver.launch(self.function, self.blocks, THREADS, stream, self.parameters)


class DeviceMail:
    """The point-to-point calls of one rank; for one thread at a time.

    Args:
        registry: Where the memory of peers is.
        heap: Of the area.
        area: Of ``sizes``, at one offset on all ranks, and zeroed before anybody calls.
        checker: The names of calls, for errors.
        sizes: Capacities, equal on all ranks.
        records: Where kernels say what went wrong.
        copies: Makes copies.
        budget: Seconds that a kernel waits for a peer.
    """

    def __init__(
        self,
        registry: Registry,
        heap: SymmetricHeap,
        area: SymmetricMemory,
        checker: Checker,
        sizes: MailSizes,
        records: Records,
        copies: Copies,
        budget: float,
    ) -> None:
        driver = registry.driver
        assert isinstance(driver, KernelDriver)
        self._driver = driver
        self._device = registry.device
        self._checker = checker
        self._sizes = sizes
        self.rank = checker.rank
        self.record = records.of_mail()
        offset = heap.offset(area)
        self._areas = [registry.address(peer, 0, offset) for peer in range(checker.size)]
        self._area: SymmetricMemory | None = area
        self._function = driver.load(self._device, KernelName("mail.cu", "mail"))
        self._copies = copies
        self._streams: dict[int, Any] = {}
        #: Of a send that may wait: all of them together leave the collectives their room.
        self._patient_tracks = max(1, min(sizes.tracks, KEPT_FREE // max(1, checker.size - 1)))
        self._own = OwnMail(driver, checker, copies)
        self._template = MailArgs(
            MailPart(), MailPart(), area.ptr, ctypes.addressof(self.record),
            Records.MAIL, nanoseconds(budget),
            sizes.letter, sizes.slot, sizes.letters, sizes.slots, sizes.tracks, self.rank,
        )  # fmt: skip

    def enqueue(self, letter: Letter, stream: Any) -> tuple[Transfer, MailLaunch | None]:
        """Put a point-to-point call at the end of a stream.

        Returns:
            What it does, and the launch where another one of the same arrays would be the same.

        Raises:
            MismatchError: a ``recv`` of this rank from itself finds no message that fits.
        """
        given, taken, peer = letter.given, letter.taken, letter.peer
        tracks = self._sizes.tracks
        if peer == self.rank:
            return self._own.enqueue(letter, stream), None
        if given is not None and taken is not None:
            source, reason = apart(self._copies, given, taken, stream)
            both = (source.data.ptr, given), (taken.info.ptr, taken)
            made = None
            if self._in_turn(peer) or self._driver.capture_info(stream) is not None:
                made = self._launch(peer, *both, stream, tracks)
            else:
                self._swap_behind(peer, *both, stream)
            done = Transfer("send_recv", "push", not reason, reason, given.nbytes)
            return done, None if reason else made
        if taken is not None:
            made = self._launch(peer, None, (taken.info.ptr, taken), stream, tracks)
            return Transfer("recv", "push", True, "", taken.nbytes), made
        assert given is not None  # a letter has one of the two
        if self._driver.capture_info(stream) is not None:
            self._launch(peer, (given.info.ptr, given), None, stream, tracks)
            return Transfer("send", "push", True, "", given.nbytes), None
        copy = self._copy(given, stream)
        ahead = self._stream_to(peer)
        ahead.wait_event(self._driver.record_event(stream))
        self._launch(peer, (copy.data.ptr, given), None, ahead, self._patient_tracks)
        self._copies.record_stream(copy, ahead)
        reason = "a send does not wait for its peer"
        return Transfer("send", "copy", False, reason, given.nbytes), None

    def describe(self, word: int) -> str:
        """A message as its fingerprint tells it."""
        word = unmix(word)
        code = word >> 1 & 15
        if code >= len(DTYPES):
            return "something that is no message of this version"
        order = " in Fortran order" if word & 1 else ""
        return f"{word >> 5} elements of {DTYPES[code]}{order}"

    def shut(self) -> None:
        """Make every launch return at once, from now on: graphs outlive the communicator."""
        assert self._area is not None
        self._driver.write(self._area.ptr, (1 << 63).to_bytes(8, "little"))

    def close(self, *, graphs: bool) -> None:
        """Drop the area, what was sent to this rank itself, and the streams: all has ended.

        Args:
            graphs: Whether some live that call it, and read the area when they are replayed.
        """
        if not graphs:
            self._area = None
        self._own.close()
        self._streams.clear()

    def _launch(
        self,
        peer: int,
        push: tuple[int, Parcel] | None,
        drain: tuple[int, Parcel] | None,
        stream: Any,
        most: int,
    ) -> MailLaunch:
        """Push, drain, or both; a push by 1 to ``most`` blocks, which its receiver learns."""
        args = MailArgs.from_buffer_copy(self._template)
        sides = (args.push, push, most), (args.drain, drain, self._sizes.tracks)
        for part, what, usable in sides:
            if what is not None:
                pointer, parcel = what
                part.array, part.bytes = pointer, parcel.nbytes
                part.fingerprint = mix(parcel.elements << 5 | parcel.code << 1 | parcel.fortran)
                part.area, part.peer = self._areas[peer], peer
                part.blocks = self._sizes.blocks(parcel.nbytes, usable)
                part.chunk = self._sizes.chunk_of_block(parcel.nbytes, part.blocks)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        made = MailLaunch(
            self._driver, self._function, args.push.blocks + args.drain.blocks,
            ctypes.addressof(parameters), (args, parameters),
            functools.partial(self._in_turn, peer),
        )  # fmt: skip
        made(stream)
        return made

    def _copy(self, parcel: Parcel, stream: Any) -> Any:
        return self._copies.of(parcel.info.ptr, parcel.nbytes, stream)

    def _in_turn(self, peer: int) -> bool:
        """Whether all that was sent to a peer before has been pushed."""
        ahead = self._streams.get(peer)
        return ahead is None or ahead.done

    def _swap_behind(
        self, peer: int, push: tuple[int, Parcel], drain: tuple[int, Parcel], stream: Any
    ) -> None:
        """Both halves of a ``send_recv`` while a ``send`` to the peer is still under way.

        What goes to one peer is pushed in the order of the calls, so the half that pushes goes
        behind that send, and the caller's stream waits for it.
        """
        ahead = self._streams[peer]
        ahead.wait_event(self._driver.record_event(stream))
        tracks = self._sizes.tracks
        self._launch(peer, push, None, ahead, tracks)
        self._launch(peer, None, drain, stream, tracks)
        stream.wait_event(self._driver.record_event(ahead))

    def _stream_to(self, peer: int) -> Any:
        stream = self._streams.get(peer)
        if stream is None:
            stream = self._streams[peer] = self._driver.make_stream(non_blocking=True)
        return stream
