"""The device engine: collectives as kernels over the mapped memory of the peers.

A call is one launch. In its entry the ranks tell each other what they call and where their arrays
are (``cuda/negotiate.cuh``), so nothing is exchanged on the host: a rank whose array is registered
is read and written in place, another one is staged, and ranks that call different things get a
MismatchError. Kernels wait for a bounded time. What goes wrong is found in a record in memory of
the host, by the next call, ``check()`` or ``synchronize()``; the communicator is over then.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from ..driver.api import KernelDriver, using_stream
from ..registration import Probe, Registry, SymmetricHeap
from .call import Call, Transfer, transfer_of
from .checks import Checker
from .device_args import STAGED
from .device_calls import Done, RepeatedCall, RepeatedLetter, Shape, shape_of
from .device_copies import Copies
from .device_health import Health
from .device_kernels import kernel_of, kernels_of, load_all
from .device_lane import DeviceLane
from .device_mail import DeviceMail, MailSizes
from .device_multimem import Multicast, nothing_is_bound
from .device_places import Places
from .device_plan import Launch, plan_of
from .device_probe import DeviceProbe
from .device_pulls import MEETING, Pulls, can_pull
from .device_setup import lines_are_whole, local_parts, machine_of, step, try_mappings, zero_on_all
from .device_switch import try_switch
from .device_tables import Tables
from .engine import Agreed, Place, Repeat, WithinNode
from .plan import Operation
from .point_to_point import Letter

__all__ = ["DeviceEngine"]

#: Shapes of calls that are kept ready for a lane.
_KEPT = 4096


class DeviceEngine(WithinNode):
    """Carries out checked calls on a GPU.

    Collective to make.

    Args:
        registry: Where arrays are; of the CUDA driver.
        heap: Memory that all ranks reach.
        checker: The names of calls, for errors.
        departed: Gives the ranks that have died or closed.
        abandon: Called when the ranks have lost each other, to let the peers know.
        timeout: Seconds that a kernel waits for a peer.
        deterministic: Whether sums must be the same from run to run.
        tables: From where an algorithm takes over; None: as the settings say, or the package.
        spare: Multiprocessors that are left to another engine.

    Raises:
        AgreementError: GPUs cannot reach each other's memory, or another step failed; on all ranks.
    """

    name = "device"
    #: How the copies of all ranks are reached at once where multicast is on.
    multicast_kind: Multicast = "hardware"

    def __init__(
        self,
        registry: Registry,
        heap: SymmetricHeap,
        checker: Checker,
        departed: Callable[[], Collection[int]],
        abandon: Callable[[], None],
        timeout: float,
        *,
        deterministic: bool = False,
        tables: Tables | None = None,
        spare: int = 0,
    ) -> None:
        driver = registry.driver
        assert isinstance(driver, KernelDriver)  # the engine is chosen by the driver's name
        self.rank, self.size = checker.rank, checker.size
        self.done: Done | None = None
        #: That of the last call, where it can still be asked for that call later.
        self.stream: Any = None
        self._registry = registry
        self._heap = heap
        self._driver = driver
        self._device = registry.device
        self._timeout = timeout
        self._health = Health(checker.rank, timeout, departed, abandon)
        self.is_well, self.release = self._health.is_well, self._health.release
        self.close_lane = registry.lanes.drop
        self._copies = Copies(driver)
        self._pulls = Pulls(driver, self.rank, self.size, registry.address)
        #: Of the call that is recorded next.
        self._agreed: Agreed | None = None
        self._repeat: Repeat | None = None
        self._machine = machine_of(
            registry, self.size, tables, spare=spare, deterministic=deterministic
        )
        self._places = Places(registry)
        self._records, self._side, self._windows = step(
            registry, "set up the device engine", partial(local_parts, registry, self.size)
        )
        self.multicast_probe: Probe | None = DeviceProbe(registry, self._side)
        self._lanes: dict[int, DeviceLane] = {}
        self._shapes: dict[tuple[Any, ...], Shape] = {}
        self._open_lane(0)
        if self.size > 1 and not lines_are_whole(self._lanes[0], registry, self._side):
            self._machine = dataclasses.replace(self._machine, whole_lines=False)
        machine = self._machine
        sizes = MailSizes.of(self.size, machine.blocks, whole_lines=machine.whole_lines)
        area = heap.reserve(sizes.area_bytes(self.size))
        parts = (registry, heap, area, checker, sizes, self._records, self._copies, timeout)
        self._mail = step(registry, "set up mail", lambda: DeviceMail(*parts))
        zero_on_all(registry, self._side, "the mail", area.ptr, area.size)
        self._health.watch(self._mail.record, self._mail.describe)

    def _open_lane(self, number: int) -> None:
        lane = DeviceLane(
            number, self._registry, self._heap, self.size, self._machine.sizes, self._records,
            self._timeout,
        )  # fmt: skip
        if number == 0:
            if self.size > 1:
                try_mappings(lane, self._registry, self._side)
            lane.add_scratch()
        own, nbytes = lane.addresses[self.rank], self._machine.sizes.lane_bytes(self.size)
        zero_on_all(self._registry, self._side, f"lane {number}", own, nbytes)
        self._lanes[number] = lane
        self._health.watch(lane.record, None)
        if self._machine.multicast:
            self.use_multicast(self._machine.multicast, self._places.bound)

    def prove_multicast(self, bound: Callable[[int, int], bool]) -> str:
        """Use multicast from now on, if what goes through it comes out right. Collective."""
        self.use_multicast(self.multicast_kind, bound)
        with self._aside():
            words = try_switch(
                self._registry, self._heap, self._machine, self.enqueue, self.check, self._side
            )
        self.done = self._repeat = self.stream = None
        if words:
            self.use_multicast("", nothing_is_bound)
        return words

    def use_multicast(self, how: Multicast, bound: Callable[[int, int], bool]) -> None:
        """Access the copies of all ranks at once; before the first call, on all ranks alike.

        Args:
            how: By multimem instructions where the registry's windows have multicast.
            bound: Whether a byte, by arena and offset, is bound there, as all ranks say. Calls ask
                for arrays each time; where a lane is not bound, multicast is not used at all.
        """
        there = all(bound(0, lane.offset) for lane in self._lanes.values())
        self._machine = dataclasses.replace(self._machine, multicast=how if there else "")
        self._places.bound = bound
        self._shapes.clear()

    def _aside(self) -> AbstractContextManager[None]:
        """A block whose work goes past the streams of calls."""
        return using_stream(self._side, self._driver.current_stream)

    # Errors, and waiting

    def check(self, call: object) -> None:
        """Raise what went wrong in a call that ran; see :meth:`Engine.check`."""
        self._health.check(call)

    def fail(self, error: BaseException) -> BaseException:
        """Make no further calls: the ranks have lost each other."""
        return self._health.fail(error, self.stream)

    def wait(self, point: Any) -> None:
        """Wait for a stream or an event; say so where it takes long, and for whom."""
        self._health.wait(point, self._missing)

    def _missing(self) -> list[int]:
        with self._driver.use_device(self._device), self._aside():
            return self._lanes[0].missing()

    def word(self, lane: int) -> int:
        """The address of 4 bytes, not 0 once a call of a lane has failed, until :meth:`release`."""
        return ctypes.addressof(self._lanes[lane].record)

    def preload(self, code: int, reduction: int) -> None:
        """Load the kernels of an element type and a reduction."""
        load_all(self._driver, self._device, kernels_of(code, reduction, self._machine))

    def close(self) -> None:
        """Give back what there is, but for lanes and mail: graphs that live keep theirs.

        Now, and not when the last reference is dropped: to release it, some pool would have to wait
        for the device, in the middle of a call of another communicator.
        """
        self._shapes.clear()
        self._repeat = self.stream = None
        with ExitStack() as stack:
            stack.callback(self._health.close)
            stack.callback(self._copies.close)
            stack.callback(self._windows.close)
            for number in self._lanes.keys() - set(self._registry.lanes.held):
                stack.callback(self._lanes[number].close)
            stack.callback(self._mail.close, graphs=bool(self._registry.leases.live()))
            transfer = self.last(ended=self.is_well())  # it can still be asked for
            self.done = None if transfer is None else Done(None, 0, None, transfer, None)

    # Where arrays are

    def places(self, work: Call | Letter) -> tuple[Place, ...]:
        """Where the arrays of a call are, as far as peers touch them. Local."""
        if isinstance(work, Letter) or self.size == 1:
            return ()
        return self._places.of(work, self._plan(work))

    def _plan(self, call: Call) -> Launch:
        return plan_of(call, self._machine)

    # Lanes of graphs

    def open_lane(self) -> int:
        """A lane for a graph. Collective."""
        number = self._registry.lanes.take()
        if number not in self._lanes:
            try:
                self._open_lane(number)
            except BaseException:
                self._registry.lanes.give_up(number)
                raise
        return number

    def fit_lane(self, lane: int, call: Call, agreed: Agreed | None) -> None:
        """Give it scratch, which it keeps, where the call is the first to need some."""
        self._agreed = agreed
        if (agreed is None or self._plan(call).uses_rings) and not self._lanes[lane].has_scratch:
            self._lanes[lane].add_scratch()
            self._shapes.clear()

    def lane_bytes(self, lane: int) -> int:
        """Bytes of a lane on this rank."""
        return self._lanes[lane].size

    def decline(self) -> None:
        """Nothing: kernels of peers that wait find it out by themselves, at their deadline."""

    def invalidate(self) -> None:
        """Make replays of all graphs do nothing from now on. Waits for those under way."""
        self._driver.synchronize(self._device)
        with self._aside():
            self._mail.shut()
            for number, lane in self._lanes.items():
                if number:
                    lane.shut()

    # A call

    def enqueue(self, work: Call | Letter, stream: Any, lane: int = 0) -> None:
        """Launch a call, or record its launch."""
        self._repeat = None
        if isinstance(work, Letter):
            self._deliver(work, stream)
            return
        try:
            self._enqueue(work, stream, lane)
        except BaseException as error:
            if not lane:  # the peers make this call, and wait for this rank
                self.fail(error)
            raise

    def _deliver(self, letter: Letter, stream: Any) -> None:
        transfer, made = self._mail.enqueue(letter, stream)
        self.done = done = Done(None, 0, None, transfer, None)
        self._in(stream)
        if made is not None:
            self._repeat = RepeatedLetter(self, made, done)

    def _enqueue(self, call: Call, stream: Any, lane: int) -> None:
        source, target = call.input, call.written
        if call.clash:
            source = self._copies.of(source.data.ptr, source.nbytes, stream)
        if self.size == 1:
            self._copy(call, source, target, stream)
            transfer = transfer_of(call, self._plan(call).algorithm, 1)
            self.done = Done(call.operation, call.root, None, transfer, None)
            self._in(stream)
            return
        self._windows.refresh()
        if lane and self._pull(call, stream, lane):
            return
        shape = self._shape_of(call, lane)
        args, plan = shape.args, shape.plan
        args.input = 0 if source is None else source.data.ptr
        args.output = 0 if target is None else target.data.ptr
        args.input_location = self._places.location(source) if plan.input_remote else STAGED
        args.output_location = self._places.location(target) if plan.output_remote else STAGED
        args.windows, args.arenas = self._windows.address, self._windows.arenas
        args.filled_with = None
        shape.launch(shape.function, plan.blocks, plan.threads, stream, shape.parameters)
        if call.operation is Operation.BARRIER:
            return
        transfer = shape.transfer
        reasons = [place.reason for place in self.places(call) if place.reason]
        if reasons:
            transfer = dataclasses.replace(transfer, zero_copy=False, reason="; ".join(reasons))
        # What peers do with a captured call is known when its graph is replayed, and not here.
        remote = plan.input_remote or (plan.output_remote and not plan.output_any)
        where = self._lanes[lane] if remote and not lane else None
        self.done = done = Done(call.operation, call.root, plan, transfer, where)
        self._in(stream)
        if not call.clash and not lane:
            self._repeat = RepeatedCall(self, shape, done, self._registry.version)

    def _pull(self, call: Call, stream: Any, lane: int) -> bool:
        """Let copy engines carry a captured call; False where they do not."""
        agreed, self._agreed = self._agreed, None
        if agreed is None or not can_pull(call, self._plan(call), self._machine, agreed.inputs):
            return False
        shape = self._shape_of(call, lane, MEETING)
        self._pulls.enqueue(call, agreed, stream, lane, shape)
        self.done = Done(call.operation, call.root, MEETING, shape.transfer, None)
        self._in(stream)
        return True

    def _in(self, stream: Any) -> None:
        self.stream = stream if self._driver.keeps_stream(stream) else None

    def repeat(self) -> Repeat | None:
        """The call that was enqueued last, to be made again; see :meth:`Engine.repeat`."""
        return self._repeat

    def unchanged(self, version: int) -> bool:
        """Whether arrays are where they were at this version of the registrations, and all is well.

        It is asked in every call of a loop.
        """
        return (
            version == self._registry.version
            and self._windows.version == self._registry.windows.version
            and self.is_well()
        )

    def _shape_of(self, call: Call, number: int, plan: Launch | None = None) -> Shape:
        """A call, ready to be launched by a plan; None: the one for its size."""
        key = (
            number, call.operation, call.code, call.reduction, call.root, call.columns,
            call.fortran, plan,
        )  # fmt: skip
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _KEPT:
                self._shapes.clear()
            plan = plan or self._plan(call)
            kernel = kernel_of(call.code, call.reduction, plan, self._machine)
            function = self._driver.load(self._device, kernel)
            args = self._lanes[number].args()
            transfer = transfer_of(call, plan.algorithm, self.size)
            shape = shape_of(call, plan, function, args, self._driver.launch, transfer)
            self._shapes[key] = shape
        return shape

    def _copy(self, call: Call, source: Any, target: Any, stream: Any) -> None:
        """What any collective of one rank is."""
        if source is not None and target is not None and source.data.ptr != target.data.ptr:
            nbytes = call.columns * call.dtype.itemsize
            self._driver.copy(target.data.ptr, source.data.ptr, nbytes, stream)

    # What it did

    def last(self, *, ended: bool) -> Transfer | None:
        """What the last call did; what peers staged is known once it has ended."""
        done = self.done
        if done is None or done.lane is None or not ended:
            return done and done.transfer
        with self._driver.use_device(self._device), self._aside():
            return done.with_staging(done.lane.staging(self.size), self.rank)
