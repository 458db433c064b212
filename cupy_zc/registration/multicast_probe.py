"""Trying multicast out: what each rank stores must come to all, and a load must reduce over all.

That objects can be made says little: there are machines on which they can, and data is lost. So the
first object carries data before anything relies on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..driver.api import MulticastHandle
from ..errors import Error
from ..group import Transaction

if TYPE_CHECKING:
    from .registry import Registry

__all__ = ["SPACING", "HostProbe", "Probe", "Target", "try_out"]

#: Bytes from the word of one rank to that of the next one.
SPACING = 16


class Target(NamedTuple):
    """A word behind a multicast object."""

    #: Where it is in the multicast window of this process.
    address: int
    #: Where it is in arena 0 of each rank.
    offset: int
    #: Where it is in the object.
    inside: int
    handle: MulticastHandle


class Probe(Protocol):
    """How an engine reaches all ranks at once. Both calls return when it is done."""

    def store(self, target: Target, value: int) -> None:
        """Store a 32-bit word to all ranks."""
        ...

    def reduce(self, target: Target) -> int:
        """The sum of the unsigned 32-bit words of all ranks."""
        ...


def try_out(
    transaction: Transaction,
    registry: Registry,
    probe: Probe,
    target: Callable[[int], Target],
) -> None:
    """Store from every rank, and let every rank reduce. Collective.

    Args:
        transaction: Its steps; they leave nothing to undo.
        registry: Of the communicator.
        probe: How to store and reduce.
        target: The word for the rank at an index.

    Raises:
        AgreementError: a word is not what it should be, or a step failed; on all ranks.
    """
    driver, channel = registry.driver, registry.channel
    me = channel.ranks.index(channel.rank)

    def clear() -> None:
        first = registry.address(channel.rank, 0, target(0).offset)
        driver.write(first, bytes(SPACING * channel.size))

    def check() -> None:
        for index, rank in enumerate(channel.ranks):
            word, stored = target(index), _value(index)
            reduced = probe.reduce(word)
            here = registry.address(channel.rank, 0, word.offset)
            own = int.from_bytes(driver.read(here, 4), "little")
            if (reduced, own) != (channel.size * stored, stored):
                raise Error(
                    f"rank {rank} stored {stored} to all {channel.size} ranks by multicast; rank "
                    f"{channel.rank} has {own} of it and reduces {reduced} over all, not "
                    f"{channel.size * stored}"
                )

    transaction.step("clear the words of the multicast probe", clear)
    transaction.step("store by multicast", lambda: probe.store(target(me), _value(me)))
    transaction.step("reduce by multicast", check)


def _value(index: int) -> int:
    return 1009 * (index + 1)


class HostProbe:
    """Multicast as the host driver has it: bindings without a switch behind them.

    It looks whether its own segment is bound where it should be, and reaches the copies of the
    ranks one by one.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def store(self, target: Target, value: int) -> None:
        """Store a 32-bit word to all ranks."""
        self._check_binding(target)
        for address in self._copies(target):
            self._registry.driver.write(address, value.to_bytes(4, "little"))

    def reduce(self, target: Target) -> int:
        """The sum of the words of all ranks."""
        self._check_binding(target)
        driver = self._registry.driver
        copies = self._copies(target)
        return sum(int.from_bytes(driver.read(address, 4), "little") for address in copies)

    def _copies(self, target: Target) -> list[int]:
        registry = self._registry
        return [registry.address(rank, 0, target.offset) for rank in registry.channel.ranks]

    def _check_binding(self, target: Target) -> None:
        registry = self._registry
        driver: Any = registry.driver  # the one driver that tells what is bound
        mine = [
            each.segment
            for each in driver.multicast_bindings(target.handle)
            if each.device == registry.device
            and each.offset <= target.inside < each.offset + each.size
        ]
        segment = registry.multicast.segment_at(0, target.offset)
        if segment is None or mine != [segment.handle]:
            raise Error(
                f"rank {registry.channel.rank}: behind {target.inside:#x} of the multicast object "
                f"is {mine}, not the segment of the arena"
            )
