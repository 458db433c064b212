"""The pages say what the package says: names, errors, settings, figures; and their links lead on.

``make docs`` builds them, with every warning an error. What is here needs no build.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from snippets import PAGES, ROOT

import cupy_zc
from cupy_zc import config, errors

DOCS = ROOT / "docs"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``script(name)`` is a module of docs/."""
    monkeypatch.syspath_prepend(str(DOCS))

    def load(name: str) -> ModuleType:
        module = importlib.import_module(name)
        assert Path(str(module.__file__)).parent == DOCS
        return module

    return load


def headings(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub and MyST make them of headings."""
    lowered = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings(page))
    return {heading.replace(" ", "-") for heading in lowered}


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "reference.md").read_text()
    shown = re.findall(r"^\.\. auto\w+:: ([\w.]+)", text, flags=re.MULTILINE)
    names = {name.removeprefix("cupy_zc.") for name in shown}
    assert set(cupy_zc.__all__) <= names
    assert set(config.__all__) - {"wants_ranges"} <= names


@pytest.mark.parametrize("name", sorted(cupy_zc.__all__))
def test_every_public_name_has_a_docstring(name: str) -> None:
    thing = getattr(cupy_zc, name)
    assert inspect.getdoc(thing)
    members = vars(thing).items() if inspect.isclass(thing) else ()
    for member, value in members:
        if not member.startswith("_") and (callable(value) or isinstance(value, property)):
            assert inspect.getdoc(getattr(thing, member)), f"{name}.{member}"


def test_every_exception_has_a_section_that_says_when_and_what_to_do() -> None:
    text = (DOCS / "errors.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    assert set(sections) == set(errors.__all__)
    for name, words in sections.items():
        assert "**When.**" in words, name
        assert "**Do.**" in words, name


def test_the_page_of_settings_is_what_the_table_says(script: Any) -> None:
    tables = script("tables")
    for name, make in tables.SECTIONS.items():
        assert tables.section(tables.PAGE, name) == make(), "run: python docs/tables.py"
    text = (DOCS / "settings.md").read_text()
    fields = {field.name for field in dataclasses.fields(config.Settings)}
    assert {row.field for row in config.TABLE} == fields
    for row in config.TABLE:
        assert f"| `{row.variable}` |" in text


def test_the_readme_has_every_setting_with_its_default() -> None:
    readme = (ROOT / "README.md").read_text()
    for row in config.TABLE:
        assert f"| `{row.variable}` | `{row.default}` |" in readme


def test_the_figures_are_those_of_the_runs(script: Any) -> None:
    plots, tables = script("plots"), script("tables")
    for name, make in plots.SECTIONS.items():
        assert tables.section(plots.PAGE, name) == make(), "run: python docs/plots.py"
    for plot, runs in plots.PLOTS.items():
        drawn = (DOCS / "images" / f"{plot}.svg").read_text()
        assert plots.digest(runs) in drawn, "run: python docs/plots.py"


def test_all_results_are_shown(script: Any) -> None:
    files = {file.stem for file in (ROOT / "benchmarks" / "results").glob("*.jsonl")}
    assert files == set(script("plots").PLOTS.values())


def test_the_picture_is_what_its_script_draws(script: Any) -> None:
    picture = script("picture")
    assert picture.FILE.read_text() == picture.draw(), "run: python docs/picture.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        assert there.is_file(), target
        assert not anchor or anchor in anchors(there), target


def test_every_page_is_in_the_index() -> None:
    listed = re.search(r"```\{toctree\}\n.*?\n\n(.*?)\n```", (DOCS / "index.md").read_text(), re.S)
    assert listed
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    assert set(listed[1].split()) == pages


def test_ci_builds_the_pages_and_takes_every_warning_for_an_error() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^docs:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe
    assert {"-W", "-n"} <= set(recipe[1].split())
    assert re.search(r"^make docs$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def build(folder: Path, page: str) -> subprocess.CompletedProcess[str]:
    """Build one page with the configuration of the real ones, as ``make docs`` does."""
    source = folder / "source"
    source.mkdir()
    (source / "conf.py").write_text((DOCS / "conf.py").read_text())
    (source / "index.md").write_text(page)
    command = [sys.executable, "-m", "sphinx", "-W", "-n", "-q", "-b", "html"]
    return subprocess.run(
        [*command, str(source), str(folder / "html")],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), *sys.path]))},
        check=False,
    )


_SILENT = '''"""Words."""


class Silent:
    """Words."""

    def method(self):
        pass
'''


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("# Page\n\n[link](nowhere.md)\n", "nowhere.md"),
        ("# Page\n\n[link](#nowhere)\n", "nowhere"),
        (
            "# Page\n\n```{eval-rst}\n.. autoclass:: silent.Silent\n```\n",
            "method silent.Silent.method has no docstring",
        ),
        ("# Page\n\n```{eval-rst}\n:class:`cupy_zc.Nothing`\n```\n", "cupy_zc.Nothing"),
        ("# Page\n\nWords.\n", ""),
    ],
    ids=["page", "anchor", "docstring", "name", "well"],
)
def test_the_build_fails_for(page: str, complaint: str, tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs the extra docs")
    (tmp_path / "silent.py").write_text(_SILENT)
    result = build(tmp_path, page)
    assert complaint in result.stderr
    assert bool(result.returncode) is bool(complaint), result.stderr
