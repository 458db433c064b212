"""Every kernel source compiles, for every architecture we care about, without a GPU."""

from __future__ import annotations

import functools
import io
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.core import Program, ProgramOptions

from cupy_zc import kernels
from cupy_zc.errors import InvalidValueError

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = sorted(path.name for path in (REPOSITORY / "cuda").glob("*.cu"))
HEADERS = sorted(path.name for path in (REPOSITORY / "cuda").glob("*.cuh"))
#: The sources that are compiled for one element type and operation, and what is hard about them.
REDUCING = (
    "ll.cu", "ll128.cu", "ll128_pair.cu", "ll128_reduce.cu", "ll128_reduce_scatter.cu",
    "multimem_ll.cu", "push_reduce.cu", "reduce_scatter.cu", "two_shot.cu",
)  # fmt: skip
#: Those that reduce in the switch, which knows these among others.
SWITCHED = ("multimem_all_reduce.cu", "multimem_reduce_scatter.cu")
SWITCHED_SELECTIONS = [
    ("Half", "Avg"), ("Bool", "Sum"), ("Complex<double>", "Avg"), ("long long", "Max"),
]  # fmt: skip
SELECTIONS = [("u8", "Sum"), ("Half", "Avg"), ("Complex<double>", "Prod"), ("long long", "Avg")]
if os.environ.get("HYPOTHESIS_PROFILE") == "thorough":
    SELECTIONS = [
        (element, operation)
        for element in (
            "Bool", "signed char", "u8", "short", "u16", "int", "u32", "long long", "u64", "Half",
            "Bfloat", "float", "double", "Complex<float>", "Complex<double>",
        )
        for operation in ("Sum", "Prod", "Min", "Max", "Avg")
        if not (element.startswith("Complex") and operation in ("Min", "Max"))
        and (element, operation) != ("Bool", "Avg")
    ]  # fmt: skip


@functools.cache
def compiled(name: str, architecture: str, *macros: tuple[str, str]) -> bytes:
    """Machine code; a kernel that needs local memory, for spills or arrays, does not pass."""
    options = ProgramOptions(
        name=name,
        arch=architecture,
        std="c++17",
        include_path=str(kernels.path(name).parent),
        define_macro=list(macros) or None,
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    code = bytes(Program(kernels.source(name), "c++", options).compile("cubin", logs=log).code)
    memory = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
        log.getvalue(),
    )
    assert memory, log.getvalue()
    assert set(memory) == {("0", "0", "0")}, (name, architecture, macros, log.getvalue())
    assert "warning" not in log.getvalue()
    return code


def test_there_are_kernels_to_compile() -> None:
    assert "pattern.cu" in SOURCES


def _on_architectures() -> Iterator[Any]:
    """Every run compiles all for one, and for the others what they have of their own.

    Multicast is one way before sm_90 and another one from there on; all else differs by what
    ptxas makes of it.
    """
    for name, architecture in itertools.product(SOURCES, ("sm_80", "sm_90", "sm_100")):
        often = architecture == "sm_90" or name in ("multimem_probe.cu", "multimem_ll.cu", "ll.cu")
        yield pytest.param(name, architecture, marks=[] if often else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "architecture"), [*_on_architectures()])
def test_a_kernel_compiles_to_machine_code(name: str, architecture: str) -> None:
    """Before sm_90 there is no multicast, and its kernels are for the policy without it."""
    macros = [("CUPY_ZC_MULTIMEM", "Emulated")] if "multimem" in name else []
    if name == "multimem_probe.cu" and architecture == "sm_80":
        with pytest.raises(Exception, match="sm_90"):
            compiled(name, architecture)
        return
    code = compiled(name, architecture, *(macros if architecture == "sm_80" else ()))
    assert code.startswith(b"\x7fELF")


@pytest.mark.slow
@pytest.mark.parametrize(("element", "operation"), SELECTIONS)
@pytest.mark.parametrize("name", REDUCING)
def test_a_reduction_compiles_for_a_type_and_an_operation(
    name: str, element: str, operation: str
) -> None:
    macros = ("CUPY_ZC_ELEMENT", element), ("CUPY_ZC_OPERATION", operation)
    code = compiled(name, "sm_90", *macros)
    calls = ("_all_reduce", "_reduce_scatter") if name == "ll128_pair.cu" else ("",)
    for call in calls:
        assert f".text.{Path(name).stem}{call}\0".encode() in code


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["Hardware", "Emulated"])
@pytest.mark.parametrize(("element", "operation"), SWITCHED_SELECTIONS)
@pytest.mark.parametrize("name", SWITCHED)
def test_a_reduction_in_the_switch_compiles_for_a_type_and_an_operation(
    name: str, element: str, operation: str, policy: str
) -> None:
    macros = ("CUPY_ZC_ELEMENT", element), ("CUPY_ZC_OPERATION", operation)
    code = compiled(name, "sm_90", *macros, ("CUPY_ZC_MULTIMEM", policy))
    assert f".text.{Path(name).stem}\0".encode() in code


@pytest.mark.slow
@pytest.mark.parametrize(
    "element",
    ["signed char", "u8", "short", "u16", "int", "u32", "long long", "u64", "Half", "Bfloat",
     "float", "double", "Complex<float>", "Complex<double>"],
)  # fmt: skip
def test_a_division_compiles_for_every_type_but_bool(element: str) -> None:
    assert b".text.divide\0" in compiled("divide.cu", "sm_90", ("CUPY_ZC_ELEMENT", element))
    with pytest.raises(Exception, match="has no member"):
        compiled("divide.cu", "sm_90", ("CUPY_ZC_ELEMENT", "Bool"))


def test_the_kernel_that_copies_rows_is_there_under_its_plain_name() -> None:
    assert b".text.copy_rows\0" in compiled("copy_rows.cu", "sm_90")


@pytest.mark.parametrize("name", ["all_gather", "broadcast"])
def test_the_collectives_that_only_store_in_the_switch_are_in_one_module(name: str) -> None:
    assert f".text.multimem_{name}\0".encode() in compiled("multimem_move.cu", "sm_90")


def test_an_operation_that_a_type_does_not_have_does_not_compile() -> None:
    macros = ("CUPY_ZC_ELEMENT", "Complex<float>"), ("CUPY_ZC_OPERATION", "Max")
    with pytest.raises(Exception, match="has no member"):
        compiled("two_shot.cu", "sm_90", *macros)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "broadcast", "scatter", "gather"])
def test_the_collectives_that_only_move_data_are_in_one_module(name: str) -> None:
    assert f".text.{name}\0".encode() in compiled("push.cu", "sm_90")


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "broadcast", "scatter", "gather"])
def test_so_are_those_that_move_lines(name: str) -> None:
    assert f".text.ll128_{name}\0".encode() in compiled("ll128_move.cu", "sm_90")


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_and_those_that_move_them_between_two_ranks(name: str) -> None:
    assert f".text.ll128_pair_{name}\0".encode() in compiled("ll128_pair_move.cu", "sm_90")


@pytest.mark.parametrize(
    ("name", "operation"),
    [*(("ll128.cu", each) for each in ("Sum", "Prod", "Min", "Max", "Avg")), ("divide.cu", "Sum")],
)
def test_no_option_of_the_compiler_flushes_small_numbers_to_zero(name: str, operation: str) -> None:
    """CuPy adds -ftz=true, which must change no instruction: the host driver keeps them, too."""
    options = {
        flush: ProgramOptions(
            arch="sm_90", std="c++17", ftz=flush,
            include_path=str(kernels.path(name).parent),
            define_macro=[("CUPY_ZC_ELEMENT", "float"), ("CUPY_ZC_OPERATION", operation)],
        )
        for flush in (False, True)
    }  # fmt: skip
    codes = {
        bytes(Program(kernels.source(name), "c++", each).compile("cubin").code)
        for each in options.values()
    }
    assert len(codes) == 1


def test_only_the_headers_for_it_hold_ptx() -> None:
    holders = [name for name in (*SOURCES, *HEADERS) if re.search(r"\basm\b", kernels.source(name))]
    assert holders == ["ptx.cuh", "ptx_multimem.cuh"]


def test_the_pattern_kernels_are_there_under_their_plain_names() -> None:
    code = compiled("pattern.cu", "sm_90")
    assert b".text.pattern_write\0" in code
    assert b".text.pattern_check\0" in code


def test_a_broken_kernel_does_not_compile() -> None:
    options = ProgramOptions(arch="sm_90", std="c++17")
    with pytest.raises(Exception, match="undeclared_name"):
        Program("__global__ void k() { undeclared_name; }", "c++", options).compile("cubin")


def test_every_source_says_what_it_does_and_stays_short() -> None:
    for name in (*SOURCES, *HEADERS):
        text = kernels.source(name)
        assert text.startswith("// "), name
        assert "\n// Contract\n" in text, name
        assert len(text.splitlines()) <= (150 if name in SOURCES else 250), name
        assert max(map(len, text.splitlines())) <= 120, name


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
