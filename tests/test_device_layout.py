"""What the host fills and reads lies where the kernels have it: asked of the C++ compiler itself.

It ends mirrors in Python, and formulas of sizes, that an edit of a header leaves behind.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import FIBERS, build, build_directory, mutant
from hypothesis import given
from hypothesis import strategies as st

from cupy_zc.collectives import device_args, device_lane, device_mail
from cupy_zc.collectives.device_args import Args, Record, Sizes
from cupy_zc.collectives.device_mail import (
    LEAST_SHEET,
    MAX_TRACKS,
    MailArgs,
    MailPart,
    MailSizes,
)
from cupy_zc.collectives.device_plan import LINE_DATA

STRUCTURES: dict[str, Any] = {
    "Args": Args, "ErrorRecord": Record, "MailPart": MailPart, "MailArgs": MailArgs,
}  # fmt: skip
CONSTANTS = {
    "MAX_RANKS": device_args.MAX_RANKS,
    "EVERY_RANK": device_args.EVERY_RANK,
    "STAGED": device_args.STAGED,
    "CODE_TIMEOUT": device_args.TIMEOUT,
    "CODE_MISMATCH": device_args.MISMATCH,
    "WORD_BYTES": device_lane.WORD_BYTES,
    "LINE_DATA": LINE_DATA,
    "STATE": device_lane.STATE,
    "FAILURE": device_lane.FAILURE,
    "SHARE_BITS": device_lane.SHARE_BITS,
    "MAX_TRACKS": device_mail.MAX_TRACKS,
}


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest) -> Path:
    return build_directory(request.config)


@pytest.fixture(scope="module")
def program(cache: Path) -> Path:
    return build(cache, FIBERS, name="layout")


def answers(program: Path, questions: list[str]) -> list[str]:
    """The lines of the program: the layout, then one answer for each question."""
    done = subprocess.run(
        [program], input="\n".join(questions), capture_output=True, encoding="ascii", check=True,
        timeout=60,
    )  # fmt: skip
    return done.stdout.splitlines()


def differences(lines: list[str]) -> list[str]:
    """What Python has otherwise than these lines say, or not at all."""
    found = {" ".join(words[:-1]): words[-1] for words in map(str.split, lines)}
    mirrored = {name: str(value) for name, value in CONSTANTS.items()}
    for name, kind in STRUCTURES.items():
        mirrored[name] = str(ctypes.sizeof(kind))
        for field, *_ in kind._fields_:
            place = getattr(kind, field)
            mirrored[f"{name} {field} {place.offset}"] = str(place.size)
    return sorted(
        f"{key}: {found.get(key)}, and in Python {mirrored.get(key)}"
        for key in found.keys() | mirrored.keys()
        if found.get(key) != mirrored.get(key)
    )


def test_arguments_records_and_constants_are_as_the_kernels_have_them(program: Path) -> None:
    assert differences(answers(program, [])) == []


def test_lanes_and_mail_areas_have_the_bytes_that_the_kernels_count(program: Path) -> None:
    rng = np.random.default_rng(11)
    questions, counted = [], []
    for ranks in range(2, 9):
        for _ in range(20):
            lines, packs, chunk = (int(each) for each in rng.integers(0, 1 << 20, 3))
            questions.append(f"lane {ranks} {lines} {packs} 0")
            counted.append(Sizes(lines, packs, chunk * 128).lane_bytes(ranks))
            letter, slot = (int(each) * 128 for each in rng.integers(0, 1000, 2))
            letters, slots = (1 << int(each) for each in rng.integers(0, 6, 2))
            tracks = int(rng.integers(1, 65))
            questions.append(f"mail {ranks} {letter} {letters} {slot} {slots} {tracks}")
            counted.append(MailSizes(letter, letters, slot, slots, tracks).area_bytes(ranks))
    said = answers(program, questions)[-len(questions) :]
    assert [int(each) for each in said] == counted


def test_a_message_has_the_chunks_that_both_sides_count(program: Path) -> None:
    questions, counted = [], []
    for letter, slot in ((0, 128), (256, 128), (1024, 4096), (8192, 65536), (8192, 1 << 18)):
        sizes = MailSizes(letter, 2, slot, 2, MAX_TRACKS)
        for nbytes in {letter, 9000, 1 << 20, 64 * slot - 1} - {0}:
            questions.append(f"chunk {MAX_TRACKS} {nbytes} {slot} 0")
            counted.append(sizes.chunk(nbytes))
    said = answers(program, questions)[-len(questions) :]
    assert [int(each) for each in said] == counted


@given(
    nbytes=st.one_of(st.integers(0, 1 << 20), st.integers(0, 1 << 40)),
    letter=st.sampled_from([0, 256, 65536, 262144]),
    slot=st.sampled_from([128, 4096, 65536, 262144]),
    most=st.integers(1, MAX_TRACKS),
)
def test_a_message_has_no_more_blocks_than_it_has_work_for(
    nbytes: int, letter: int, slot: int, most: int
) -> None:
    sizes = MailSizes(letter, 2, slot, 2, MAX_TRACKS)
    blocks = sizes.blocks(nbytes, most)
    assert 1 <= blocks <= most
    share = LEAST_SHEET if nbytes <= letter else sizes.chunk(nbytes)
    assert (blocks - 1) * share < max(1, nbytes), "every block has something to pass"
    assert blocks == most or blocks * share >= nbytes, "none has more than its share"
    chunk = sizes.chunk_of_block(nbytes, blocks)
    if nbytes <= letter:
        assert chunk % LINE_DATA == 0
        assert nbytes <= blocks * chunk < nbytes + LINE_DATA * blocks
    else:
        assert chunk == sizes.chunk(nbytes)
    assert blocks <= sizes.blocks(nbytes, MAX_TRACKS), "a drain has a block for each of a push"


@pytest.mark.parametrize(
    ("file", "old", "new", "noticed"),
    [
        ("types.cuh", "CODE_MISMATCH = 2", "CODE_MISMATCH = 3", "CODE_MISMATCH: 3"),
        ("types.cuh", "u32 rank;\n    u32 size;", "u32 size;\n    u32 rank;", "Args size 176: 4"),
        ("mail.cuh", "MailPart push, drain;", "MailPart drain, push;", "MailArgs drain 0: 48"),
    ],
)
def test_a_header_that_moves_on_alone_is_noticed(
    cache: Path, file: str, old: str, new: str, noticed: str
) -> None:
    """Two fields change places, or a constant its value."""
    program = build(cache, FIBERS, mutant(file, old, new), name="layout")
    assert any(each.startswith(noticed) for each in differences(answers(program, [])))
