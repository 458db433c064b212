"""From where an algorithm takes over: thresholds in bytes of a row, by the number of ranks.

Those of the package are below, and in ``device_multimem.py``. ``cupy-zc bench --tune`` measures
those of a machine and writes a file, which ``CUPY_ZC_PLAN`` names:

    {"version": 1, "tables": {"push_reduce": {"2": 8388608}, "multimem": {"broadcast": {"4": 1}}}}

What it does not say is as below, but that ``ll128_row`` alone also says what ``ll128_broadcast``
and ``ll128_reduce_scatter`` are. Numbers of ranks between two take the entry of the next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import InvalidValueError
from . import device_multimem
from .device_args import MAX_RANKS
from .plan import Operation

__all__ = ["VERSION", "Tables", "at", "load_tables"]

VERSION = 1

# 2 ranks: measured on two H200 (benchmarks/results). Others by the traffic of each algorithm, to be
# measured: in one step a rank sends its row n - 1 times.

#: Largest all_reduce by LL128 in one exchange of everything with everybody, and in two steps (the
#: own part of all, then the results).
LL128_ONE_STEP: Mapping[int, int] = {2: 32 << 20, 3: 512 << 10, 4: 256 << 10, 8: 64 << 10}
LL128_TWO_STEPS: Mapping[int, int] = {2: 4 << 20, 3: 4 << 20, 4: 4 << 20, 8: 4 << 20}
#: Largest row of reduce_scatter by LL128; of what goes to a root or comes from one; and of
#: all_gather and all_to_all.
LL128_REDUCE_SCATTER: Mapping[int, int] = {2: 64 << 20, 3: 512 << 10, 4: 512 << 10, 8: 256 << 10}
LL128_BROADCAST: Mapping[int, int] = {2: 8 << 20, 3: 512 << 10, 4: 512 << 10, 8: 256 << 10}
LL128_ROW: Mapping[int, int] = {2: 16 << 20, 3: 512 << 10, 4: 512 << 10, 8: 256 << 10}
#: Largest all_reduce by LL, whose packets carry as much flag as data.
LL_ONE_STEP: Mapping[int, int] = {2: 512 << 10, 3: 256 << 10, 4: 128 << 10, 8: 32 << 10}
#: Smallest all_reduce, and reduce, by push_reduce, and smallest row of reduce_scatter.
PUSH_REDUCE: Mapping[int, int] = {2: 12 << 20, 3: 16 << 20, 4: 16 << 20, 8: 32 << 20}
PUSH_REDUCE_SCATTER: Mapping[int, int] = {2: 32 << 20, 3: 8 << 20, 4: 8 << 20, 8: 8 << 20}
#: Smallest row that copy engines move in a graph. None, until the engine's way was measured between
#: GPUs; a prototype was ahead from 128 MiB on (docs/performance.md).
COPY_ENGINES: Mapping[int, int] = {8: 1 << 40}

#: Tables that a file may say by that of all rows.
_ROWS = frozenset({"ll128_broadcast", "ll128_reduce_scatter"})

#: What an entry may be: lanes have buffers for the largest row of the low-latency algorithms.
MOST, MOST_BUFFERED = 1 << 40, 64 << 20


def at(table: Mapping[int, int], ranks: int) -> int:
    """The entry for so many ranks, or for the next number of ranks that has one."""
    return table[min(count for count in table if count >= ranks)]


@dataclass(frozen=True, slots=True)
class Tables:
    """All of them."""

    ll128_one_step: Mapping[int, int]
    ll128_two_steps: Mapping[int, int]
    ll128_reduce_scatter: Mapping[int, int]
    ll128_broadcast: Mapping[int, int]
    ll128_row: Mapping[int, int]
    ll_one_step: Mapping[int, int]
    push_reduce: Mapping[int, int]
    push_reduce_scatter: Mapping[int, int]
    copy_engines: Mapping[int, int]
    #: Smallest rows through the switch, and largest all_reduce in its packets.
    multimem: Mapping[Operation, Mapping[int, int]]
    multimem_ll: Mapping[int, int]

    @classmethod
    def own(cls) -> Tables:
        """Those of the package."""
        return cls(
            LL128_ONE_STEP, LL128_TWO_STEPS, LL128_REDUCE_SCATTER, LL128_BROADCAST, LL128_ROW,
            LL_ONE_STEP, PUSH_REDUCE, PUSH_REDUCE_SCATTER, COPY_ENGINES, device_multimem.MULTIMEM,
            device_multimem.MULTIMEM_LL,
        )  # fmt: skip

    def ll128(self, operation: Operation) -> Mapping[int, int]:
        """Largest row of a collective in lines that are exchanged once."""
        if operation is Operation.ALL_REDUCE:
            return self.ll128_one_step
        if operation is Operation.REDUCE_SCATTER:
            return self.ll128_reduce_scatter
        both_ways = operation in (Operation.ALL_GATHER, Operation.ALL_TO_ALL)
        return self.ll128_row if both_ways else self.ll128_broadcast

    @classmethod
    def with_entries(cls, where: str, entries: Any) -> Tables:
        """Those of the package, but for what is given.

        Args:
            where: What to call the entries in an error.
            entries: By the name of a table, and by ranks; as in a file.

        Raises:
            InvalidValueError: an entry that there is not, or a threshold that is none.
        """
        tables = cls.own()
        known = {field.name: getattr(tables, field.name) for field in fields(cls)}
        names = {operation.call: operation for operation in device_multimem.MULTIMEM}
        for name, table in _items(where, "the tables", entries):
            if name not in known:
                raise InvalidValueError(where, "a table", name, f"one of {', '.join(known)}")
            if name != "multimem":
                given = _entries(where, name, table)
                for each in (name, *(_ROWS - entries.keys() if name == "ll128_row" else ())):
                    known[each] = {**known[each], **given}
                continue
            known[name] = dict(known[name])
            for call, of_operation in _items(where, name, table):
                if call not in names:
                    raise InvalidValueError(where, name, call, f"one of {', '.join(names)}")
                operation = names[call]
                given = _entries(where, f"{name}.{call}", of_operation)
                known[name][operation] = {**known[name][operation], **given}
        return cls(**known)

    @property
    def digest(self) -> str:
        """What differs where two ranks have different tables."""
        plain = [
            sorted((int(key), sorted(value.items()) if isinstance(value, Mapping) else value)
                   for key, value in getattr(self, field.name).items())
            for field in fields(self)
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]


def _items(where: str, name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise InvalidValueError(where, name, value, "a JSON object")
    return list(value.items())


def _entries(where: str, name: str, table: Any) -> dict[int, int]:
    most = MOST_BUFFERED if name.startswith(("ll", "multimem_ll")) else MOST
    found = {}
    for ranks, threshold in _items(where, name, table):
        if not (ranks.isdecimal() and 2 <= int(ranks) <= MAX_RANKS):
            allowed = f"a number of ranks from 2 to {MAX_RANKS}"
            raise InvalidValueError(where, name, ranks, allowed)
        if type(threshold) is not int or not 0 <= threshold <= most:
            allowed = f"bytes from 0 to {most:,}"
            raise InvalidValueError(where, f"{name}[{ranks}]", threshold, allowed)
        found[int(ranks)] = threshold
    return found


def load_tables(path: str) -> Tables | None:
    """The tables of a file; None where there is no path.

    Raises:
        InvalidValueError: it cannot be read, or is no such file; with what is wrong.
    """
    if not path:
        return None
    where = "CUPY_ZC_PLAN"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        allowed = f"a file of cupy-zc bench --tune ({error})"
        raise InvalidValueError(where, "path", path, allowed) from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        allowed = f"a file of cupy-zc bench --tune, version {VERSION}"
        raise InvalidValueError(where, "path", path, allowed)
    return Tables.with_entries(f"{where} ({path})", content.get("tables"))
