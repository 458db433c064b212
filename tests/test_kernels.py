"""Every kernel source compiles, for every architecture we care about, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda.core import Program, ProgramOptions

from cupy_zc import kernels
from cupy_zc.errors import InvalidValueError

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = sorted(path.name for path in (REPOSITORY / "cuda").glob("*.cu"))


def compiled(name: str, architecture: str) -> bytes:
    options = ProgramOptions(name=name, arch=architecture, std="c++17")
    return bytes(Program(kernels.source(name), "c++", options).compile("cubin").code)


def test_there_are_kernels_to_compile() -> None:
    assert "pattern.cu" in SOURCES


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_kernel_compiles_to_machine_code(name: str, architecture: str) -> None:
    assert compiled(name, architecture).startswith(b"\x7fELF")


def test_the_pattern_kernels_are_there_under_their_plain_names() -> None:
    code = compiled("pattern.cu", "sm_90")
    assert b".text.pattern_write\0" in code
    assert b".text.pattern_check\0" in code


def test_a_broken_kernel_does_not_compile() -> None:
    options = ProgramOptions(arch="sm_90", std="c++17")
    with pytest.raises(Exception, match="undeclared_name"):
        Program("__global__ void k() { undeclared_name; }", "c++", options).compile("cubin")


def test_every_source_says_what_it_does_and_stays_short() -> None:
    for name in SOURCES:
        text = kernels.source(name)
        assert text.startswith("// "), name
        assert len(text.splitlines()) <= 150, name


def test_a_wheel_s_own_kernels_come_before_the_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, tree = tmp_path / "cupy_zc" / "_kernels", tmp_path / "cuda"
    for place in (wheel, tree):
        place.mkdir(parents=True)
        (place / "both.cu").write_text(f"// {place}\n")
    (tree / "tree.cu").write_text("// only here\n")
    monkeypatch.setattr(kernels, "_PLACES", (wheel, tree))
    assert kernels.source("both.cu") == f"// {wheel}\n"
    assert kernels.path("tree.cu") == tree / "tree.cu"


@pytest.mark.parametrize("name", ["absent.cu", "../cuda/pattern.cu", "", "."])
def test_a_name_that_is_no_source_is_refused_with_both_places(name: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        kernels.source(name)
    assert repr(name) in str(caught.value)
    assert str(REPOSITORY / "cuda") in str(caught.value)
    assert str(REPOSITORY / "cupy_zc" / "_kernels") in str(caught.value)


@pytest.mark.gpu
def test_the_pattern_kernels_find_every_word_that_differs() -> None:
    import cupy

    module = cupy.RawModule(code=kernels.source("pattern.cu"), options=("-std=c++17",))
    write, check = module.get_function("pattern_write"), module.get_function("pattern_check")
    count, seed, first = 100_003, 7, (1 << 32) - 50_000
    words = cupy.zeros(count, dtype=cupy.uint32)

    def mismatches(*, position: int = first, value: int = seed) -> int:
        wrong = cupy.zeros(1, dtype=cupy.uint64)
        arguments = (words, cupy.uint64(count), cupy.uint64(position), cupy.uint32(value), wrong)
        check((64,), (256,), arguments)
        return int(wrong[0])

    write((32,), (128,), (words, cupy.uint64(count), cupy.uint64(first), cupy.uint32(seed)))
    assert mismatches() == 0
    assert mismatches(position=first + 1) > count * 0.99
    assert mismatches(value=seed + 1) > count * 0.99
    words[17] += 1
    words[-1] += 1
    assert mismatches() == 2
