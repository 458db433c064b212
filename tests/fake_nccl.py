"""NCCL for ranks that are threads on an emulated device, with the rules of NCCL that bite.

Calls wait in the stream until their counterparts on other ranks are there, work of a communicator
runs in the order in which it was launched, by a graph or not, and what NCCL has no answer to, or a
wrong one, is put down as a *mistake*. Every wait ends at a deadline, which is a mistake too.

What differs from NCCL: the text of an error says what NCCL would only say with ``NCCL_DEBUG=WARN``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fake_nccl_data as data
from emulated_driver import EmulatedDriver
from fake_nccl_data import P2P, Part, Span
from fake_nccl_world import FakeComm, FakeWorld, Work, nccl_error

from cupy_zc.errors import DriverError

__all__ = ["FakeNccl", "FakeWorld", "fake_nccl"]


class _Group(threading.local):
    """What a thread has said since ``group_start``."""

    depth = 0

    def __init__(self) -> None:
        self.calls: dict[FakeComm, list[tuple[int, Part]]] = {}


class FakeNccl:
    """Fulfils :class:`~cupy_zc.collectives.nccl_library.Nccl`; one for all threads."""

    def __init__(self, world: FakeWorld) -> None:
        self.world = world
        self.version = world.version
        self._group = _Group()

        def of(method: Callable[..., None], name: str) -> Callable[..., None]:
            return functools.partial(method, name)

        self.all_reduce = of(self._reducing, "all_reduce")
        self.reduce_scatter = of(self._reducing, "reduce_scatter")
        self.reduce = of(self._reducing_to, "reduce")
        self.broadcast = of(self._rooted, "broadcast")
        self.gather = of(self._rooted, "gather")
        self.scatter = of(self._rooted, "scatter")
        self.all_gather = of(self._moving, "all_gather")
        self.all_to_all = of(self._moving, "all_to_all")
        self.send = of(self._sending, "send")
        self.recv = of(self._sending, "recv")

    # Communicators

    def unique_id(self) -> bytes:
        return next(self.world.numbers).to_bytes(128, "little")

    def init(
        self, size: int, identity: bytes, rank: int, *, sharp: bool, most_blocks: int | None
    ) -> FakeComm:
        world = self.world
        world.fail("init", rank)
        with world.changed:
            group = world.groups.setdefault(identity, {})
            comm = FakeComm(world, group, size, rank, sharp)
            comm.most_blocks = most_blocks
            world.wait(lambda: False, seconds=world.slow.get(rank, 0.0))
            if not world.wait(lambda: rank not in world.hanging):
                raise nccl_error("init", "RemoteError", "the test let it hang")
            members: dict[int, FakeComm] = group.setdefault("members", {})
            if rank in members or any(each.size != size for each in members.values()):
                world.mistake(f"rank {rank} of {size} cannot join {sorted(members)}")
            members[rank] = comm
            world.changed.notify_all()
            if not world.wait(lambda: len(members) == size):
                missing = sorted(set(range(size)) - set(members))
                del members[rank]  # who comes later does not find all
                raise nccl_error("init", "RemoteError", f"ranks {missing} did not come")
            twins = [each for each in members.values() if each.device == comm.device]
            if world.distinct_devices and len(twins) > 1:
                both = " and ".join(f"rank {each.rank}" for each in twins)
                cause = f"Duplicate GPU detected: {both} both on CUDA device {comm.device}"
                raise nccl_error("init", "InvalidUsage", cause)
            world.made.append(comm)
        return comm

    def async_error(self, comm: FakeComm) -> str:
        self._use(comm, "async_error")
        return self.world.async_errors.get(comm.rank, "")

    def destroy(self, comm: FakeComm) -> None:
        self._use(comm, "destroy")
        with self.world.changed:
            self._end(comm, "destroyed")
            if comm.registered or comm.windows:
                self.world.mistake(f"{comm} has memory registered")

    def abort(self, comm: FakeComm) -> None:
        self._use(comm, "abort")
        with self.world.changed:
            comm.aborted = True
            self.world.changed.notify_all()
            self._end(comm, "aborted")

    def _end(self, comm: FakeComm, state: str) -> None:
        world = self.world
        world.wait(lambda: comm.launched == comm.ended, f"{comm} was to be {state}, but has work")
        world.wait(lambda: not comm.in_graphs(), f"{comm} was to be {state}, but is in graphs")
        comm.state = state
        world.changed.notify_all()

    def _use(self, comm: FakeComm, function: str) -> None:
        if comm.state != "alive":
            self.world.mistake(f"{function} on {comm}")
            raise nccl_error(function, "InvalidArgument", f"{comm} is gone")
        self.world.fail(function, comm.rank)

    # Memory

    def register(self, comm: FakeComm, address: int, size: int) -> int:
        self.world.registrations.append((comm.rank, Span(address, size)))
        self._use(comm, "register")
        handle = next(self.world.numbers)
        comm.registered[handle] = Span(address, size)
        return handle

    def deregister(self, comm: FakeComm, handle: int) -> None:
        self._use(comm, "deregister")
        self._give_back(comm, "deregister", comm.registered, handle)

    def register_window(self, comm: FakeComm, address: int, size: int) -> object | None:
        self._use(comm, "register_window")
        world, span = self.world, Span(address, size)
        part = Part("register_window", 0, 0, size, 1)
        with world.changed:
            meeting = comm.meet(comm.key(part), comm.size, comm.rank, part)
            world.wait(lambda: comm.aborted or meeting.running)
            if not meeting.running:
                meeting.left()
                raise nccl_error("register_window", "RemoteError", "not all ranks came")
            if data.mismatch([part for _, part in meeting.parts.values()]):
                world.mistake(f"ranks call {[part for _, part in meeting.parts.values()]}")
            if comm.rank in world.no_window:
                return None
            window = object()
            comm.windows[window] = span
            return window

    def deregister_window(self, comm: FakeComm, window: object) -> None:
        self._use(comm, "deregister_window")
        self._give_back(comm, "deregister_window", comm.windows, window)

    def _give_back(
        self, comm: FakeComm, function: str, held: dict[Any, Span], handle: object
    ) -> None:
        with self.world.changed:
            if comm.launched != comm.ended:
                self.world.mistake(f"{function} on {comm} while it has work")
            if held.pop(handle, None) is None:
                self.world.mistake(f"{function} on {comm} of {handle!r}, which it does not have")
                raise nccl_error(function, "InvalidArgument", f"there is no {handle!r}")

    # Work

    def group_start(self) -> None:
        self._group.depth += 1

    def group_end(self) -> None:
        group = self._group
        group.depth -= 1
        if group.depth:
            return
        calls, group.calls = group.calls, {}
        for comm, said in calls.items():
            self.world.fail("group_end", comm.rank)
            parts = [part for _, part in said]
            if data.overlapping(parts, comm.rank, comm.size):
                self.world.mistake(f"rank {comm.rank}: memory of a group overlaps, {parts}")
            if len({stream for stream, _ in said}) > 1:
                self.world.mistake(f"rank {comm.rank}: a group is on several streams, {parts}")
            self._enqueue(comm, said[0][0], parts)

    def _sending(
        self, name: str, array: int, count: int, kind: int, peer: int, comm: FakeComm, stream: int
    ) -> None:
        given, taken = (array, 0) if name == "send" else (0, array)
        self._call(comm, stream, Part(name, given, taken, count, kind, root=peer))

    def _reducing(
        self, name: str, given: int, taken: int, count: int, kind: int, op: int,
        comm: FakeComm, stream: int,
    ) -> None:  # fmt: skip
        self._call(comm, stream, Part(name, given, taken, count, kind, op))

    def _reducing_to(
        self, name: str, given: int, taken: int, count: int, kind: int, op: int, root: int,
        comm: FakeComm, stream: int,
    ) -> None:  # fmt: skip
        self._call(comm, stream, Part(name, given, taken, count, kind, op, root))

    def _rooted(
        self, name: str, given: int, taken: int, count: int, kind: int, root: int,
        comm: FakeComm, stream: int,
    ) -> None:  # fmt: skip
        self._call(comm, stream, Part(name, given, taken, count, kind, root=root))

    def _moving(
        self, name: str, given: int, taken: int, count: int, kind: int,
        comm: FakeComm, stream: int,
    ) -> None:  # fmt: skip
        self._call(comm, stream, Part(name, given, taken, count, kind))

    def _call(self, comm: FakeComm, stream: int, part: Part) -> None:
        self._use(comm, part.function)
        self.world.calls.append((comm.rank, part))
        refused = data.refusal(part, comm.size)
        if refused:
            self.world.mistake(f"rank {comm.rank}: {part}: {refused}")
            raise nccl_error(part.function, "InvalidArgument", refused)
        problem = data.wrong(part, comm.rank, comm.size, sharp=comm.sharp)
        if problem:
            self.world.mistake(f"rank {comm.rank}: {part}: {problem}")
        if not part.elements and part.function not in P2P:
            return  # as NCCL
        if self._group.depth:
            self._group.calls.setdefault(comm, []).append((stream, part))
        else:
            self._enqueue(comm, stream, [part])

    def _enqueue(self, comm: FakeComm, address: int, parts: Sequence[Part]) -> None:
        stream = self.world.driver.stream_at(address, comm.device)
        if stream is None or stream.device_id != comm.device:
            self.world.mistake(f"rank {comm.rank}: {parts} on {stream} at {address:#x}")
            raise nccl_error(parts[0].function, "UnhandledCudaError", "no stream of the device")
        try:
            capture = stream.capture_info()
            stream.submit(parts[0].function, Work(comm, parts))
        except DriverError as error:
            raise nccl_error(parts[0].function, "UnhandledCudaError", str(error)) from error
        if capture is not None:
            comm.graphs.add(capture.graph)


@contextlib.contextmanager
def fake_nccl(driver: EmulatedDriver, **options: Any) -> Iterator[FakeNccl]:
    """NCCL, whose communicators must all be gone in the end, or soon, and no mistake made."""
    world = FakeWorld(driver, **options)
    try:
        yield FakeNccl(world)
        with world.changed:
            world.wait(lambda: not world.alive, seconds=2.0)  # what was left behind goes on
    finally:
        world.stop()
    assert not world.mistakes, world.mistakes
    assert not world.alive, world.alive
