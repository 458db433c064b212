"""The multimem instructions that kernels are compiled to: each one to the letter, without a GPU."""

from __future__ import annotations

import functools
import re

import pytest
from cuda.core import Program, ProgramOptions
from ptx import ptx_of
from test_device_multimem import PAIRS, TABLE

from cupy_zc import kernels
from cupy_zc.collectives.device_kernels import _ELEMENTS
from cupy_zc.collectives.dtypes import DTYPES
from cupy_zc.collectives.plan import REDUCTIONS

LOAD = "multimem.ld_reduce.relaxed.sys.global."
#: What a pack of each wrapper is made of: its instruction, and how many of them.
LOADS = {
    "add_f16": ("add.acc::f32.v4.f16x2", 1),
    "min_f16": ("min.v4.f16x2", 1),
    "max_f16": ("max.v4.f16x2", 1),
    "add_bf16": ("add.acc::f32.v4.bf16x2", 1),
    "min_bf16": ("min.v4.bf16x2", 1),
    "max_bf16": ("max.v4.bf16x2", 1),
    "add_f32": ("add.v4.f32", 1),
    "add_f64": ("add.f64", 2),
    "add_s32": ("add.s32", 4),
    "min_s32": ("min.s32", 4),
    "max_s32": ("max.s32", 4),
    "add_u32": ("add.u32", 4),
    "min_u32": ("min.u32", 4),
    "max_u32": ("max.u32", 4),
    "add_u64": ("add.u64", 2),
    "min_s64": ("min.s64", 2),
    "max_s64": ("max.s64", 2),
    "min_u64": ("min.u64", 2),
    "max_u64": ("max.u64", 2),
    "or_b64": ("or.b64", 2),
}
STORE, STORE_WORD = "multimem.st.relaxed.sys.global.v4.f32", "multimem.st.relaxed.sys.global.b64"
ADD, FENCE = "multimem.red.release.sys.global.add.u64", "fence.proxy.alias"
#: The other wrappers: how they are called, and the instruction with its operands.
OTHERS = {
    "store": (
        "multimem_store(at, *pack)",
        rf"{re.escape(STORE)} \[%rd\d+\], {{%r\d+, %r\d+, %r\d+, %r\d+}};",
    ),
    "store_word": (
        "multimem_store_word(at, pack->low)", rf"{re.escape(STORE_WORD)} \[%rd\d+\], %rd\d+;",
    ),
    "add": ("multimem_add_release(at, pack->low)", rf"{re.escape(ADD)} \[%rd\d+\], %rd\d+;"),
    "fence": ("fence_alias()", rf"{re.escape(FENCE)};"),
}  # fmt: skip
ALL = {name: f"*pack = ld_reduce_{name}(at)" for name in LOADS} | {
    name: call for name, (call, _) in OTHERS.items()
}
SOURCE = '#include "ptx_multimem.cuh"\n' + "\n".join(
    f'extern "C" __global__ void use_{name}(cupy_zc::u64 at, cupy_zc::Pack* pack) '
    f"{{ using namespace cupy_zc; {call}; }}"
    for name, call in ALL.items()
)
KERNELS = {
    "multimem_all_reduce.cu": {"multimem.st.relaxed.sys.global.v4.f32", ADD, FENCE},
    "multimem_reduce_scatter.cu": {ADD, FENCE},
}
FOLDER = str(kernels.path("multimem.cuh").parent)


@functools.cache
def bodies() -> dict[str, str]:
    """The PTX of every wrapper in a kernel of its own."""
    text = ptx_of(SOURCE, "compute_90")
    return dict(re.findall(r"\.entry use_(\w+)\(.*?\)\s*\{(.*?)\n\}", text, re.DOTALL))


def multimem_lines(text: str) -> list[str]:
    return re.findall(r"^\s*((?:multimem|fence\.proxy)\..*)$", text, re.MULTILINE)


def mnemonics(text: str) -> set[str]:
    return {line.split()[0].rstrip(";") for line in multimem_lines(text)}


@pytest.mark.parametrize("name", LOADS)
def test_a_load_is_compiled_to_the_instruction_that_it_is_named_for(name: str) -> None:
    instruction, times = LOADS[name]
    register = {"f64": r"%fd\d+", "64": r"%rd\d+"}
    kind = "f64" if name.endswith("f64") else "64" if name.endswith("64") else "32"
    wanted = register.get(kind, r"%r\d+")
    if times == 1:
        wanted = r"\{" + ", ".join([r"%r\d+"] * 4) + r"\}"
    lines = multimem_lines(bodies()[name])
    assert len(lines) == times
    pattern = rf"{re.escape(LOAD + instruction)} {wanted}, \[%rd\d+\];"
    for line in lines:
        assert re.fullmatch(pattern, line), line
    assert len({line.split("[")[1] for line in lines}) == times  # each of its own address


@pytest.mark.parametrize("name", OTHERS)
def test_stores_additions_and_the_fence_are_compiled_to_what_they_say(name: str) -> None:
    (line,) = multimem_lines(bodies()[name])
    assert re.fullmatch(OTHERS[name][1], line), line


def test_no_wrapper_is_forgotten() -> None:
    text = kernels.source("ptx_multimem.cuh")
    there = set(re.findall(r"^CUPY_ZC_LD_REDUCE_\w+\((\w+), ", text, re.MULTILINE))
    assert there == set(LOADS)
    others = set(re.findall(r"\b(?:void|Pack) (multimem_\w+|fence_\w+)\(", text))
    assert others == {call.split("(")[0] for call, _ in OTHERS.values()}


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_machine_code_is_made_of_every_wrapper(architecture: str) -> None:
    options = ProgramOptions(arch=architecture, std="c++17", include_path=FOLDER)
    code = bytes(Program(SOURCE, "c++", options).compile("cubin").code)
    assert all(f".text.use_{name}\0".encode() in code for name in ALL)


def test_there_is_no_multimem_before_sm_90() -> None:
    options = ProgramOptions(arch="sm_80", std="c++17", include_path=FOLDER)
    with pytest.raises(Exception, match="sm_90"):
        Program(SOURCE, "c++", options).compile("cubin")


def defines_of(code: int, reduction: int, policy: str = "Hardware") -> tuple[str, ...]:
    return (
        f"CUPY_ZC_ELEMENT={_ELEMENTS[code]}",
        f"CUPY_ZC_OPERATION={REDUCTIONS[reduction].capitalize()}",
        f"CUPY_ZC_MULTIMEM={policy}",
    )


@pytest.mark.slow
@pytest.mark.parametrize("source", KERNELS)
@pytest.mark.parametrize(("code", "reduction"), PAIRS)
def test_a_kernel_has_the_instruction_of_its_type_and_reduction_and_no_other_one(
    source: str, code: int, reduction: int
) -> None:
    wanted = TABLE[DTYPES[code]][reduction]
    compile_it = functools.partial(ptx_of, kernels.source(source), "compute_90")
    if wanted is None:
        with pytest.raises(AssertionError, match=r"no member|has no"):
            compile_it(*defines_of(code, reduction))
        return
    assert mnemonics(compile_it(*defines_of(code, reduction))) == KERNELS[source] | {LOAD + wanted}


@pytest.mark.parametrize(
    "source",
    ["multimem_all_reduce.cu", "multimem_reduce_scatter.cu", "multimem_move.cu", "multimem_ll.cu"],
)
def test_the_kernels_that_stand_in_for_multicast_have_no_multimem_instruction(source: str) -> None:
    text = ptx_of(kernels.source(source), "compute_90", "CUPY_ZC_MULTIMEM=Emulated")
    assert mnemonics(text) == {FENCE}


def test_the_probe_stores_to_all_ranks_and_loads_the_sum_of_words() -> None:
    text = ptx_of(kernels.source("multimem_probe.cu"), "compute_90")
    assert mnemonics(text) == {STORE, LOAD + "add.u32", FENCE}


def test_moves_and_packets_are_stored_by_the_instructions_for_them() -> None:
    assert mnemonics(ptx_of(kernels.source("multimem_move.cu"), "compute_90")) == {
        STORE,
        ADD,
        FENCE,
    }
    assert mnemonics(ptx_of(kernels.source("multimem_ll.cu"), "compute_90")) == {STORE_WORD, FENCE}
