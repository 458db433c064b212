// Reduces the same columns of all ranks' arrays and stores the result to one or more of them.
//
// Contract
//   Bases     in shared memory: where the columns start, in every source and every target
//   in place  a thread reads an element from all sources before it stores it to any target, and it
//             is the only one of all ranks that does
//   width     16-byte accesses where all addresses agree modulo 16, elements one by one otherwise
#pragma once

#include "memory.cuh"
#include "reduce.cuh"

namespace cupy_zc {

struct Bases {
    u64 source[MAX_RANKS];
    u64 target[MAX_RANKS];
    u32 sources;
    u32 targets;
};

// Elements [first, last), one a thread.
template <class R>
static __device__ __forceinline__ void fold_elements(const Bases& bases, u64 first, u64 last) {
    constexpr u32 UNIT = Element<typename R::E>::UNIT, UNITS = R::BYTES / UNIT;
    for (u64 i = first + threadIdx.x; i < last; i += blockDim.x) {
        typename R::template Fold<1> fold;
        fold.start(load_pack<UNIT>(bases.source[0] + i * R::BYTES, UNITS));
        for (u32 rank = 1; rank < bases.sources; ++rank) {
            fold.add(load_pack<UNIT>(bases.source[rank] + i * R::BYTES, UNITS));
        }
        const Pack result = fold.result(bases.sources);
        for (u32 target = 0; target < bases.targets; ++target) {
            store_pack<UNIT>(bases.target[target] + i * R::BYTES, UNITS, result);
        }
    }
}

// FLIGHT packs a thread, from byte `at` on, `blockDim.x` packs apart; those of TOGETHER sources are
// loaded before the first of them is waited for.
template <class R, u32 FLIGHT, u32 TOGETHER>
static __device__ __forceinline__ void fold_packs(const Bases& bases, u64 at) {
    const u64 stride = blockDim.x * 16ull;
    typename R::template Fold<> folds[FLIGHT];
    Pack packs[FLIGHT * TOGETHER];
#pragma unroll 1
    for (u32 rank = 0; rank < bases.sources; rank += TOGETHER) {
#pragma unroll
        for (u32 k = 0; k < FLIGHT * TOGETHER; ++k) {
            if (rank + k / FLIGHT < bases.sources) {
                packs[k] = memory<const Pack>(bases.source[rank + k / FLIGHT] + at +
                                              k % FLIGHT * stride);
            }
        }
#pragma unroll
        for (u32 k = 0; k < FLIGHT * TOGETHER; ++k) {
            if (rank + k / FLIGHT == 0) {
                folds[k % FLIGHT].start(packs[k]);
            } else if (rank + k / FLIGHT < bases.sources) {
                folds[k % FLIGHT].add(packs[k]);
            }
        }
    }
#pragma unroll
    for (u32 k = 0; k < FLIGHT; ++k) {
        packs[k] = folds[k].result(bases.sources);
    }
#pragma unroll 1
    for (u32 target = 0; target < bases.targets; ++target) {
#pragma unroll
        for (u32 k = 0; k < FLIGHT; ++k) {
            memory<Pack>(bases.target[target] + at + k * stride) = packs[k];
        }
    }
}

// `count` elements from the bases on, by all threads of the block.
template <class R>
static __device__ __forceinline__ void fold_all(const Bases& bases, u64 count) {
    constexpr u32 FLIGHT = R::IN_PACK > 8 ? 1 : R::IN_PACK > 4 ? 2 : 4;  // 16 registers of totals
    const u64 skew = bases.source[0] % 16;
    bool agree = skew % R::BYTES == 0;
    for (u32 rank = 0; rank < bases.sources; ++rank) {
        agree = agree && bases.source[rank] % 16 == skew;
    }
    for (u32 target = 0; target < bases.targets; ++target) {
        agree = agree && bases.target[target] % 16 == skew;
    }
    const u64 before = (16 - skew) % 16 / R::BYTES;
    const u64 head = agree && before < count ? before : count;
    const u64 packs = (count - head) / R::IN_PACK, stride = blockDim.x;
    u64 i = threadIdx.x;
    for (; i + (FLIGHT - 1) * stride < packs; i += FLIGHT * stride) {
        fold_packs<R, FLIGHT, 4 / FLIGHT>(bases, head * R::BYTES + i * 16);
    }
    for (; i < packs; i += stride) {
        fold_packs<R, 1, 4>(bases, head * R::BYTES + i * 16);
    }
    fold_elements<R>(bases, 0, head);
    fold_elements<R>(bases, head + packs * R::IN_PACK, count);
}

}  // namespace cupy_zc
