"""The device protocol as Promela models, which spin walks through: every order, every late store.

A model must be able to fail: each is searched as it is, where nothing may be found, and with parts
of the protocol taken away, where something must. See the header of each model for what is what.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.slow

MODELS = Path(__file__).resolve().parent / "models"
TOOLS = ("spin", "gcc")


class Found(NamedTuple):
    """What a search says."""

    errors: int
    states: int
    words: str


def missing_tools() -> list[str]:
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def require_tools() -> None:
    """Skip the test where they are missing; in CI, fail it."""
    if missing := missing_tools():
        reason = f"needs {' and '.join(missing)} to check models: apt-get install spin gcc"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    require_tools()
    return tmp_path


def call(command: list[str], place: Path) -> str:
    done = subprocess.run(
        command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}"
    return done.stdout


def search(place: Path, model: str, defines: list[str], *, thorough: bool) -> Found:
    """Walk through all states of a model, or up to the first error.

    Partial order reduction is on, and no state is told by its hash alone: what is not found is not
    there.
    """
    defined = [f"-D{each}" for each in defines]
    said = call(["spin", *defined, "-a", str(MODELS / f"{model}.pml")], place)
    assert "rror" not in said, said
    optimise = "-O2" if thorough else "-O0"
    call(["gcc", optimise, "-w", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"], place)
    said = call(["./pan", "-m1000000", "-w20"], place)
    assert "max search depth too small" not in said, said
    errors = re.search(r"errors: (\d+)", said)
    states = re.search(r"(\d+) states, stored", said)
    assert errors is not None, said
    assert states is not None, said
    return Found(int(errors[1]), int(states[1]), said)


#: A model, what defines its size, and at least how many states that has.
SIZES: dict[str, tuple[str, list[str], int]] = {
    "entry, 2 ranks": ("entry", ["N=2"], 100_000),
    "entry, 3 ranks": ("entry", ["N=3", "CHUNKS=2"], 1_000_000),
    "lines with roots, 2 ranks": ("lines", ["N=2"], 10_000),
    "lines with roots, 3 ranks": ("lines", ["N=3"], 1_000_000),
    "lines in two steps, 2 ranks": ("lines", ["N=2", "STEPS"], 10_000),
    "lines in two steps, 3 ranks": ("lines", ["N=3", "STEPS"], 100_000),
    "packets, 2 ranks": ("lines", ["N=2", "PACKED"], 10_000),
    "packets, 3 ranks": ("lines", ["N=3", "PACKED"], 100_000),
    "lines of a pair": ("pairs", [], 100_000),
    "ring of one slot, 2 ranks": ("ring", ["N=2", "DEPTH=1", "NUMBERS=4", "PIECES=5"], 100_000),
    "ring of two slots, 2 ranks": ("ring", ["N=2", "DEPTH=2", "NUMBERS=8", "PIECES=3"], 100_000),
    "ring of one slot, 3 ranks": (
        "ring", ["N=3", "DEPTH=1", "NUMBERS=4", "PIECES=2", "SCATTERS=0"], 100_000,
    ),
    "mail in two tracks": ("mail", ["N=2"], 500_000),
    "mail both ways, 2 ranks": ("mail", ["N=2", "CHANNELS=2", "TRACKS=1", "MESSAGES=3"], 100_000),
}  # fmt: skip

#: What is taken away from a model: with which sizes it must be noticed.
RING = ["N=2", "DEPTH=1", "NUMBERS=4", "PIECES=5"]
TAKEN_AWAY: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "entry": (
        ["N=2"],
        (
            "RELAXED_ANNOUNCE", "EARLY_LOADS", "RELAXED_MEET", "NO_LAST_MEET", "NO_FIRST_MEET",
            "ONE_PLACE", "NO_EPOCH", "NO_FINGERPRINT", "ONE_SCRATCH", "SIGNED_PADS",
        ),
    ),
    "lines": (
        ["N=2"],
        (
            "NO_EMPTY", "ONE_BUFFER", "NO_EPOCH", "NO_FINGERPRINT", "SPLIT_LINES", "EARLY_LOADS",
            "NO_WATCH",
        ),
    ),
    "lines STEPS": (["N=2", "STEPS"], ("ONE_BUFFER", "NO_EPOCH", "SPLIT_LINES")),
    "lines PACKED": (["N=2", "PACKED"], ("ONE_BUFFER", "NO_AGREE", "NO_PACKET_FLAG", "NO_WATCH")),
    "pairs": ([], ("ONE_BUFFER", "NO_EPOCH", "NO_TURN", "FEW_PLACES", "FAR_AHEAD")),
    "ring": (
        RING,
        (
            "RELAXED_SIGNAL", "RELAXED_MEET", "EARLY_LOADS", "EARLY_CREDIT", "NO_CREDIT",
            "NO_EPOCH", "NO_LAST_MEET", "NO_AGREE", "NO_WINDOW",
        ),
    ),
    "mail": (
        ["N=2", "MESSAGES=4"],
        (
            "RELAXED_POST", "EARLY_LOADS", "EARLY_CREDIT", "NO_SLOT_CREDIT", "NO_LETTER_CREDIT",
            "NO_FLAG", "FLAG_ZERO", "NO_COMPARISON", "NO_REFUSAL", "RELAXED_REFUSAL",
            "EARLY_TAKEN", "EARLY_ADVANCE",
        ),
    ),
}  # fmt: skip
MUTANTS = [(model, part) for model, (_, parts) in TAKEN_AWAY.items() for part in parts]


@pytest.mark.parametrize("size", SIZES)
def test_no_order_of_steps_breaks_the_protocol(place: Path, size: str) -> None:
    model, defines, states = SIZES[size]
    found = search(place, model, defines, thorough=True)
    assert found.errors == 0, found.words
    assert found.states > states, "the model no longer does what it did"


@pytest.mark.parametrize(("model", "part"), MUTANTS)
def test_a_part_of_the_protocol_taken_away_is_found(place: Path, model: str, part: str) -> None:
    defines, _ = TAKEN_AWAY[model]
    found = search(place, model.split()[0], [*defines, part], thorough=False)
    assert found.errors == 1, f"without {part}, nothing was found in {found.states} states"
    assert re.search(r"assertion violated|invalid end state", found.words), found.words


@pytest.mark.parametrize("model", sorted({name.split()[0] for name in TAKEN_AWAY}))
def test_every_part_that_a_model_can_do_without_is_tried(model: str) -> None:
    text = (MODELS / f"{model}.pml").read_text()
    switches = set(re.findall(r"^#\s*(?:el)?if(?:n?def | defined\()(\w+)", text, re.MULTILINE))
    switches -= {"STEPS", "PACKED"} | set(re.findall(r"^#define (\w+)", text, re.MULTILINE))
    tried = {part for name, part in MUTANTS if name.split()[0] == model}
    assert switches == tried


def test_missing_tools_are_named_and_are_no_excuse_in_ci(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs spin and gcc"):
        require_tools()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="needs spin and gcc"):
        require_tools()
