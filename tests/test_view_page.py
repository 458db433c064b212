"""The page of ``cupy-zc view`` in a real browser: the pointer, the slider, the leak."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cupy
import pytest
from browser import launched, opened
from click.testing import CliRunner
from playwright.sync_api import Browser, Page, expect

import cupy_zc
from cupy_zc.cli.app import cli
from cupy_zc.driver.host import HostDriver

pytestmark = pytest.mark.slow

MiB = 1 << 20
NEVER = 1000.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as program:
        yield program


@pytest.fixture
def pool(allocator: Any) -> Any:
    made = cupy_zc.MemoryPool(driver=HostDriver(), segment_size=8 * MiB)
    allocator(made)
    return made


@pytest.fixture
def html(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """``html(data)``: the page of what a pool gave."""

    def write(data: dict[str, Any]) -> Path:
        source, page = tmp_path / "pool.json", tmp_path / "pool.html"
        source.write_text(json.dumps(data))
        result = CliRunner().invoke(cli, ["view", str(source), "--html", str(page)])
        assert result.exit_code == 0, result.output
        return page

    return write


def under_pointer(page: Page, row: int, part: float) -> str:
    """What the page says of a place on the address axis: in a row, so far along it."""
    box = page.locator("canvas").bounding_box()
    assert box is not None
    label = 96
    x = box["x"] + label + part * (box["width"] - label)
    page.mouse.move(x, box["y"] + row * 32 + 12)
    tip = page.locator("#tip")
    return tip.inner_text() if tip.is_visible() else ""


def move_to(page: Page, frame: int) -> None:
    page.locator("#slider").evaluate(
        "(e, at) => { e.value = at; e.dispatchEvent(new Event('input')); }", frame
    )


def cards(page: Page) -> dict[str, str]:
    return {
        card.locator("span").inner_text(): card.locator("b").inner_text()
        for card in page.locator(".card").all()
    }


def test_a_snapshot_shows_what_is_under_the_pointer(browser: Browser, pool: Any, html: Any) -> None:
    weights = cupy.empty((2, MiB), "u1")  # the first row of 2 MiB
    with opened(browser, html(pool.snapshot(arrays=True))) as page:
        assert page.locator("h1").inner_text() == "pool.json"
        said = under_pointer(page, 0, 0.5)
        assert said.startswith("in use: 2 MiB\noffset 0x0, address 0x")
        assert "stream 0" in said
        assert "uint8 (2, 1048576), held by local weights of test_a_snapshot" in said
        assert " old" in said
        free = under_pointer(page, 2, 0.5)
        assert free.startswith("free, in a segment of 8 MiB")
        assert "generation 1" in free
        assert under_pointer(page, 0, -0.05) == ""
        assert cards(page)["in use"] == "2 MiB"
        assert cards(page)["fragmentation"] == "0 %"
        assert not page.locator("#film").is_visible()
        assert not page.locator("#growth").is_visible()
    del weights


def test_the_slider_shows_every_moment_that_was_recorded(
    browser: Browser, pool: Any, html: Any
) -> None:
    with pool.record(interval=NEVER) as recording:
        array = cupy.empty(2 * MiB, "u1")
        recording.mark("with it")
        del array
        recording.mark("without it")
    with opened(browser, html(recording.data())) as page:
        assert page.locator("#slider").get_attribute("max") == "3"
        assert "Nothing grows" in page.locator("#growth").inner_text()
        for frame, used, words in ((1, "2 MiB", "in use: 2 MiB"), (2, "0 B", "free, in a")):
            move_to(page, frame)
            assert cards(page)["in use"] == used
            said = under_pointer(page, 0, 0.5)
            assert said.startswith(words)
        assert ", without it" in page.locator("#moment").inner_text()
        move_to(page, 1)
        said = under_pointer(page, 0, 0.5)
        assert "given back after" in said
        assert "test_view_page.py" in said
        move_to(page, 0)
        assert cards(page) == {}  # the pool had no memory on any device yet
        assert under_pointer(page, 0, 0.5) == ""


def test_play_goes_through_the_recording_and_stops(browser: Browser, pool: Any, html: Any) -> None:
    with pool.record(interval=NEVER) as recording:
        arrays = []
        for number in range(3):
            arrays.append(cupy.empty(MiB, "u1"))
            recording.mark(str(number))
    with opened(browser, html(recording.data())) as page:
        move_to(page, 2)
        page.locator("#play").click()
        expect(page.locator("#slider")).to_have_value("4")
        page.locator("#play").click()  # from the end it begins anew
        expect(page.locator("#slider")).not_to_have_value("4")
        expect(page.locator("#slider")).to_have_value("4")
    arrays.clear()


def test_the_chart_goes_to_the_moment_that_is_clicked(
    browser: Browser, pool: Any, html: Any
) -> None:
    with pool.record(interval=NEVER) as recording:
        array = cupy.empty(MiB, "u1")
        recording.mark("one")
    with opened(browser, html(recording.data())) as page:
        page.locator("#chart").click(position={"x": 1, "y": 50})
        assert page.locator("#slider").input_value() == "0"
        assert page.locator("#chart text").all_text_contents() == ["one"]
    del array


def test_a_leak_is_marked_and_explained(browser: Browser, pool: Any, html: Any) -> None:
    kept: list[Any] = []
    with pool.record(interval=NEVER) as recording:
        for number in range(10):
            scratch = cupy.empty(2 * MiB, "u1")
            kept.append(cupy.empty((4, MiB // 64), "f8"))
            recording.mark(str(number))
            del scratch
    with opened(browser, html(recording.data())) as page:
        said = page.locator("#growth").inner_text()
        assert "This only grows: 10 blocks of 512 KiB are in use at the end (5 MiB)" in said
        assert "in test_a_leak_is_marked_and_explained" in said
        assert "local kept of test_a_leak_is_marked_and_explained()[*] keeps them alive" in said
        assert page.locator("tr.grows td").first.inner_text() == "5 MiB"
        colours = page.locator("canvas").evaluate(
            "(c) => Array.from(c.getContext('2d').getImageData(0, 0, c.width, c.height).data)"
        )
        pixels = {tuple(colours[at : at + 3]) for at in range(0, len(colours), 4)}
        assert (0xD5, 0x5E, 0x00) in pixels
    kept.clear()


def test_graphs_and_registrations_are_told_apart(browser: Browser, pool: Any, html: Any) -> None:
    stream = pool.driver.make_stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        captured = cupy.empty(2 * MiB, "u1")
        graph = stream.end_capture()
    array = cupy.empty(2 * MiB, "u1")
    (comm,) = cupy_zc.Communicator.in_process(1, driver=pool.driver)
    with comm, comm.register(array):
        snapshot = pool.snapshot()
    with opened(browser, html(snapshot)) as page:
        said = [under_pointer(page, row, 0.5) for row in range(5)]
        assert any(each.startswith("in use by a CUDA graph: 2 MiB") for each in said)
        assert any("CUDA graph, capture" in each for each in said)
        assert any(each.startswith("in use: 2 MiB") and "registered" in each for each in said)
        assert cards(page)["of CUDA graphs"] != "0 B"
    del captured, graph


def test_a_segment_that_is_bound_to_multicast_is_marked(
    browser: Browser, pool: Any, html: Any
) -> None:
    array = cupy.empty(2 * MiB, "u1")
    array.data.mem.segment.cast_by.add("a communicator")
    with opened(browser, html(pool.snapshot())) as page:
        assert ", multicast" in under_pointer(page, 0, 0.01)
        colours = page.locator("canvas").evaluate(
            "(c) => Array.from(c.getContext('2d').getImageData(0, 0, c.width, c.height).data)"
        )
        pixels = {tuple(colours[at : at + 3]) for at in range(0, len(colours), 4)}
        assert (0xF0, 0xE4, 0x42) in pixels


def test_rows_can_be_made_narrower_and_wider(browser: Browser, pool: Any, html: Any) -> None:
    array = cupy.empty(MiB, "u1")
    with opened(browser, html(pool.snapshot())) as page:
        page.get_by_label("narrower rows").click()
        assert "1 MiB a row" in page.locator(".bar").inner_text()
        assert under_pointer(page, 0, 0.9).startswith("in use: 1 MiB")
        assert under_pointer(page, 1, 0.1).startswith("free")
        for _ in range(3):
            page.get_by_label("wider rows").click()
        assert "8 MiB a row" in page.locator(".bar").inner_text()
        for _ in range(12):
            page.get_by_label("narrower rows").click()
        assert "32 KiB a row" in page.locator(".bar").inner_text()  # and no further
        page.set_viewport_size({"width": 600, "height": 700})
        assert under_pointer(page, 0, 0.5).startswith("in use: 1 MiB")
    del array


def test_text_from_a_file_is_shown_and_not_run(
    browser: Browser, pool: Any, html: Any, tmp_path: Path
) -> None:
    """Ends: a path or a label that looks like a tag became one."""
    evil = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
    with pool.record(interval=NEVER) as recording:
        array = cupy.empty(MiB, "u1")
        recording.mark(evil)
    data = recording.data()
    data["driver"] = evil
    for block in data["blocks"]:
        block["site"] = 0
    data["sites"] = [[evil]]
    for segment in data["last"]["devices"][0]["segments"]:
        for block in segment["blocks"]:
            block["arrays"] = [{"dtype": evil, "shape": [1], "held_by": evil}]
    with opened(browser, html(data)) as page:
        assert page.title() == "pool.json - cupy-zc view"
        assert evil in page.locator("#about").inner_text()
        assert evil in page.locator("tbody").inner_text()
        assert evil in under_pointer(page, 0, 0.1)
        assert page.locator("img").count() == 0
    del array


def test_a_browser_without_scripts_gets_the_text(browser: Browser, pool: Any, html: Any) -> None:
    array = cupy.empty(MiB, "u1")
    with opened(browser, html(pool.snapshot()), scripts=False) as page:
        assert "device 0 (host driver): 1 MiB used of 8 MiB" in page.locator("body").inner_text()
    del array


def test_nothing_may_be_loaded(pool: Any, html: Any) -> None:
    text = html(pool.snapshot()).read_text()
    assert "default-src 'none'" in text
    assert "http://www.w3.org/2000/svg" in text  # a name, not an address
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 1  # http-equiv


@pytest.mark.slow
def test_a_large_pool_is_shown_at_once(browser: Browser, pool: Any, html: Any) -> None:
    arrays = [cupy.empty(512, "u1") for _ in range(20_000)]
    with opened(browser, html(pool.snapshot())) as page:
        took = page.evaluate(
            "() => { const t = performance.now(); show(0); return performance.now() - t; }"
        )
        assert took < 1000
    arrays.clear()
