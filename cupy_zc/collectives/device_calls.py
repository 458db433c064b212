"""Calls that were made on the device, ready to be made again."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ..group.naming import name_ranks
from .call import Call, Transfer
from .device_args import EVERY_RANK, STAGED, Args, fingerprint
from .device_lane import DeviceLane
from .device_mail import MailLaunch
from .device_plan import Launch
from .plan import ROLES, Operation

__all__ = ["Done", "RepeatedCall", "RepeatedLetter", "Shape", "shape_of"]


class Owner(Protocol):
    """What a call that is made again asks of its engine."""

    done: Done | None
    stream: Any

    def fail(self, error: BaseException) -> BaseException: ...
    def unchanged(self, version: int) -> bool: ...
    def is_well(self) -> bool: ...


class Shape(NamedTuple):
    """A call but for where its arrays are, ready to be launched on a lane."""

    plan: Launch
    function: int
    args: Args
    #: Address of the array of addresses of parameters that a launch takes.
    parameters: int
    #: What keeps that array.
    keep: Any
    #: Of the driver.
    launch: Callable[[int, int, int, Any, int], None]
    #: What it does where nobody stages.
    transfer: Transfer


def shape_of(
    call: Call,
    plan: Launch,
    function: int,
    args: Args,
    launch: Callable[[int, int, int, Any, int], None],
    transfer: Transfer,
) -> Shape:
    """A call by a plan, with arguments that have all that is its lane's, and no arrays yet."""
    args.count = call.columns
    args.fingerprint = fingerprint(call)
    args.root = call.root if ROLES[call.operation].rooted else EVERY_RANK
    args.element = call.dtype.itemsize
    args.two_step = plan.two_step
    args.input_location = args.output_location = STAGED
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
    return Shape(plan, function, args, ctypes.addressof(parameters), parameters, launch, transfer)


class Done(NamedTuple):
    """What is known of the last call, without its arrays."""

    #: None of a point-to-point call.
    operation: Operation | None
    root: int
    plan: Launch | None
    #: As far as this rank knows.
    transfer: Transfer
    #: None where nothing is to be learned from peers.
    lane: DeviceLane | None

    def with_staging(self, said: Sequence[tuple[bool, bool]], rank: int) -> Transfer:
        """What it did, as all ranks know.

        Args:
            said: Whether input and output of each rank were staged.
            rank: This one.
        """
        plan, gets = self.plan, range(len(said))
        assert plan is not None  # else there is no lane
        if self.operation in (Operation.REDUCE, Operation.GATHER):
            gets = range(self.root, self.root + 1)
        staging = [
            peer
            for peer, (given, taken) in enumerate(said)
            if peer != rank
            and ((plan.input_remote and given) or (plan.output_remote and taken and peer in gets))
        ]
        if not staging:
            return self.transfer
        reasons = [*filter(None, [self.transfer.reason]), f"{name_ranks(staging)} staged"]
        return dataclasses.replace(self.transfer, zero_copy=False, reason="; ".join(reasons))


class RepeatedLetter:
    """As :class:`RepeatedCall`, of a ``recv`` or a ``send_recv``."""

    __slots__ = ("_done", "_engine", "_made")

    def __init__(self, engine: Owner, made: MailLaunch, done: Done) -> None:
        self._engine = engine
        self._made = made
        self._done = done

    def launch(self, stream: Any) -> bool:
        """Make it, if nothing failed; False, and nothing done, where something did."""
        engine = self._engine
        if not (engine.is_well() and self._made.in_turn()):
            return False
        self._made(stream)
        engine.done, engine.stream = self._done, stream
        return True


class RepeatedCall:
    """A call that was made, to be made again with the same arrays on the same lane.

    It keeps no array: whoever asks for it again has them.
    """

    __slots__ = ("_done", "_engine", "_shape", "_values", "_version")

    def __init__(self, engine: Owner, shape: Shape, done: Done, version: int) -> None:
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
        if args.filled_with is not self._values:  # a loop fills them once
            args.input, args.output, args.input_location, args.output_location = self._values
            args.filled_with = self._values
        try:
            shape.launch(shape.function, plan.blocks, plan.threads, stream, shape.parameters)
        except BaseException as error:
            engine.fail(error)  # the peers make this call, and wait for this rank
            raise
        engine.done, engine.stream = self._done, stream
        return True
