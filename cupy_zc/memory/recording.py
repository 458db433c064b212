"""What a pool did over time: ``MemoryPool.record()``.

A recording looks at the blocks of its pool every few milliseconds, from a thread of its own, and
keeps when each block was first and last seen. While it runs, requests for memory do not take the
pool's fast path but come by :meth:`Recording.note`, which writes down when and where in the program
the block was handed out. When it does not run, nothing is different: there is no test for it in the
fast path.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import Error, InvalidValueError
from .blocks import Block, Segment
from .snapshot import VERSION, segment_info, statistics, take_snapshot

if TYPE_CHECKING:
    from typing_extensions import Self

    from .pool import MemoryPool
    from .pooled import PooledMemory

__all__ = ["Recording"]

_log = logging.getLogger("cupy_zc")

#: Looks that are kept. When there are more, every second one is dropped and the interval doubled.
MOST_FRAMES = 1000
#: Blocks that are kept after they are gone; then the oldest are forgotten.
MOST_GONE = 100_000
#: Callers that are kept of where a block was asked for, and such places in all.
MOST_CALLERS, MOST_SITES = 8, 10_000
#: Seconds between two writes of the file.
SAVE_EVERY = 1.0
#: Seconds to wait for another thread's look, which takes milliseconds.
_DEADLINE = 60.0
#: Frames in these packages are not the program's.
_OURS = frozenset({__name__.partition(".")[0], "cupy", "cupyx"})

#: Two looks saw the same block where these are equal: only one hand-out is at one time and place.
_SAME = ("device", "generation", "offset", "size", "from")

_Site: TypeAlias = "tuple[tuple[CodeType, int], ...]"
_Seen: TypeAlias = "dict[tuple[Any, ...], dict[str, Any]]"


class Recording:
    """A recording of one pool: a context manager, or :meth:`start` and :meth:`stop`.

    Made by :meth:`~cupy_zc.MemoryPool.record`. All times are in seconds since it began.
    """

    def __init__(
        self, pool: MemoryPool, interval: float, path: str | os.PathLike[str] | None
    ) -> None:
        if not 0 < interval < math.inf:
            allowed = "a positive number of seconds"
            raise InvalidValueError("MemoryPool.record", "interval", interval, allowed)
        self._pool = pool
        self._interval = interval
        self._path = None if path is None else Path(path)
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = 0
        self._failure: Exception | None = None
        self._began, self._time = 0.0, 0.0
        #: When and where blocks were handed out: (how often it was, monotonic time, site).
        self._notes: dict[Block, tuple[int, float, int | None]] = {}
        self._sites: dict[_Site, int] = {}
        self._site_numbers = itertools.count()
        self._frames: list[dict[str, Any]] = []
        self._segments, self._blocks = _Lifetimes(), _Lifetimes()
        self._last: dict[str, Any] | None = None

    # Start and stop

    def start(self) -> Self:
        """Begin.

        Raises:
            Error: it began before, or another recording of the pool is under way.
        """
        if self._thread is not None:
            raise Error("Recording.start: a recording begins once; make another with pool.record()")
        if self._pool._note is not None:
            raise Error("Recording.start: another recording of this pool is under way; stop it")
        self._process = os.getpid()
        self._began, self._time = time.monotonic(), time.time()
        self._pool._watch(self.note)
        self._look(None)
        self._thread = threading.Thread(target=self._run, name="cupy-zc recording", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread left
            self._thread = None
            self._pool._watch(None)
            raise
        return self

    def stop(self) -> None:
        """End, and look at the arrays that are left; again does nothing.

        Raises:
            OSError: the file cannot be written. Error: the pool could not be looked at.
        """
        if self._thread is None or self._last is not None or os.getpid() != self._process:
            return
        self._end.set()
        self._thread.join(_DEADLINE)
        self._pool._watch(None)
        if self._thread.is_alive():
            raise Error(f"Recording.stop: its thread did not end within {_DEADLINE:.0f} s")
        self._look(None)
        self._last = self._snapshot(arrays=True)
        if self._failure is not None:
            raise Error(f"the recording ended early: {self._failure}") from self._failure
        if self._path is not None:
            self.save(self._path)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # What it is for

    def mark(self, label: str) -> None:
        """Look now, and give the moment a name: ``recording.mark("epoch 2")``.

        Raises:
            Error: the recording is not under way.
        """
        if self._thread is None or self._end.is_set():
            raise Error(f"Recording.mark: the recording is not under way, at mark {label!r}")
        self._look(label)

    def data(self) -> dict[str, Any]:
        """All of it as plain dicts, lists, numbers and strings, for ``json`` and ``cupy-zc view``.

        ``frames`` are the looks, each with figures for each device; ``segments`` and ``blocks``
        have the times ``from`` and ``to`` (None: still there); the ``site`` of a block is a place
        in ``sites``; ``last`` is a snapshot: the final one, with arrays, once it has stopped.
        """
        last = self._last or self._snapshot(arrays=False)
        with self._held():
            sites = {number: _words(site) for site, number in self._sites.copy().items()}
            return {
                "version": VERSION,
                "kind": "recording",
                "time": self._time,
                "seconds": self._frames[-1]["at"] if self._frames else 0.0,
                "interval": self._interval,
                "driver": self._pool.driver.name,
                "forgotten_blocks": self._blocks.forgotten,
                "frames": list(self._frames),
                "segments": self._segments.all(),
                "blocks": self._blocks.all(),
                "sites": [sites.get(number, []) for number in range(max(sites, default=-1) + 1)],
                "last": last,
            }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`data` as JSON; who reads the file meanwhile finds the old or the new one.

        Raises:
            OSError: the file cannot be written.
        """
        target = Path(path)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(self.data()), encoding="utf-8")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def note(self, memory: PooledMemory) -> None:
        """Write down where a block is handed out. In any thread, without a lock."""
        block = memory._block
        self._notes[block] = (block.uses, time.monotonic(), self._site(sys._getframe(1)))

    def _site(self, frame: FrameType | None) -> int | None:
        site: list[tuple[CodeType, int]] = []
        while frame is not None and len(site) < MOST_CALLERS:
            if frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
                site.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        key = tuple(site)
        number = self._sites.get(key)
        if number is None and site and len(self._sites) < MOST_SITES:
            number = self._sites.setdefault(key, next(self._site_numbers))
        return number

    # How it looks

    def _run(self) -> None:
        saved = time.monotonic()
        try:
            while not self._end.wait(self._interval):
                self._look(None)
                if self._path is not None and time.monotonic() - saved >= SAVE_EVERY:
                    self.save(self._path)
                    saved = time.monotonic()
        except (Error, OSError) as error:
            _log.error("a recording of a memory pool ends early: %s", error)
            self._failure = error

    @contextmanager
    def _held(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=_DEADLINE):
            raise Error(f"a recording was busy in another thread for {_DEADLINE:.0f} s")
        try:
            yield
        finally:
            self._lock.release()

    def _snapshot(self, *, arrays: bool) -> dict[str, Any]:
        # Not pool.snapshot(): that would first return what graphs have left, and looking must not
        # change what is looked at.
        return take_snapshot(self._pool.driver, self._pool._device_pools(), arrays=arrays)

    def _look(self, label: str | None) -> None:
        with self._held():
            at = time.monotonic() - self._began
            segments: _Seen = {}
            blocks: _Seen = {}
            used: set[Block] = set()
            figures = []
            for pool in self._pool._device_pools():
                runs = pool.runs()
                figures.append({"device": pool.device, **asdict(statistics(pool, runs))})
                for segment, offset, size, block in runs:
                    about = _segment(segment)
                    segments[tuple(about.values())] = about
                    if block is not None:
                        used.add(block)
                        about = {"offset": offset, "size": size, **self._origin(block)}
                        blocks[tuple(about[name] for name in _SAME)] = about
            self._segments.update(segments, at)
            self._blocks.update(blocks, at)
            for block, (_, when, _) in self._notes.copy().items():
                if block not in used and when - self._began < at:  # not handed out since
                    del self._notes[block]
            self._frames.append({"at": at, "label": label, "devices": figures})
            if sum(not frame["label"] for frame in self._frames) > MOST_FRAMES:
                self._thin_out()

    def _origin(self, block: Block) -> dict[str, Any]:
        """Since when and by what code a block is used; exact where its hand-out was noted."""
        uses, when, site = self._notes.get(block, (-1, 0.0, None))
        if uses != block.uses:
            when, site = block.since, None
        return {
            "device": block.segment.handle.device,
            "generation": block.segment.generation,
            "from": when - self._began,
            "site": site,
        }

    def _thin_out(self) -> None:
        turn = itertools.count()
        self._frames = [f for f in self._frames if f["label"] or next(turn) % 2 == 0]
        self._interval *= 2


class _Lifetimes:
    """Things by a key that tells them apart, each with when it was first and last seen."""

    def __init__(self) -> None:
        self._live: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._gone: list[dict[str, Any]] = []
        self.forgotten = 0

    def update(self, seen: _Seen, at: float) -> None:
        """Note what there is, each with what describes it, and with that what there is not."""
        self._gone += [{**each, "to": at} for key, each in self._live.items() if key not in seen]
        excess = max(0, len(self._gone) - MOST_GONE)
        self.forgotten += excess
        del self._gone[:excess]
        live = {}
        for key, about in seen.items():
            known = self._live.get(key)
            live[key] = {"from": at, "to": None, **about} if known is None else known
        self._live = live

    def all(self) -> list[dict[str, Any]]:
        """All that was seen."""
        return [*self._gone, *self._live.values()]


def _segment(segment: Segment) -> dict[str, Any]:
    """What a segment is at one moment; all values can be part of a key."""
    info = segment_info(segment)
    capture = segment.home.capture
    return {
        "device": info.device,
        "offset": info.offset,
        "size": info.size,
        "generation": info.generation,
        "capture": capture,
        "stream": segment.home.key if capture is None else None,
        "registered": info.registered,
        "multicast": info.multicast,
    }


def _words(site: _Site) -> list[str]:
    """A site as people read it, the innermost caller first; paths from the current directory."""
    here = f"{Path.cwd()}{os.sep}"
    return [f"{code.co_filename.removeprefix(here)}:{at} in {code.co_name}" for code, at in site]
