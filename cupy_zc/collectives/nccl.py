"""The NCCL engine: ranks of any nodes, each call one call of NCCL.

It moves what the arrays are, in place where NCCL has them registered (:mod:`.nccl_registration`).
NCCL compares nothing: ranks that make different calls wait for each other until the timeout, or mix
up their data. Captured calls are compared by whoever records them (:mod:`.captured`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np

from ..config import settings
from ..driver.api import KernelDriver, capturing, using_stream
from ..errors import Error, MismatchError, PeerTimeoutError
from ..group import Bootstrap
from ..memory.blocks import Segment
from ..registration import Probe, Registration, Registry, Rule
from .call import BARRIER, Call, Transfer, transfer_of
from .checks import Checker
from .device_copies import Copies
from .engine import Agreed, Place
from .gate import Gate
from .local import LocalWork
from .nccl_calls import nccl_call
from .nccl_graphs import Graphs
from .nccl_health import NcclHealth
from .nccl_library import Nccl, NotInTimeError, in_time, load_nccl
from .nccl_made import Made
from .nccl_mail import NcclMail
from .nccl_registration import NcclRegistrations
from .nccl_rules import nccl_rules
from .nccl_setup import agreed_library, kept_from_multicast, make_comms, together
from .plan import REDUCTIONS, Operation
from .point_to_point import Letter

__all__ = ["NcclEngine"]

_log = logging.getLogger("cupy_zc")

#: Multiprocessors that NCCL may use where a node's engine works beside it.
RAIL_BLOCKS = 16
#: Seconds that a rank which closes waits for the others to do so.
LEAVING = 1.0
#: Bytes of an all_reduce for which NCCL connects what it uses for large ones.
_WARM_BYTES = 8 << 20
_INT32, _SUM = 2, REDUCTIONS.index("sum")
_IN_PLACE = "all_to_all in place copies the input"


class NcclEngine:
    """Carries out checked calls of ranks that NCCL connects.

    Args:
        group: The ranks; stays the caller's.
        registry: Of the node; has the lanes of graphs.
        checker: The names of calls, for errors; its ranks are those of ``group``.
        departed: Gives the ranks that are known to have died or closed.
        abandon: Called when the ranks have lost each other, to let the peers know.
        timeout: Seconds that a call may take.
        local: Work on own memory.
        sharp: Whether there is one rank a node, so that IB SHARP can carry reductions.
        beside: Whether another engine works on the GPU at the same time.
        mail: Whether there are point-to-point calls.
        tried: Whether multicast is tried on the node before this is connected.
        gate: What calls may wait behind in their stream.
    """

    name = "nccl"
    multicast_probe: Probe | None = None

    def __init__(
        self,
        group: Bootstrap,
        registry: Registry,
        checker: Checker,
        departed: Callable[[], Collection[int]],
        abandon: Callable[[], None],
        timeout: float,
        local: LocalWork,
        *,
        sharp: bool,
        beside: bool,
        mail: bool,
        tried: bool = False,
        gate: Gate | None = None,
    ) -> None:
        assert isinstance(registry.driver, KernelDriver)
        self.size = checker.size
        self._group, self._registry, self._checker = group, registry, checker
        self._driver: KernelDriver = registry.driver
        self._device = registry.device
        self._departed, self._abandon, self._timeout = departed, abandon, timeout
        self._local, self._sharp, self._beside, self._with_mail = local, sharp, beside, mail
        self._tried, self._gate = tried, gate
        self._load: Callable[[], Nccl] = load_nccl
        self._copies = Copies(self._driver)
        self._graphs = Graphs(self._driver, lambda holder: self.registrations.let_go(holder))
        self._repeat: Made | None = None
        self._mail: NcclMail | None = None
        self._token: Any = None
        #: What the last call did.
        self.done: Transfer | None = None
        self.health: NcclHealth
        self.registrations: NcclRegistrations
        self._library: Nccl
        self._comm: Any = None

    # Set-up

    def connect(self) -> None:
        """Make the communicators of NCCL, and try them out. Collective.

        Raises:
            AgreementError: NCCL is not there on a rank, or could not connect it; on all of them.
            MismatchError: ranks have different versions of NCCL.
        """
        library = agreed_library(self._group, self._load)
        with kept_from_multicast(self._registry.multicast.status, tried=self._tried):
            comms = make_comms(
                self._group, library, self._driver, self._device, 3 if self._with_mail else 1,
                sharp=self._sharp, most_blocks=RAIL_BLOCKS if self._beside else None,
            )  # fmt: skip
        self._library, self._comm = library, comms[0]
        limit = settings().setup_timeout  # the others wait no longer
        self.health = health = NcclHealth(
            self._checker.rank, library, self._driver, self._device, limit,
            self._departed, self._abandon, self._graphs.alive, self._gate,
        )  # fmt: skip
        health.watch(comms)
        self.registrations = NcclRegistrations(
            self._group, library, self._comm, lambda: health.idle, health.calling, self._timeout
        )
        if self._with_mail:
            self._mail = NcclMail(
                library, comms[1], comms[2], self._driver, self._checker, self._copies
            )
        together(self._group, "add up with NCCL", self._try_out, waits=3)
        health.tried(self._timeout)

    def _try_out(self) -> None:
        """Add ones up; rails do what they will do later, so that NCCL connects it now."""
        nbytes = _WARM_BYTES if self._beside else 8 + 2 * self.size
        memory = self._token = self._driver.kept_memory(nbytes)
        with using_stream(self._driver.make_stream(non_blocking=True), self._driver.current_stream):
            stream = self._driver.current_stream()
            self._driver.write(memory.ptr, np.ones(1, "i4").tobytes())
            self._sum(1, stream)
            self.health.wait(stream)
            total = int(np.frombuffer(self._driver.read(memory.ptr, 4), "i4")[0])
            if total != self.size:
                raise Error(f"NCCL added {self.size} ones up to {total}")
            if self._mail is not None:
                self._mail.connect(memory.ptr, self.size, stream)
                self.health.made(stream)
                self.health.wait(stream)
            if self._beside:
                at = memory.ptr
                self._sum(nbytes // 4, stream)
                call, there = self.hand_over, (at, at)
                call(self._library.reduce, (*there, 1, _INT32, _SUM, 0), stream)
                call(self._library.broadcast, (*there, 1, _INT32, 0), stream)
                call(self._library.all_to_all, (at, at + nbytes // 2, 1, _INT32), stream)
                self.health.made(stream)
                self.health.wait(stream)

    def _sum(self, count: int, stream: Any) -> None:
        """An all_reduce of memory of the engine, eager."""
        at = self._token.ptr
        self.hand_over(self._library.all_reduce, (at, at, count, _INT32, _SUM), stream)
        self.health.made(stream)

    def hand_over(
        self, function: Callable[..., None], arguments: tuple[int, ...], stream: Any
    ) -> None:
        """One call of NCCL."""
        health = self.health
        health.inside = time.monotonic()  # as health.calling(), which takes 1 us more
        try:
            health.refuse()
            function(*arguments, self._comm, stream.ptr)
        finally:
            health.inside = 0.0

    def prove_multicast(self, bound: Callable[[int, int], bool]) -> str:  # noqa: ARG002
        """Nothing to be proved: NCCL has multicast objects of its own."""
        return ""

    def register(self, registration: Registration) -> None:
        """Register segments with NCCL. Collective."""
        self.registrations.register(registration)

    def adopt(self, segment: Segment) -> None:
        """Register a segment of the symmetric heap. Collective."""
        self.registrations.adopt(segment, self._registry.channel)

    def collect(self) -> None:
        """Deregister what was let go of. Local."""
        self.registrations.sweep()

    def preload(self, code: int, reduction: int) -> None:
        """What divides; NCCL has loaded its kernels."""
        if REDUCTIONS[reduction] == "avg":
            self._local.preload([code])

    # What it did, and what went wrong

    def last(self, *, ended: bool) -> Transfer | None:  # noqa: ARG002
        """What the last call did; see :meth:`Engine.last`."""
        return self.done

    def rules(self, array: Any) -> tuple[Rule, ...]:
        """What decides how NCCL carries an array."""
        return nccl_rules(self.registrations, array, sharp=self._sharp)

    def check(self, call: object) -> None:
        """Raise what went wrong."""
        self.health.check(call)

    def fail(self, error: BaseException) -> BaseException:
        """Make no further calls, and end those under way."""
        return self.health.fail(error)

    def wait(self, point: Any) -> None:
        """Wait for a stream or an event."""
        self.health.wait(point)

    def decline(self) -> None:
        """No peer waits for an answer here: what is captured is compared elsewhere."""

    # Graphs

    def open_lane(self) -> int:
        """A lane for a graph. It takes no memory."""
        lane = self._registry.lanes.take()
        self.begin(lane)
        return lane

    def begin(self, lane: int) -> None:
        """A graph has calls of this engine from now on."""
        self._graphs.begin(lane)

    def fit_lane(self, lane: int, call: Call, agreed: Agreed | None) -> None:
        """Nothing: NCCL keeps for the graph what its calls need."""

    def lane_bytes(self, lane: int) -> int:  # noqa: ARG002
        """Nothing of ours."""
        return 0

    def close_lane(self, lane: int) -> None:
        """The graph of a lane is gone on this rank."""
        self.end(lane)
        self._registry.lanes.drop(lane)

    def end(self, lane: int) -> None:
        """A graph is gone. From any thread."""
        self._graphs.end(lane)

    def invalidate(self) -> None:
        """Let every replay end without doing anything from now on: the communicator is aborted."""
        try:
            in_time("replays", partial(self._driver.synchronize, self._device), self._timeout)
        except NotInTimeError:
            _log.warning("rank %d: a replay does not end; it is aborted", self._checker.rank)
        self._local.shut()
        self.fail(Error(f"{self._checker.name('close')}: closed while graphs with its calls live"))

    # A call

    def places(self, work: Call | Letter) -> tuple[Place, ...]:
        """What is copied before NCCL has it; what NCCL copies by itself it does not tell."""
        if isinstance(work, Letter):
            return ()
        reason = self._copied(work)
        return (Place(-1, 0, reason, None),) if reason else ()

    def _copied(self, call: Call) -> str:
        in_place = call.operation is Operation.ALL_TO_ALL and call.in_place and self.size > 1
        return call.clash or (_IN_PLACE if in_place else "")

    def enqueue(self, work: Call | Letter, stream: Any, lane: int = 0) -> None:
        """Put a call at the end of a stream."""
        self._repeat = None
        if self.registrations.stale:
            self.registrations.sweep()
        try:
            if isinstance(work, Letter):
                self._send_or_receive(work, stream)
            elif work is BARRIER:
                self._sum(1, stream)
            else:
                self._collective(work, stream, lane)
        except BaseException as error:
            # The others are in this call; what was not recorded, or not sent to itself, is no loss.
            if not (lane or isinstance(error, MismatchError) or capturing(self._driver, stream)):
                first = self.fail(error)
                if first is not error:
                    raise first from error
            raise

    def _collective(self, call: Call, stream: Any, lane: int) -> None:
        arrays = [each for each in (call.input, call.output) if each is not None]
        said = [self.registrations.mode(array, captured=bool(lane)) for array in arrays]
        copied = self._copied(call)
        reasons = [copied] if copied else []
        reasons += [f"NCCL copies: {why}" for _, why in said if why]
        mode = "none" if reasons else said[0][0]
        transfer = transfer_of(
            call, "nccl", self.size, reasons, staged=bool(reasons), registration=mode
        )
        if not call.columns:
            self.done = transfer
            return
        source, target = self._addresses(call, copied, stream)
        function, arguments, divisor = nccl_call(call, self.size, source, target, sharp=self._sharp)
        divide = None
        if divisor > 1:
            self._local.preload((call.code,))  # not behind a kernel that waits
            count = call.columns
            divide = partial(self._local.divide, target, count, call.code, divisor)
        made = Made(
            self, getattr(self._library, function), arguments, divide, transfer,
            self.registrations.version,
        )  # fmt: skip
        made.enqueue(stream)
        if lane:
            self.registrations.hold(self._graphs.holder(lane), arrays)
        else:
            self.health.made(stream)
            self._repeat = None if copied else made

    def _addresses(self, call: Call, copied: str, stream: Any) -> tuple[int, int]:
        """Of input and output; that of the other one where this rank has only one."""
        target = call.input if call.output is None else call.output
        source = target if call.input is None else call.input
        address: int = source.data.ptr
        if copied:
            address = self._copies.of(address, source.nbytes, stream).data.ptr
        return address, target.data.ptr

    def _send_or_receive(self, letter: Letter, stream: Any) -> None:
        assert self._mail is not None  # the engine of a rail has none
        capture = self._driver.capture_info(stream)
        with self.health.calling():
            self.done, on, queue = self._mail.enqueue(letter, stream, capture)
        if capture is None:
            self.health.made(on, queue)
            return
        arrays = [part.array for part in (letter.given, letter.taken) if part is not None]
        self.registrations.hold(self._graphs.holder_of_mail(capture), arrays)

    def repeat(self) -> Made | None:
        """The collective that was enqueued last."""
        return self._repeat

    def leave(self) -> None:
        """Wait for sends, which nobody waited for so far, and a moment for the other ranks.

        Their kernels may still read what this rank gives back.
        """
        if self._mail is not None:
            try:
                self._mail.wait(self.health.wait)
            except PeerTimeoutError as error:
                _log.warning("%s; what was sent is lost", error)
        if self.health.failure is None and not self._graphs.alive():
            with suppress(Error):
                self._group.all_gather(b"", tag="leave", timeout=LEAVING)

    def close(self) -> None:
        """Give back what there is. Local."""
        with ExitStack() as stack:
            stack.callback(self._copies.close)
            if self._comm is not None:  # it was connected
                stack.callback(self.health.close)
                stack.callback(self.registrations.close, aborted=self.health.failure is not None)
            if self._mail is not None:
                stack.callback(self._mail.close)
            self._repeat = None
