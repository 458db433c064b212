"""``cupy-zc view``: what it reads, what it says, and that it finds what grows and nothing else."""

from __future__ import annotations

import gc
import json
import runpy
import struct
import sys
from pathlib import Path
from typing import Any

import cupy
import pytest
from click.testing import CliRunner, Result
from matplotlib.image import imread

import cupy_zc
from cupy_zc.cli.app import cli
from cupy_zc.cli.film import film_of
from cupy_zc.cli.growth import Group, groups, growing, sentence
from cupy_zc.cli.output import Exit
from cupy_zc.driver.host import HostDriver

ROOT = Path(__file__).parents[1]
MiB = 1 << 20
NEVER = 1000.0


def view(*words: object) -> Result:
    return CliRunner().invoke(cli, ["view", *map(str, words)])


@pytest.fixture
def pool(allocator: Any) -> Any:
    made = cupy_zc.MemoryPool(driver=HostDriver())
    allocator(made)
    return made


@pytest.fixture(scope="module")
def leak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording of the example that leaks on purpose."""
    path = tmp_path_factory.mktemp("leak") / "leak.json"
    before = cupy.cuda.get_allocator()
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(sys, "argv", ["leak.py", str(path), "--steps", "20"])
        patch.chdir(ROOT)
        runpy.run_path("examples/leak.py", run_name="__main__")
    assert cupy.cuda.get_allocator() == before
    gc.collect()
    return path


# What it reads


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no JSON file"),
        ("{", "is no JSON file"),
        ("[1]", "is neither a snapshot nor a recording"),
        ('{"kind": "table"}', "is neither a snapshot nor a recording"),
        ('{"kind": "snapshot", "version": 9}', "has version 9, and this cupy-zc reads 1"),
        ('{"kind": "snapshot", "version": 1}', "is damaged or incomplete (KeyError: 'devices')"),
        ('{"kind": "recording", "version": 1, "last": 3}', "is damaged or incomplete (TypeError"),
        (
            '{"kind": "recording", "version": 1, "last": {"devices": []}, "blocks": [], '
            '"frames": []}',
            "is damaged or incomplete (IndexError: no frame)",
        ),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    result = view(path)
    assert result.exit_code == Exit.CANNOT
    assert words in result.output
    assert "x.json" in result.output


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert view(path).exit_code == Exit.CANNOT


def test_a_file_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    result = view(tmp_path / "none.json")
    assert result.exit_code == Exit.CANNOT
    assert "No such file or directory" in result.output


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_an_output_that_cannot_be_written_is_an_error(
    option: str, leak: Path, tmp_path: Path
) -> None:
    result = view(leak, option, tmp_path / "missing" / "out")
    assert result.exit_code == Exit.CANNOT
    assert "No such file or directory" in result.output


# What it says


def test_a_snapshot_is_shown_with_its_arrays(pool: Any, tmp_path: Path) -> None:
    array = cupy.empty((3, 5), "f4")
    path = tmp_path / "pool.json"
    path.write_text(json.dumps(pool.snapshot(arrays=True)))
    result = view(path)
    assert result.exit_code == Exit.OK
    assert "device 0 (host driver): 512 B used of 64 MiB in 1 segments" in result.output
    assert "float32 (3, 5)" in result.output
    assert "local array of test_a_snapshot_is_shown_with_its_arrays()" in result.output
    assert "grows" not in result.output
    del array


def test_a_pool_that_was_never_used_is_shown(pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    path.write_text(json.dumps(pool.snapshot()))
    result = view(path, "--html", tmp_path / "x.html", "--png", tmp_path / "x.png")
    assert result.exit_code == Exit.OK, result.output
    assert result.output.count("wrote ") == 2


def test_the_leak_is_named_with_its_line_and_what_holds_it(leak: Path) -> None:
    output = view(leak).output
    (said,) = [line for line in output.splitlines() if line.startswith("GROWS")]
    assert "20 blocks of 2 MiB are in use at the end (40 MiB)" in said
    assert "none given back" in said
    source = (ROOT / "examples" / "leak.py").read_text().splitlines()
    number = 1 + next(at for at, line in enumerate(source) if line.strip().startswith("losses ="))
    assert f"examples/leak.py:{number} in step" in said
    assert "float32 (1024, 512)" in said
    assert "history[*] keeps them alive" in said


def test_json_has_the_same_facts(leak: Path) -> None:
    said = json.loads(view(leak, "--json").stdout)
    assert (said["kind"], len(said["growing"])) == ("recording", 1)
    (group,) = said["growing"]
    assert (group["count"], group["most"], group["bytes"]) == (20, 2 * MiB, 40 * MiB)
    assert group["text"].startswith("20 blocks of 2 MiB")
    assert said["devices"][0]["used_blocks"] == 21
    assert [each["grows"] for each in said["groups"]] == [True, False]


def test_a_program_that_does_not_leak_is_told_so(pool: Any, tmp_path: Path) -> None:
    kept = [cupy.empty(MiB, "u1") for _ in range(4)]
    with pool.record(interval=NEVER, path=tmp_path / "pool.json") as recording:
        for number in range(10):
            array = cupy.empty(2 * MiB, "u1")
            recording.mark(str(number))
            del array
    output = view(tmp_path / "pool.json").output
    assert "nothing grows from beginning to end" in output
    assert "GROWS" not in output
    assert "in 12 looks" in output
    del kept


def test_blocks_that_were_forgotten_are_mentioned(leak: Path, tmp_path: Path) -> None:
    data = json.loads(leak.read_text())
    data["forgotten_blocks"] = 7
    path = tmp_path / "x.json"
    path.write_text(json.dumps(data))
    assert "forgotten: the 7 blocks that were given back first" in view(path).output


# What grows


def film(blocks: list[tuple[float, float | None]], seconds: float = 10.0) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "frames": [{"at": seconds * at / 50} for at in range(51)],
        "sites": [["a.py:1 in f"]],
        "blocks": [
            {"device": 0, "offset": at * 512, "size": 512, "from": start, "to": end, "site": 0,
             "arrays": []}
            for at, (start, end) in enumerate(blocks)
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("blocks", "grows"),
    [
        ([(at / 2, None) for at in range(20)], True),  # one after the other, to the end
        ([(at / 2, at / 2 + 3) for at in range(20)], False),  # as many come as go
        ([(at / 10, None) for at in range(20)], False),  # a cache that fills, then stays
        ([(0.0, None)] * 20, False),  # there from the beginning
        ([(8.0 + at / 10, None) for at in range(19)], False),  # only near the end: too early to say
        ([(3.0, None), (7.0, None)], False),  # too few to say
        ([(at / 2, at / 2 + (3 if at % 2 else 99)) for at in range(20)], True),  # every second one
    ],
)
def test_a_group_grows_if_it_gains_all_the_way(
    blocks: list[tuple[float, float | None]], grows: bool
) -> None:
    ended = [(start, end if end is not None and end <= 10 else None) for start, end in blocks]
    (group,) = groups(film(ended))
    assert group.grows is grows


def test_a_group_of_which_nothing_is_left_is_none() -> None:
    assert groups(film([(0.0, 1.0)])) == []


def test_blocks_of_one_place_are_one_group_whatever_their_size() -> None:
    """Ends: a leak of batches of different lengths was many groups of one, and none grew."""
    leaking = film([(at / 2, None) for at in range(20)])
    for at, block in enumerate(leaking["blocks"]):
        block["size"] = 512 * (at + 1)
    (group,) = groups(leaking)
    assert group.grows
    assert sentence(group).startswith(
        "20 blocks of 512 B to 10 KiB are in use at the end (105 KiB)"
    )
    for block in leaking["blocks"]:
        block["site"] = None
    assert len(groups(leaking)) == 20


def test_the_sentence_says_what_is_known_and_no_more() -> None:
    group = Group(0, (), 512, 512, 4608, 9, "", "", 2, (1, 3, 5, 7, 9), 8.0)
    assert sentence(group) == (
        "9 blocks of 512 B are in use at the end (4.5 KiB), one more every 1 s, 2 given back."
    )
    assert growing([group]) == [group]


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (["m.a[1]", "m.a[20]"], "m.a[*]"),
        (["m.a", "m.a", "m.b"], "m.a and 1 other"),
        (["m.a", "m.b", "m.c"], "m.a and 2 others"),
        ([None, None], ""),
    ],
)
def test_what_holds_a_group_is_put_together(held: list[str | None], said: str) -> None:
    one = film([(0.0, None)])
    one["blocks"][0]["arrays"] = [{"dtype": "i2", "shape": [3], "held_by": each} for each in held]
    (group,) = groups(one)
    assert (group.array, group.held_by) == ("i2 (3)", said)


def test_a_block_that_is_gone_has_no_array_of_its_successor(pool: Any) -> None:
    """Ends: the array at the end was shown in every block that ever had its place."""
    with pool.record(interval=NEVER) as recording:
        array = cupy.empty(MiB, "u1")
        recording.mark("first")
        del array
        array = cupy.empty((2, MiB // 2), "u1")
    first, second = film_of(recording.data(), "x")["blocks"]
    assert (first["arrays"], second["arrays"][0]["shape"]) == ([], [2, MiB // 2])
    del array


# The picture


def test_the_picture_is_a_png_of_a_good_size(leak: Path, tmp_path: Path) -> None:
    assert view(leak, "--png", tmp_path / "x.png").exit_code == Exit.OK
    head = (tmp_path / "x.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    assert 800 < width < 3000
    assert 300 < height < 3000


def test_a_segment_that_is_bound_to_multicast_is_drawn_and_told(pool: Any, tmp_path: Path) -> None:
    array = cupy.empty(MiB, "u1")
    array.data.mem.segment.cast_by.add("a communicator")
    snapshot = pool.snapshot()
    path = tmp_path / "x.json"
    path.write_text(json.dumps(snapshot))
    result = view(path, "--png", tmp_path / "x.png")
    assert result.exit_code == Exit.OK
    assert "stream 0, multicast" in result.stdout
    drawn = (imread(tmp_path / "x.png")[..., :3] * 255).round().astype(int).reshape(-1, 3)
    assert [0xF0, 0xE4, 0x42] in drawn.tolist()
    for device in snapshot["devices"]:  # a file of before there was the word
        for segment in device["segments"]:
            del segment["multicast"]
    path.write_text(json.dumps(snapshot))
    assert view(path, "--png", tmp_path / "y.png").exit_code == Exit.OK


def test_a_captured_and_a_registered_segment_are_drawn(pool: Any, tmp_path: Path) -> None:
    stream = pool.driver.make_stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        captured = cupy.empty(MiB, "u1")
        graph = stream.end_capture()
    array = cupy.empty(MiB, "u1")
    (comm,) = cupy_zc.Communicator.in_process(1, driver=pool.driver)
    with comm, comm.register(array):
        snapshot = pool.snapshot(arrays=True)
    states = [(s["capture"] is None, s["registered"]) for s in snapshot["devices"][0]["segments"]]
    assert sorted(states) == [(False, False), (True, True)]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(snapshot))
    result = view(path, "--png", tmp_path / "x.png", "--html", tmp_path / "x.html")
    assert result.exit_code == Exit.OK
    del captured, graph


def test_without_matplotlib_a_picture_says_what_to_install(
    leak: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy_zc.cli.picture", None)
    result = view(leak, "--png", tmp_path / "x.png")
    assert result.exit_code == Exit.CANNOT
    assert "pip install 'cupy-zc[plot]'" in result.output
