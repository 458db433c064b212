"""PTX of CUDA sources, without a GPU."""

from __future__ import annotations

from cuda.bindings import nvrtc

from cupy_zc import kernels

__all__ = ["ptx_of"]

_FOLDER = str(kernels.path("types.cuh").parent)


def _room(size: int) -> bytes:
    """Bytes for NVRTC to write to: never one, of which the process has one object for all."""
    return bytes(size + 2)


def ptx_of(source: str, architecture: str, *defines: str) -> str:
    """PTX text; of NVRTC itself, as cuda.core asks the driver for its version before that."""
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    options = [
        f"--gpu-architecture={architecture}", "-std=c++17", f"-I{_FOLDER}",
        *(f"-D{define}" for define in defines),
    ]  # fmt: skip
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [each.encode() for each in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = _room(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, log[: size - 1].decode()
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = _room(size)
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text[: size - 1].decode()
