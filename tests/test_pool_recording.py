"""A recording knows every block, when and where it was handed out, and changes nothing."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import time
from typing import Any

import cupy
import hypothesis
import pytest
from hypothesis import strategies as st

import cupy_zc
from cupy_zc import Error
from cupy_zc.driver.host import HostDriver
from cupy_zc.memory import recording as module

MiB = 1 << 20
#: So long that looks are taken only where a test asks for one.
NEVER = 1000.0


@pytest.fixture
def pool(allocator: Any) -> Any:
    made = cupy_zc.MemoryPool(driver=HostDriver())
    allocator(made)
    return made


def used(data: dict[str, Any]) -> list[tuple[int, bool]]:
    """Sizes of all blocks seen, and whether they are there at the end."""
    return [(block["size"], block["to"] is None) for block in data["blocks"]]


def test_blocks_are_seen_from_when_to_when_and_from_where(pool: Any) -> None:
    before = cupy.empty(100, "u1")
    with pool.record(interval=NEVER) as recording:
        array = cupy.empty(MiB, "u1")
        recording.mark("first")
        del array
        recording.mark("second")
    data = json.loads(json.dumps(recording.data()))
    assert (data["version"], data["kind"], data["driver"]) == (1, "recording", "host")
    assert [frame["label"] for frame in data["frames"]] == [None, "first", "second", None]
    gone, there = sorted(data["blocks"], key=lambda block: -block["size"])
    assert (gone["size"], there["size"], there["to"]) == (MiB, 512, None)
    first, second = (frame["at"] for frame in data["frames"][1:3])
    assert 0 < gone["from"] < first < gone["to"] <= second
    assert there["from"] < 0  # it was there before
    assert there["site"] is None
    site = data["sites"][gone["site"]]
    assert "test_pool_recording.py" in site[0]
    assert site[0].endswith("in test_blocks_are_seen_from_when_to_when_and_from_where")
    assert [f["devices"][0]["used_bytes"] for f in data["frames"]] == [512, MiB + 512, 512, 512]
    (segment,) = data["segments"]
    assert (segment["size"], segment["to"], segment["registered"]) == (64 * MiB, None, False)
    (device,) = data["last"]["devices"]
    assert device["segments"][0]["blocks"][0]["arrays"][0]["shape"] == [100]
    del before


def test_a_block_that_is_handed_out_again_is_another_one(pool: Any) -> None:
    """Ends: two arrays one after the other in the same bytes counted as one that lives long."""
    with pool.record(interval=NEVER) as recording:
        for number in range(3):
            array = cupy.empty(MiB, "u1")
            recording.mark(str(number))
            del array
    blocks = recording.data()["blocks"]
    assert len(blocks) == 3
    assert len({block["offset"] for block in blocks}) == 1


def test_other_threads_are_seen_too(pool: Any) -> None:
    made = []
    with pool.record(interval=NEVER) as recording:
        thread = threading.Thread(target=lambda: made.append(cupy.empty(MiB, "u1")))
        with cupy.cuda.using_allocator(pool.malloc):
            thread.start()
        thread.join(10)
    data = recording.data()
    (block,) = data["blocks"]
    assert "<lambda>" in data["sites"][block["site"]][0]


def test_the_fast_path_is_back_afterwards_and_blocks_are_the_same(pool: Any) -> None:
    for _ in range(3):
        cupy.empty(1000, "u1")  # its size has a bin now
    hot, default = pool._hot, pool._default
    block = cupy.empty(1000, "u1").data.mem._block
    with pool.record(interval=NEVER):
        assert pool._default is not default
        assert cupy.empty(1000, "u1").data.mem._block is block
    assert (pool._hot, pool._default) == (hot, default)
    assert pool._default is default
    assert cupy.empty(1000, "u1").data.mem._block is block


def test_a_stream_and_a_device_that_are_new_in_a_recording_get_a_fast_path(pool: Any) -> None:
    with pool.record(interval=NEVER):
        stream = cupy_zc.Stream() if pool.driver.name == "cuda" else pool.driver.make_stream()
        with stream:
            for _ in range(3):
                cupy.empty(1000, "u1")
        for _ in range(3):
            cupy.empty(1000, "u1")
    key = pool.driver.stream_key(stream)
    assert 1024 in pool._hot[key]
    assert pool._default[0][1024]


@hypothesis.given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([512, 1000, 4096, 3 * MiB])), max_size=25
    )
)
def test_the_blocks_of_every_look_add_up_to_what_was_in_use(steps: list[tuple[int, int]]) -> None:
    """Ends: a block that was merged, cut anew and handed out as often counted as the old one."""
    pool = cupy_zc.MemoryPool(driver=HostDriver(), segment_size=2 * MiB)
    places: dict[int, Any] = {}
    with pool.record(interval=NEVER) as recording:
        for place, size in steps:
            if places.pop(place, None) is None or size % 1024:
                places[place] = pool.malloc(size)
            recording.mark("")
    data = recording.data()
    for frame in data["frames"]:
        at = frame["at"]
        there = [b for b in data["blocks"] if b["from"] <= at < (b["to"] or math.inf)]
        assert sum(block["size"] for block in there) == sum(
            device["used_bytes"] for device in frame["devices"]
        )
        spans = sorted((b["offset"], b["offset"] + b["size"]) for b in there)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        held = [s for s in data["segments"] if s["from"] <= at < (s["to"] or math.inf)]
        assert sum(segment["size"] for segment in held) == sum(
            device["total_bytes"] for device in frame["devices"]
        )


def test_it_looks_by_itself(pool: Any) -> None:
    with pool.record(interval=0.001) as recording:
        until = time.monotonic() + 10
        while len(recording.data()["frames"]) < 5:
            assert time.monotonic() < until
            time.sleep(0.001)


def test_looks_are_thinned_out_but_not_named_ones(pool: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MOST_FRAMES", 10)
    with pool.record(interval=NEVER) as recording:
        for number in range(40):
            recording.mark("named" if number == 1 else "")
        frames = recording.data()["frames"]
    assert len(frames) <= 11
    assert [frame["label"] for frame in frames].count("named") == 1
    assert recording._interval > NEVER


def test_named_looks_do_not_count_for_thinning_out(pool: Any, monkeypatch: Any) -> None:
    """Ends: a recording with many marks that halves how often it looks at each further one."""
    monkeypatch.setattr(module, "MOST_FRAMES", 10)
    with pool.record(interval=NEVER) as recording:
        for number in range(40):
            recording.mark(f"named {number}")
    labels = [frame["label"] for frame in recording.data()["frames"] if frame["label"]]
    assert labels == [f"named {number}" for number in range(40)]
    assert recording._interval == NEVER


def test_where_no_thread_can_start_the_pool_is_not_recorded(pool: Any, monkeypatch: Any) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        pool.record().start()
    assert pool._note is None
    monkeypatch.undo()
    with pool.record(interval=NEVER) as recording:
        recording.mark("now")


def test_a_thread_that_does_not_end_is_told(pool: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_DEADLINE", 0.01)
    end = threading.Event()
    recording = pool.record(interval=NEVER)
    monkeypatch.setattr(recording, "_run", lambda: end.wait(60))
    recording.start()
    with pytest.raises(Error, match="did not end"):
        recording.stop()
    end.set()


def test_blocks_that_are_long_gone_are_forgotten_and_counted(pool: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MOST_GONE", 5)
    with pool.record(interval=NEVER) as recording:
        for _ in range(12):
            array = cupy.empty(MiB, "u1")
            recording.mark("")
            del array
    data = recording.data()
    assert len(data["blocks"]) == 5
    assert data["forgotten_blocks"] == 7


def test_notes_of_blocks_that_are_gone_are_dropped(pool: Any) -> None:
    with pool.record(interval=NEVER) as recording:
        for number in range(1, 20):
            cupy.empty(number * 512, "u1")
        recording.mark("")
        assert not recording._notes


def test_the_file_is_there_while_it_runs(pool: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "SAVE_EVERY", 0.0)
    path = tmp_path / "pool.json"
    array = cupy.empty(MiB, "u1")
    with pool.record(interval=0.001, path=path):
        until = time.monotonic() + 10
        while not path.exists():
            assert time.monotonic() < until
            time.sleep(0.001)
        running = json.loads(path.read_text())
        assert running["last"]["devices"][0]["statistics"]["used_bytes"] == MiB
    final = json.loads(path.read_text())
    assert final["last"]["devices"][0]["segments"][0]["blocks"][0]["arrays"]
    assert [each.name for each in tmp_path.iterdir()] == ["pool.json"]
    del array


def test_a_file_that_cannot_be_written_ends_it_with_the_reason(
    pool: Any, tmp_path: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(module, "SAVE_EVERY", 0.0)
    recording = pool.record(interval=0.001, path=tmp_path / "missing" / "pool.json").start()
    recording._thread.join(10)
    with pytest.raises(cupy_zc.Error, match=r"ended early.*No such file") as raised:
        recording.stop()
    assert isinstance(raised.value.__cause__, OSError)
    assert "ends early" in caplog.text
    assert pool._note is None


@pytest.mark.parametrize("interval", [0, -1, float("inf"), float("nan")])
def test_an_interval_that_is_none_is_refused(pool: Any, interval: Any) -> None:
    with pytest.raises(cupy_zc.InvalidValueError, match="a positive number of seconds"):
        pool.record(interval=interval)


def test_two_at_once_and_one_twice_are_refused(pool: Any) -> None:
    recording = pool.record(interval=NEVER).start()
    with pytest.raises(cupy_zc.Error, match="another recording of this pool is under way"):
        pool.record().start()
    with pytest.raises(cupy_zc.Error, match="begins once"):
        recording.start()
    recording.stop()
    recording.stop()
    with pytest.raises(cupy_zc.Error, match="begins once"):
        recording.start()
    with pytest.raises(cupy_zc.Error, match="not under way, at mark 'late'"):
        recording.mark("late")
    with pool.record(interval=NEVER):
        pass


def test_a_look_that_never_ends_is_an_error_not_a_hang(pool: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_DEADLINE", 0.01)
    recording = pool.record(interval=NEVER).start()
    with recording._lock, pytest.raises(cupy_zc.Error, match="busy in another thread"):
        recording.mark("x")
    recording.stop()


def test_looking_does_not_return_the_memory_of_graphs(pool: Any) -> None:
    """Ends: a recording brought the memory of a dead graph back, which without it comes later."""
    stream = pool.driver.make_stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        pool.malloc(1000)
        graph = stream.end_capture()
    with pool.record(interval=NEVER) as recording:
        del graph
        time.sleep(0.05)
        recording.mark("after")
        captured = [segment["capture"] for segment in recording.data()["segments"]]
    assert len(captured) == 1
    assert captured[0] is not None


def test_a_child_of_fork_neither_records_nor_stops_it(pool: Any) -> None:
    with pool.record(interval=NEVER) as recording:
        child = os.fork()
        if child == 0:
            good = pool._note is None
            recording.stop()  # must not wait for a thread that is not there
            os._exit(0 if good else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert pool._note is not None
