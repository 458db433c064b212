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
from collections.abc import Callable
from typing import Any, NamedTuple

from ..driver.cuda import CudaDriver
from ..driver.cuda_kernels import launch, load
from ..errors import ClosedError, Error
from ..group.naming import name_ranks
from ..registration import Registry, SymmetricHeap
from .call import Call, Transfer
from .checks import Checker
from .device_args import EVERY_RANK, STAGED, Args, fingerprint, location
from .device_failures import failure_in_words
from .device_kernels import kernel_of, transfer_of
from .device_lane import DeviceLane, Records
from .device_mail import DeviceMail, MailSizes
from .device_multimem import Multicast, nothing_is_bound
from .device_plan import Launch, Machine, plan_of
from .device_setup import lines_are_whole, machine_of, test_mappings, zero_on_all
from .device_windows import WindowTable
from .engine import Place
from .plan import ROLES, Operation
from .point_to_point import Letter

__all__ = ["DeviceEngine", "DeviceRepeat"]

#: Shapes of calls that are kept ready for a lane.
_KEPT = 4096


class _Shape(NamedTuple):
    """A call but for where its arrays are, ready to be launched on a lane."""

    plan: Launch
    function: int
    args: Args
    #: Address of the array of addresses of parameters that a launch takes.
    parameters: int
    #: What keeps that array.
    keep: Any
    #: What it does where nobody stages.
    transfer: Transfer


class _Done(NamedTuple):
    """What is known of the last call, without its arrays."""

    #: None of a point-to-point call.
    operation: Operation | None
    root: int
    plan: Launch | None
    #: As far as this rank knows.
    transfer: Transfer
    stream: Any
    lane: DeviceLane | None


class DeviceRepeat:
    """A call that was made, to be made again with the same arrays on the same lane.

    It keeps no array: whoever asks for it again has them.
    """

    __slots__ = ("_done", "_engine", "_shape", "_values", "_version")

    def __init__(self, engine: DeviceEngine, shape: _Shape, done: _Done, version: int) -> None:
        args = shape.args
        self._engine = engine
        self._shape = shape
        self._done = done
        #: Of the registrations that the locations are from.
        self._version = version
        self._values = (args.input, args.output, args.input_location, args.output_location)

    def launch(self, stream: Any) -> bool:
        """Make it, if all is as it was; False, and nothing done, where it is not."""
        engine, shape = self._engine, self._shape
        if not engine.unchanged(self._version):
            return False
        args, plan = shape.args, shape.plan
        args.input, args.output, args.input_location, args.output_location = self._values
        launch(
            shape.function, plan.blocks, 1, 1, plan.threads, 1, 1, 0, stream.ptr,
            shape.parameters, 0,
        )  # fmt: skip
        engine.done = self._done
        return True


class DeviceEngine:
    """Carries out checked calls on a GPU.

    Collective to make.

    Args:
        registry: Where arrays are; of the CUDA driver.
        heap: Memory that all ranks reach.
        checker: The names of calls, for errors.
        abandon: Called when the ranks have lost each other, to let the peers know.
        timeout: Seconds that a kernel waits for a peer.
        deterministic: Whether sums must be the same from run to run.

    Raises:
        AgreementError: GPUs cannot reach each other's memory, or another step failed; on all ranks.
    """

    name = "device"

    def __init__(
        self,
        registry: Registry,
        heap: SymmetricHeap,
        checker: Checker,
        abandon: Callable[[], None],
        timeout: float,
        *,
        deterministic: bool = False,
    ) -> None:
        driver = registry.driver
        assert isinstance(driver, CudaDriver)  # the engine is chosen by the driver's name
        self.rank = checker.rank
        self.size = checker.size
        self._registry = registry
        self._heap = heap
        self._driver = driver
        self._device = registry.device
        self._checker = checker
        self._abandon = abandon
        self._timeout = timeout
        self._failure: BaseException | None = None
        self.done: _Done | None = None
        self._shape: _Shape | None = None
        self._records = Records(driver)
        self._machine: Machine = machine_of(registry, self.size, deterministic=deterministic)
        self._bound: Callable[[int, int], bool] = nothing_is_bound
        self._side = driver.make_stream(non_blocking=True)
        self._windows = WindowTable(driver, registry, self.size, self._side)
        self._lanes: dict[int, DeviceLane] = {}
        self._shapes: dict[tuple[Any, ...], _Shape] = {}
        self._open_lane(0)
        if self.size > 1 and not lines_are_whole(self._lanes[0], registry, self._side):
            self._machine = dataclasses.replace(self._machine, whole_lines=False)
        mail = MailSizes.of(self.size, self._machine.blocks)
        self._mail = DeviceMail(
            registry, heap, checker, mail, self._records, Records.COUNT - 1, timeout
        )
        zero_on_all(registry, self._side, "the mail", self._mail.address, self._mail.size)

    def _open_lane(self, number: int) -> None:
        lane = DeviceLane(
            number, self._registry, self._heap, self.size, self._machine.sizes, self._records,
            self._timeout,
        )  # fmt: skip
        if number == 0 and self.size > 1:
            test_mappings(lane, self._registry, self._side)
        address = lane.addresses[self.rank]
        zero_on_all(self._registry, self._side, f"lane {number}", address, lane.size)
        self._lanes[number] = lane
        if self._machine.multicast:
            self.use_multicast(self._machine.multicast, self._bound)

    def use_multicast(self, how: Multicast, bound: Callable[[int, int], bool]) -> None:
        """Access the copies of all ranks at once; before the first call, on all ranks alike.

        Args:
            how: By multimem instructions where the registry's windows have multicast.
            bound: Whether a byte, by arena and offset, is bound there, as all ranks say. Calls ask
                for arrays each time; where a lane is not bound, multicast is not used at all.
        """
        there = all(bound(0, lane.offset) for lane in self._lanes.values())
        self._machine = dataclasses.replace(self._machine, multicast=how if there else "")
        self._bound = bound
        self._shapes.clear()

    # Errors

    def check(self, call: object) -> None:
        """Raise what went wrong in a call that ran; see :meth:`Engine.check`."""
        if self._failure is None:
            failure = self._failure_of(call)
            if failure is not None:
                self.fail(failure)
                raise failure
        if self._failure is not None:
            raise ClosedError(
                f"{call} (rank {self.rank}): this communicator cannot be used since a call failed: "
                f"{self._failure}; close it and make a new one"
            ) from self._failure

    def _failure_of(self, call: object) -> Error | None:
        """What went wrong in a call on the device; None where nothing did."""
        if self._mail.record.code:
            return failure_in_words(self._mail.record, call, self.rank, self._timeout, self._mail)
        for lane in self._lanes.values():
            if lane.record.code:
                return failure_in_words(lane.record, call, self.rank, self._timeout, None)
        return None

    def fail(self, error: BaseException) -> None:
        """Make no further calls: the ranks have lost each other."""
        if self._failure is None:
            self._failure = error
        self._abandon()

    def close(self) -> None:
        """Drop the tables. Work enqueued has ended before."""
        self._mail.close()
        self._shapes.clear()
        self._lanes.clear()

    # Where arrays are

    def places(self, work: Call | Letter) -> tuple[Place, ...]:
        """Where the arrays of a call are, as far as peers touch them. Local."""
        if isinstance(work, Letter) or self.size == 1:
            return ()
        plan = self._plan(work)
        places: list[Place] = []
        if work.clash:
            places.append(Place(-1, 0, work.clash, None))
        elif plan.input_remote:
            places.append(self._place(work.input, "the input"))
        output = self._output(work)
        if plan.output_remote and output is not None:
            if work.operation is Operation.ALL_TO_ALL and work.in_place:
                places.append(Place(-1, 0, "all_to_all in place stages the output", None))
            else:
                places.append(self._place(output, "the output"))
        return tuple(places)

    def _place(self, array: Any, name: str) -> Place:
        arena, offset, registered, reason, segment = self._registry.locate(array)
        if registered:
            return Place(arena, offset, "", None)
        return Place(-1, 0, f"{name} is staged: {reason}", segment)

    def _locate(self, array: Any) -> int:
        """Where peers find an array, for a kernel."""
        if array is None:
            return STAGED
        arena, offset, registered, _, _ = self._registry.locate(array)
        if not registered:
            return STAGED
        return location(arena, offset, bound=self._bound(arena, offset))

    def _plan(self, call: Call) -> Launch:
        return plan_of(call, self._machine)

    # A call

    def enqueue(self, work: Call | Letter, stream: Any) -> None:
        """Launch a call."""
        self._shape = None
        if self._driver.current_device() == self._device:
            self._enqueue(work, stream, 0)
        else:
            with self._driver.use_device(self._device):
                self._enqueue(work, stream, 0)

    def _enqueue(self, call: Call | Letter, stream: Any, lane: int) -> None:
        if isinstance(call, Letter):
            self.done = _Done(None, 0, None, self._mail.enqueue(call, stream), stream, None)
            return
        source, target = call.input, self._output(call)
        if call.clash:
            with stream:
                source = source.copy(order="K")  # freed in the order of the stream
        if self.size == 1:
            self._copy(call, source, target, stream)
            plan = self._plan(call)
            done = _Done(call.operation, call.root, plan, transfer_of(call, plan, 1), stream, None)
            self.done = done
            return
        self._windows.refresh()
        shape = self._shape_of(call, lane)
        args, plan = shape.args, shape.plan
        args.input = 0 if source is None else source.data.ptr
        args.output = 0 if target is None else target.data.ptr
        args.input_location = self._locate(source) if plan.input_remote else STAGED
        args.output_location = self._locate(target) if plan.output_remote else STAGED
        args.windows, args.arenas = self._windows.address, self._windows.arenas
        launch(
            shape.function, plan.blocks, 1, 1, plan.threads, 1, 1, 0, stream.ptr,
            shape.parameters, 0,
        )  # fmt: skip
        if call.operation is Operation.BARRIER:
            return
        transfer = shape.transfer
        reasons = [place.reason for place in self.places(call) if place.reason]
        if reasons:
            transfer = dataclasses.replace(transfer, zero_copy=False, reason="; ".join(reasons))
        done = _Done(call.operation, call.root, plan, transfer, stream, self._lanes[lane])
        self.done = done
        if not call.clash and not lane:
            self._shape = shape

    def repeat(self) -> DeviceRepeat | None:
        """The call that was enqueued last, to be made again; see :meth:`Engine.repeat`."""
        shape, done = self._shape, self.done
        if shape is None or done is None:
            return None
        return DeviceRepeat(self, shape, done, self._registry.version)

    def unchanged(self, version: int) -> bool:
        """Whether arrays are where they were when the registrations had this version."""
        return (
            version == self._registry.version
            and self._windows.version == self._registry.windows.version
        )

    @staticmethod
    def _output(call: Call) -> Any:
        """What a kernel writes: the root of a broadcast has its array as output, too."""
        return (
            call.input
            if call.operation is Operation.BROADCAST and call.output is None
            else call.output
        )

    def _shape_of(self, call: Call, number: int) -> _Shape:
        key = (
            number, call.operation, call.code, call.reduction, call.root, call.columns,
            call.fortran,
        )  # fmt: skip
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _KEPT:
                self._shapes.clear()
            shape = self._shapes[key] = self._make_shape(call, self._lanes[number])
        return shape

    def _make_shape(self, call: Call, lane: DeviceLane) -> _Shape:
        plan = self._plan(call)
        function = load(self._device, kernel_of(call, plan, self._machine))
        args = lane.args()
        args.count = call.columns
        args.fingerprint = fingerprint(call)
        args.root = call.root if ROLES[call.operation].rooted else EVERY_RANK
        args.element = call.dtype.itemsize
        args.two_step = plan.two_step
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        transfer = transfer_of(call, plan, self.size)
        return _Shape(plan, function, args, ctypes.addressof(parameters), parameters, transfer)

    def _copy(self, call: Call, source: Any, target: Any, stream: Any) -> None:
        """What any collective of one rank is."""
        if source is not None and target is not None and source.data.ptr != target.data.ptr:
            nbytes = call.columns * call.dtype.itemsize
            self._driver.copy(target.data.ptr, source.data.ptr, nbytes, stream)

    # What it did

    @property
    def last(self) -> Transfer | None:
        """What the last call did; what peers staged is known once it has ended."""
        if self.done is None:
            return None
        operation, root, plan, transfer, stream, lane = self.done
        if lane is None or plan is None:
            return transfer
        if not (plan.input_remote or plan.output_remote) or not stream.done:
            return transfer
        with self._side:
            said = lane.staging(self.size)
        gets = range(self.size)
        if operation in (Operation.REDUCE, Operation.GATHER):
            gets = range(root, root + 1)
        staging = [
            peer
            for peer, (given, taken) in enumerate(said)
            if peer != self.rank
            and ((plan.input_remote and given) or (plan.output_remote and taken and peer in gets))
        ]
        if not staging:
            return transfer
        reasons = [*filter(None, [transfer.reason]), f"{name_ranks(staging)} staged"]
        return dataclasses.replace(transfer, zero_copy=False, reason="; ".join(reasons))
