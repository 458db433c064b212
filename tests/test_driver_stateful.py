"""Random programs of ranges, segments and mappings against a model of the rules."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
from conftest import Resources
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cupy_zc import DriverError
from cupy_zc.driver.host import HostDriver

GRANULE = 1 << 12
TOTAL = 12 * GRANULE


@dataclass
class Physical:
    """What a segment is in the model: its size in granules and the first byte of each granule."""

    granules: int
    bytes: list[int]
    holders: int = 0


@dataclass
class Owned:
    """A handle and what it stands for."""

    handle: Any
    physical: Physical
    released: bool = False


@dataclass
class Mapped:
    physical: Physical
    opened: bool = False


@dataclass
class Reserved:
    """A range; mappings by the granule they start at."""

    address: int
    granules: int
    mappings: dict[int, Mapped] = field(default_factory=dict)

    def taken(self, start: int, granules: int) -> bool:
        return any(
            at < start + granules and start < at + mapped.physical.granules
            for at, mapped in self.mappings.items()
        )


picks = st.integers(0, 1 << 16)
places = st.integers(-1, 9)


class Programs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.before = Resources.now(collect=False)
        self.driver = HostDriver(granularity=GRANULE, memory=TOTAL)
        self.ranges: list[Reserved] = []
        self.handles: list[Owned] = []
        self.memory: list[Physical] = []

    def teardown(self) -> None:
        self.driver.close()
        self.before.assert_same(collect=False)

    def attempt(self, allowed: bool, call, *arguments) -> Any:
        """Make a call that the model allows or not; the driver must agree."""
        if allowed:
            return call(*arguments)
        with pytest.raises(DriverError) as error:
            call(*arguments)
        assert error.value.cause
        return None

    def drop(self, physical: Physical) -> None:
        physical.holders -= 1
        if physical.holders == 0:
            self.memory.remove(physical)

    def locate(self, pick: int, start: int) -> tuple[int, Reserved | None, int]:
        """An address near a range, the range it lies in (maybe another one), and where in it."""
        near = self.ranges[pick % len(self.ranges)]
        address = near.address + start * GRANULE
        for found in self.ranges:
            if found.address <= address < found.address + found.granules * GRANULE:
                return address, found, (address - found.address) // GRANULE
        return address, None, 0

    @property
    def free(self) -> int:
        return TOTAL - sum(physical.granules for physical in self.memory) * GRANULE

    @rule(halves=st.integers(-1, 16))
    def reserve(self, halves):
        size = halves * GRANULE // 2
        address = self.attempt(size > 0 and halves % 2 == 0, self.driver.reserve, size, 0)
        if address is not None:
            self.ranges.append(Reserved(address, halves // 2))

    @precondition(lambda self: self.ranges)
    @rule(pick=picks, halves=st.sampled_from([0, 0, 0, 1, -2]))
    def free_range(self, pick, halves):
        found = self.ranges[pick % len(self.ranges)]
        allowed = halves == 0 and not found.mappings
        size = found.granules * GRANULE + halves * GRANULE // 2
        self.attempt(allowed, self.driver.free_range, found.address, size)
        if allowed:
            self.ranges.remove(found)

    @rule(halves=st.integers(-1, 10))
    def create(self, halves):
        size = halves * GRANULE // 2
        allowed = size > 0 and halves % 2 == 0 and size <= self.free
        handle = self.attempt(allowed, self.driver.create, 0, size)
        if handle is not None:
            physical = Physical(halves // 2, [0] * (halves // 2), holders=1)
            self.memory.append(physical)
            self.handles.append(Owned(handle, physical))

    @precondition(lambda self: self.handles)
    @rule(pick=picks)
    def release(self, pick):
        owned = self.handles[pick % len(self.handles)]
        self.attempt(not owned.released, self.driver.release, owned.handle)
        if not owned.released:
            owned.released = True
            self.drop(owned.physical)

    @precondition(lambda self: self.handles)
    @rule(pick=picks)
    def share(self, pick):
        owned = self.handles[pick % len(self.handles)]
        fd = self.attempt(not owned.released, self.driver.export_segment, owned.handle)
        if fd is not None:
            handle = self.driver.import_segment(fd, owned.handle.size, 0)
            os.close(fd)
            owned.physical.holders += 1
            self.handles.append(Owned(handle, owned.physical))

    @precondition(lambda self: self.ranges and self.handles)
    @rule(range_pick=picks, handle_pick=picks, start=places, aside=st.sampled_from([0, 0, 0, 512]))
    def map(self, range_pick, handle_pick, start, aside):
        address, found, start = self.locate(range_pick, start)
        owned = self.handles[handle_pick % len(self.handles)]
        granules = owned.physical.granules
        fits = (
            found is not None
            and start + granules <= found.granules
            and not found.taken(start, granules)
        )
        allowed = fits and not owned.released and aside == 0
        self.attempt(allowed, self.driver.map, address + aside, owned.handle)
        if allowed:
            found.mappings[start] = Mapped(owned.physical)
            owned.physical.holders += 1

    @precondition(lambda self: self.ranges)
    @rule(pick=picks, start=places, granules=st.integers(0, 5))
    def unmap(self, pick, start, granules):
        address, found, start = self.locate(pick, start)
        mapped = None if found is None else found.mappings.get(start)
        allowed = mapped is not None and mapped.physical.granules == granules
        self.attempt(allowed, self.driver.unmap, address, granules * GRANULE)
        if allowed:
            self.drop(found.mappings.pop(start).physical)

    @precondition(lambda self: self.ranges)
    @rule(pick=picks, start=places, granules=st.integers(0, 9))
    def set_access(self, pick, start, granules):
        address, found, start = self.locate(pick, start)
        mappings = {} if found is None else found.mappings
        covered, at = [], start
        while at in mappings and at < start + granules:
            covered.append(mappings[at])
            at += mappings[at].physical.granules
        allowed = bool(covered) and at == start + granules
        self.attempt(allowed, self.driver.set_access, address, granules * GRANULE, 0)
        if allowed:
            for mapped in covered:
                mapped.opened = True

    @precondition(lambda self: any(found.mappings for found in self.ranges))
    @rule(pick=picks, value=st.integers(1, 255), granule=picks)
    def write(self, pick, value, granule):
        everywhere = [(found, at) for found in self.ranges for at in found.mappings]
        found, at = everywhere[pick % len(everywhere)]
        mapped = found.mappings[at]
        granule %= mapped.physical.granules
        address = found.address + (at + granule) * GRANULE
        self.attempt(mapped.opened, self.driver.write, address, bytes([value]))
        if mapped.opened:
            mapped.physical.bytes[granule] = value

    @invariant()
    def free_memory_is_what_nobody_holds(self):
        assert self.driver.memory_info(0).free == self.free

    @invariant()
    def every_opened_mapping_shows_its_segment(self):
        for found in self.ranges:
            for at, mapped in found.mappings.items():
                if mapped.opened:
                    data = self.driver.read(
                        found.address + at * GRANULE, mapped.physical.granules * GRANULE
                    )
                    assert list(data[::GRANULE]) == mapped.physical.bytes


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(stateful_step_count=40)
