// Divides all elements of an array in place: an average, where the sum is there already.
//
// Contract
//   memory    `count` elements of this device; nobody else accesses them. The address is a multiple
//             of UNIT (memory.cuh): of the size of an element, or of a part of a complex one
//   by        1 to 2^31 - 1
//   result    that of an Avg (elements.cuh) whose sum this is: 16-bit floats are divided in float32
//             and rounded once, complex numbers part by part, integers truncated towards zero.
//             Subnormal numbers are kept; a NaN stays one, with what payload the device gives it
//   element   any but Bool, which has no average; the operation of select.cuh has no say
//   shut      where this word of the device is not 0, nothing is written: the graph that replays it
//             has outlived its communicator. Written by the host, beside no launch
//   launch    any one-dimensional grid, up to 512 threads a block. Waits for nobody
#include "memory.cuh"
#include "select.cuh"

namespace cupy_zc {

template <class R, u32 COUNT>
static __device__ __forceinline__ Pack quotients(const Pack& pack, u32 by) {
    typename R::template Fold<COUNT> fold;
    fold.start(pack);
    return fold.result(by);
}

// Elements [first, last), one a thread of the grid.
template <class R>
static __device__ __forceinline__ void divide_elements(u64 address, u64 first, u64 last, u32 by) {
    constexpr u32 UNIT = Element<typename R::E>::UNIT, UNITS = R::BYTES / UNIT;
    const u64 threads = gridDim.x * static_cast<u64>(blockDim.x);
    for (u64 i = first + blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x; i < last;
         i += threads) {
        const u64 at = address + i * R::BYTES;
        store_pack<UNIT>(at, UNITS, quotients<R, 1>(load_pack<UNIT>(at, UNITS), by));
    }
}

// FLIGHT packs a thread, from `at` on, `apart` bytes apart.
template <class R, u32 FLIGHT>
static __device__ __forceinline__ void divide_packs(u64 at, u64 apart, u32 by) {
    Pack packs[FLIGHT];
#pragma unroll
    for (u32 k = 0; k < FLIGHT; ++k) {
        packs[k] = memory<const Pack>(at + k * apart);
    }
#pragma unroll
    for (u32 k = 0; k < FLIGHT; ++k) {
        memory<Pack>(at + k * apart) = quotients<R, R::IN_PACK>(packs[k], by);
    }
}

template <class R>
static __device__ __forceinline__ void divide_all(u64 address, u64 count, u32 by) {
    constexpr u32 FLIGHT = R::IN_PACK > 8 ? 1 : R::IN_PACK > 4 ? 2 : 4;  // divisions are long code
    const u64 skew = address % 16;
    // Where no element starts at a multiple of 16, all of them are head.
    const u64 head = skew % R::BYTES == 0 ? least((16 - skew) % 16 / R::BYTES, count) : count;
    const u64 packs = (count - head) / R::IN_PACK, start = address + head * R::BYTES;
    const u64 threads = gridDim.x * static_cast<u64>(blockDim.x);
    u64 i = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x;
    for (; i + (FLIGHT - 1) * threads < packs; i += FLIGHT * threads) {
        divide_packs<R, FLIGHT>(start + i * 16, threads * 16, by);
    }
    for (; i < packs; i += threads) {
        divide_packs<R, 1>(start + i * 16, 0, by);
    }
    divide_elements<R>(address, 0, head, by);
    divide_elements<R>(address, head + packs * R::IN_PACK, count, by);
}

}  // namespace cupy_zc

extern "C" __global__ void __launch_bounds__(512, 1)
    divide(cupy_zc::u64 address, cupy_zc::u64 count, cupy_zc::u32 by, const cupy_zc::u32* shut) {
    using namespace cupy_zc;
    if (*shut != 0) {
        return;
    }
    divide_all<Reduction<CUPY_ZC_ELEMENT, Avg>>(address, count, by);
}
