"""The counters of a device pool: what is used and held, how much it ever was, how often."""

from __future__ import annotations

from collections.abc import Callable

from .blocks import Block

__all__ = ["Accounts"]


class Accounts:
    """Bytes and blocks of one device pool; changed in its region only.

    A block that came back counts as used until the pool has looked at it, so that dropping an array
    has nothing to count; ``returned`` tells which ones these are.
    """

    __slots__ = (
        "_returned",
        "growths",
        "peak_total_bytes",
        "peak_used_blocks",
        "peak_used_bytes",
        "retired_bytes",
        "retired_uses",
        "total_bytes",
        "used_blocks",
        "used_bytes",
    )

    def __init__(self, returned: Callable[[], list[Block]]) -> None:
        self._returned = returned
        self.total_bytes = 0
        self.used_bytes = 0
        self.used_blocks = 0
        self.peak_used_bytes = 0
        self.peak_used_blocks = 0
        self.peak_total_bytes = 0
        self.growths = 0
        #: Hand-outs, and their bytes, of blocks that have changed their size since.
        self.retired_uses = 0
        self.retired_bytes = 0

    def grew(self) -> None:
        """A segment was added; its bytes are in ``total_bytes`` already."""
        self.growths += 1
        self.peak_total_bytes = max(self.peak_total_bytes, self.total_bytes)

    def handed_out(self, block: Block) -> None:
        """A block left the parked or free ones."""
        self.used_bytes += block.size
        self.used_blocks += 1
        if self.used_bytes > self.peak_used_bytes or self.used_blocks > self.peak_used_blocks:
            self.exactly_used()

    def came_back(self, block: Block) -> None:
        """A block joined the parked ones."""
        self.used_bytes -= block.size
        self.used_blocks -= 1

    def exactly_used(self) -> int:
        """Bytes in the user's hands at this moment; brings the peaks up to date."""
        back = self._returned()
        used = self.used_bytes - sum(block.size for block in back)
        self.peak_used_bytes = max(self.peak_used_bytes, used)
        self.peak_used_blocks = max(self.peak_used_blocks, self.used_blocks - len(back))
        return used

    def retire(self, block: Block) -> None:
        """Move the hand-outs of a block that is about to change its size to the totals."""
        if block.uses:
            self.retired_uses += block.uses
            self.retired_bytes += block.uses * block.size
            block.uses = 0
