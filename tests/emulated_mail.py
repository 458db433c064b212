"""Runs scenes of messages on the emulated mail kernel: what the tests of mail share."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from emulated import GUARD, POISON, RECORD, Emulation

__all__ = ["Call", "Mail", "Outcome", "Record", "Scene", "check", "content"]

FINGERPRINT = 0x1234_5678_9ABC_DEF0


@dataclass
class Call:
    """One launch: what it pushes to whom, and how much it drains from whom."""

    to: int = -1
    data: bytes = b""
    origin: int = -1
    size: int = 0
    sent: int = FINGERPRINT
    expected: int = FINGERPRINT
    #: That the push may use; 0 for all.
    tracks: int = 0
    input_skew: int = 0
    output_skew: int = 0
    #: A call that must have ended before.
    after: Call | None = None


@dataclass
class Scene:
    """Calls of some ranks, on some streams; the defaults make for small channels."""

    size: int
    threads: int = 32
    fresh: bool = True
    letters: int = 2
    slots: int = 2
    tracks: int = 3
    letter: int = 120
    slot: int = 128
    #: Nanoseconds: of the virtual clock, or the real one with threads.
    budget: int = 10**12
    #: How many messages and slots have passed on each channel and track, where it is fresh.
    messages: int = 0
    passed: int = 0
    #: A rank that the host gives up, so many nanoseconds after the start; none below 0.
    lost: int = -1
    lost_after: int = 0
    #: By rank and name of the stream.
    streams: dict[tuple[int, str], list[Call]] = field(default_factory=dict)
    #: The last push on each channel, and all that was pushed.
    _last: dict[tuple[int, int], Call] = field(default_factory=dict)
    _pushed: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    _drained: list[tuple[Call, tuple[int, int], int]] = field(default_factory=list)
    _drains: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, rank: int, call: Call, stream: str = "main") -> Call:
        """Launch something on a stream of a rank; pushes on one channel stay in order."""
        if call.to >= 0:
            channel = rank, call.to
            call.after = self._last.get(channel)
            self._last[channel] = call
            self._pushed.setdefault(channel, []).append(call.data)
        if call.origin >= 0:
            channel = call.origin, rank
            number = self._drains.get(channel, 0)
            self._drains[channel] = number + 1
            self._drained.append((call, channel, number))
        self.streams.setdefault((rank, stream), []).append(call)
        return call

    def send(self, rank: int, to: int, data: bytes, skew: int = 0, tracks: int = 0) -> Call:
        """A send, beside the stream on which the rank receives."""
        return self.add(rank, Call(to, data, input_skew=skew, tracks=tracks), "sends")

    def recv(self, rank: int, origin: int, size: int, skew: int = 0, stream: str = "main") -> Call:
        """A recv."""
        return self.add(rank, Call(origin=origin, size=size, output_skew=skew), stream)

    def send_recv(
        self, rank: int, peer: int, data: bytes, size: int, skews: tuple[int, int] = (0, 0)
    ) -> Call:
        """Both at once."""
        call = Call(peer, data, peer, size, input_skew=skews[0], output_skew=skews[1])
        return self.add(rank, call)

    def expected(self) -> list[tuple[Call, bytes]]:
        """What every call that drains must have at its end."""
        return [(call, self._pushed[channel][number]) for call, channel, number in self._drained]


@dataclass(frozen=True)
class Record:
    """What a rank tells the host."""

    code: int
    rank: int
    lane: int
    epoch: int
    detail: int
    mine: int
    abort: int = 0


@dataclass(frozen=True)
class Outcome:
    """The records of all ranks, and the output of each call with the bytes around it."""

    records: list[Record]
    outputs: dict[int, bytes]

    def of(self, call: Call) -> bytes:
        """The output of a call."""
        return self.outputs[id(call)][GUARD:-GUARD]

    def untouched(self, call: Call) -> bool:
        """Whether nothing was written to it, nor beside it."""
        return set(self.outputs[id(call)]) == {POISON}


@dataclass
class Mail(Emulation):
    """A running emulation of the mail kernel; use as a context manager."""

    program: Path

    def __enter__(self) -> Mail:
        super().__enter__()
        return self

    def play(self, scene: Scene) -> Outcome:
        """Run all streams of a scene at once, to their ends."""
        calls = [call for stream in scene.streams.values() for call in stream]
        numbers = {id(call): number for number, call in enumerate(calls, 1)}
        message = [
            struct.pack(
                "<8I8Q", scene.size, len(scene.streams), scene.threads, scene.fresh, scene.letters,
                scene.slots, scene.tracks, 0, scene.letter, scene.slot, scene.budget,
                next(self._seeds), scene.messages, scene.passed, scene.lost + 1, scene.lost_after,
            )
        ]  # fmt: skip
        for (rank, _), stream in scene.streams.items():
            message.append(struct.pack("<2I", rank, len(stream)))
            for call in stream:
                message += [
                    struct.pack(
                        "<7Q2IQ", call.to % (1 << 64), len(call.data), call.sent,
                        call.origin % (1 << 64), call.size, call.expected,
                        call.tracks or scene.tracks, call.input_skew, call.output_skew,
                        numbers[id(call.after)] if call.after else 0,
                    ),
                    call.data,
                ]  # fmt: skip
        deadline = time.monotonic() + self.patience
        self._write(b"".join(message))
        records = [
            Record(*struct.unpack(RECORD, self._read(struct.calcsize(RECORD), deadline)))
            for _ in range(scene.size)
        ]
        outputs = {id(call): self._read(call.size + 2 * GUARD, deadline) for call in calls}
        return Outcome(records, outputs)


def content(rng: np.random.Generator, size: int) -> bytes:
    """Some bytes."""
    return rng.bytes(size)


def check(scene: Scene, outcome: Outcome) -> None:
    """Every message has arrived, whole and in order, and nothing else was written."""
    for record in outcome.records:
        assert record.code == 0, record
    for call, data in scene.expected():
        assert outcome.of(call) == data, call
        guards = outcome.outputs[id(call)]
        assert set(guards[:GUARD] + guards[-GUARD:]) == {POISON}, call
