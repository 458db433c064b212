"""The orders that mail relies on: under ThreadSanitizer, and with one of them taken away.

What is taken away must be noticed, by ThreadSanitizer or by results; so these tests can fail.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from emulated import MISMATCH, SANITIZED, SMALL, TSAN, CompileError, build, build_directory, mutant
from emulated_mail import FINGERPRINT, Call, Mail, Scene, check, content
from emulated_mail_cases import any_scene, ring

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest) -> Path:
    return build_directory(request.config)


def sanitized(program: Path) -> None:
    """Few messages, on as many real threads as there are in all blocks."""
    with Mail(program, environment=TSAN) as mail:
        for seed in range(3):
            scene = any_scene(np.random.default_rng(seed), 2, events=6)
            scene.threads, scene.budget = 8, 20 * 10**9
            check(scene, mail.play(scene))
        refused(mail, 900, 900, FINGERPRINT + 1, threads=8, budget=20 * 10**9)


def refused(
    mail: Mail,
    sent: int,
    size: int,
    fingerprint: int,
    threads: int = 32,
    budget: int = 50_000_000,
    letter: int = 120,
) -> None:
    rng = np.random.default_rng(sent)
    scene = Scene(2, threads, budget=budget, letter=letter)
    scene.add(0, Call(1, content(rng, sent), sent=fingerprint))
    call = scene.recv(1, 0, size)
    outcome = mail.play(scene)
    assert outcome.records[1].code == MISMATCH
    assert outcome.untouched(call)
    assert sent <= 768 or outcome.records[0].code == MISMATCH  # more than a channel holds


def exercise(program: Path) -> None:
    """Scenes that together need every part of the protocol."""
    rng = np.random.default_rng(3)
    with Mail(program) as mail:
        for seed in range(20):
            scene = any_scene(np.random.default_rng(seed), 2, events=12)
            scene.budget = 50_000_000
            check(scene, mail.play(scene))
            scene = ring(rng, 2, [40, 60, 10, 700, 64])
            scene.budget, scene.messages = 50_000_000, (1 << 32) - 1 - seed % 3
            check(scene, mail.play(scene))
        for nbytes in (0, 40, 300, 3000):
            refused(mail, nbytes, nbytes, FINGERPRINT + 1)
            refused(mail, nbytes, nbytes + 1, FINGERPRINT)
        refused(mail, 600, 600, FINGERPRINT + 1, letter=600)


#: What is taken away: (file, from, to).
SANITIZED_MUTATIONS = {
    "release of a slot": ("mail.cu", "store_release(channel.post", "store_relaxed(channel.post"),
    "acquire of a slot": ("mail.cu", "load_acquire(channel.gate", "load_relaxed(channel.gate"),
}
MUTATIONS = {
    "wait for a slot": ("mail.cu", "channel.lead() > passed", "channel.lead() + 99 > passed"),
    "room for a slot": ("channel.cuh", "push ? args_.slots : 0", "push ? args_.slots + 1 : 0"),
    "room for a letter": ("channel.cuh", "args_.letters >=", "args_.letters + 1 >="),
    "flags of data": ("channel.cuh", "pack.high == number_ ? COMPLETE", "true ? COMPLETE"),
    "flags of a header": ("channel.cuh", "flag(), header);", "flag(), header) || true;"),
    "flags other than 0": ("packets.cuh", "number % 0xffffffff + 1", "number"),
    "comparison of fingerprints": ("channel.cuh", "header.low == part.fingerprint && ", ""),
    "comparison of lengths": ("channel.cuh", "bytes == part.bytes", "bytes != ~0ull"),
    "header of a letter before its data": (
        "letters.cuh", "!= blockDim.x - 1 || channel.greet() != 0", "!= blockDim.x - 1 || true"),
    "header for each block of a letter": (
        "letters.cuh", "(threadIdx.x != blockDim.x - 1 ||",
        "(channel.block != 0 || threadIdx.x != blockDim.x - 1 ||"),
    "lines of a block": (
        "letters.cuh", "const u32 end = first_line(channel) + ", "const u32 end = "),
    "header of slots before their data": (
        "mail.cu", "tracks = channel.greet();", "tracks = channel.part.blocks;"),
    "tracks of the sender": (
        "mail.cu", "return tracks;", "return tracks == 0 ? 0 : channel.part.blocks;"),
    "tracks in a header": (
        "channel.cuh", "blocks = part.blocks;", "blocks = part.blocks > 1 ? 2 : 1;"),
    "tracks that a message leaves out": (
        "mail.cu", "channel.block < tracks ? channel.block * chunk : part.bytes",
        "channel.block * chunk"),
    "refusal": ("channel.cuh", "refused, number_)", "refused, 0)"),
    "advance of the number": ("channel.cuh", "messages, share_of(", "messages, 0 * share_of("),
    "blocks that share it": ("channel.cuh", "share_of(block, part.blocks)", "share_of(block, 1)"),
    "what is taken": ("channel.cuh", "taken, number_ - 1)", "taken, 0)"),
    "letters that are still read": ("channel.cuh", "taken, number_ - 1)", "taken, number_)"),
    "slots of earlier messages": ("mail.cu", "channel.passed(), passed)", "channel.passed(), 0)"),
    "meeting after a slot was filled": (
        "mail.cu", "part.bytes - at));\n        __syncthreads();", "part.bytes - at));"),
}  # fmt: skip


def noticed(cache: Path, mutation: tuple[str, str, str], *, threads: bool) -> str:
    """What the checks say with a mutation in place; empty where they do not notice."""
    flags = SANITIZED if threads else SMALL
    program = build(cache, flags, mutant(*mutation), name="mail")
    try:
        (sanitized if threads else exercise)(program)
    except CompileError:
        raise
    except AssertionError as failure:
        return str(failure) or "failed"
    return ""


def test_thread_sanitizer_sees_every_access_to_mail_ordered(cache: Path) -> None:
    sanitized(build(cache, SANITIZED, name="mail"))


def test_nothing_is_noticed_where_nothing_was_taken_away_from_mail(cache: Path) -> None:
    exercise(build(cache, SMALL, name="mail"))


@pytest.mark.parametrize("name", SANITIZED_MUTATIONS)
def test_thread_sanitizer_notices_an_order_of_mail_taken_away(cache: Path, name: str) -> None:
    assert "data race" in noticed(cache, SANITIZED_MUTATIONS[name], threads=True)


@pytest.mark.parametrize("name", MUTATIONS)
def test_taking_away_a_part_of_the_protocol_of_mail_is_noticed(cache: Path, name: str) -> None:
    said = noticed(cache, MUTATIONS[name], threads=False)
    assert said, f"without the {name}, everything still passed"
