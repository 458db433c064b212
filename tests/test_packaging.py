"""The sdist and the wheel hold what they must, and install into an empty environment."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel built from it."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", out, ROOT],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return out


def kernels() -> set[str]:
    names = {path.name for path in (ROOT / "cuda").iterdir()}
    assert any(name.endswith(".cu") for name in names)
    return names


def test_the_wheel_holds_every_kernel_source(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    for name in kernels():
        assert f"cupy_zc/_kernels/{name}" in names
    assert "cupy_zc/py.typed" in names
    for name in (
        "_examples/leak.py",
        "cli/static/page.html",
        "cli/static/page.js",
        "cli/bench/nccl.py",
    ):
        assert f"cupy_zc/{name}" in names
    assert not any(name.startswith(("cuda/", "tests/")) for name in names)


def test_the_sdist_holds_sources_tests_and_examples(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for name in kernels():
        assert f"cuda/{name}" in names
    for name in ("tests/test_packaging.py", "examples/pool_map.py", "CHANGELOG.md", "LICENSE"):
        assert name in names


def test_the_wheel_installs_into_an_empty_environment_and_works(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", f"cupy-zc[cuda13] @ {wheel.as_uri()}"],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    code = (
        "import cupy, cupy_zc, cupy_zc.kernels as kernels\n"
        "pool = cupy_zc.install(cupy_zc.MemoryPool(driver='host'))\n"
        "array = cupy.empty(100)\n"
        "cupy_zc.copyto(array, 7)\n"
        "print(cupy_zc.__file__, len(kernels.source('pattern.cu')) > 100, pool.used_bytes())"
    )
    result = subprocess.run(
        [python, "-I", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    location, found, used = result.stdout.split()
    assert Path(location).is_relative_to(tmp_path)
    assert (found, used) == ("True", "1024")
    program = tmp_path / "env" / "bin" / "cupy-zc"
    for words in (
        ["demo", "leak", "leak.json"],
        ["view", "leak.json", "--html", "leak.html"],
        ["bench", "--driver", "host", "-e", "1K", "--against", "none", "--json", "bench.jsonl"],
    ):
        subprocess.run([program, *words], check=True, timeout=60, cwd=tmp_path)
    assert "This only grows" in (tmp_path / "leak.html").read_text()
    assert '"checked": true' in (tmp_path / "bench.jsonl").read_text()


def test_without_cupy_the_import_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "try: import cupy_zc\n"
        "except ImportError as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert "cupy-zc[cuda13]" in result.stdout
