// Access to all ranks' copies at once: in the switch, by multimem instructions, or one after the
// other over the links. And the barrier of kernels that do so.
//
// Contract
//   CUPY_ZC_MULTIMEM  Hardware or Emulated   (-D, default Hardware): which way. Emulated asks for
//             no multicast mapping; it is how the same kernels run where there is none. Hardware
//             needs sm_90
//   Copies    the same bytes of all ranks: the ordinary address of each, and that of all
//   reduce    a pack of all copies, with the operation finished. Emulated: in rank order. Hardware:
//             in an order that nobody promises, so sums of floats may differ from call to call, but
//             not from rank to rank, as one rank reduces an element and stores it to all
//   rounding  16-bit floats are added in float32 and rounded; an average is that sum, scaled and
//             rounded again, wherever in the array an element is
//   alias     a thread calls fence_alias after it came together with others, before its first
//             access to copies, and again after its last one. With the barriers around that, any
//             ordinary access, on any rank, before or after the call, is ordered with these
//   meet      multimem_meet adds one to the counter of this block at all ranks: a release of all
//             that the block did. It waits until all ranks have added theirs to its own counter:
//             acquire. Counters only grow, and what is expected next is counted by the own rank, so
//             replaying a graph is like calling again. The same blocks of all ranks meet in the
//             same calls, as the ranks agreed on the way. A peer that has not counted is late
#pragma once

#include "exchange.cuh"
#include "fold.cuh"
#include "ptx_multimem.cuh"

#ifndef CUPY_ZC_MULTIMEM
#define CUPY_ZC_MULTIMEM Hardware
#endif

namespace cupy_zc {

struct Copies {
    const u64* each;  // of `ranks`
    u64 all;
    u32 ranks;
};

// What is reduced: the real numbers that complex ones are made of, otherwise the elements.
template <class E>
struct PartOf {
    using Type = E;
};
template <class T>
struct PartOf<Complex<T>> {
    using Type = T;
};

// An operation as the switch does it: its result is rounded to an element before it is finished.
template <class OPERATION>
struct Rounded {
    template <class E, class W>
    static __device__ __forceinline__ W apply(W a, W b) {
        return OPERATION::template apply<E>(a, b);
    }
    template <class E, class W>
    static __device__ __forceinline__ W finish(W value, u32 by) {
        return OPERATION::template finish<E>(Element<E>::widen(Element<E>::narrow(value)), by);
    }
};
template <class R>
using PartsOf = Reduction<typename PartOf<typename R::E>::Type, Rounded<typename R::Operation>>;

// Which instruction: no member `load` where the switch has none. FINAL: nothing is left to be done.
template <class E, class OPERATION>
struct Instruction {};
#define CUPY_ZC_INSTRUCTION(E, OPERATION, name, final)                                       \
    template <>                                                                              \
    struct Instruction<E, Rounded<OPERATION>> {                                              \
        static constexpr bool FINAL = final;                                                 \
        static __device__ __forceinline__ Pack load(u64 at) { return ld_reduce_##name(at); } \
    }
#define CUPY_ZC_INSTRUCTIONS(E, add, least, most) \
    CUPY_ZC_INSTRUCTION(E, Sum, add, true);       \
    CUPY_ZC_INSTRUCTION(E, Avg, add, false);      \
    CUPY_ZC_INSTRUCTION(E, Min, least, true);     \
    CUPY_ZC_INSTRUCTION(E, Max, most, true)
CUPY_ZC_INSTRUCTIONS(int, add_s32, min_s32, max_s32);
CUPY_ZC_INSTRUCTIONS(u32, add_u32, min_u32, max_u32);
CUPY_ZC_INSTRUCTIONS(long long, add_u64, min_s64, max_s64);
CUPY_ZC_INSTRUCTIONS(u64, add_u64, min_u64, max_u64);
CUPY_ZC_INSTRUCTIONS(Half, add_f16, min_f16, max_f16);
CUPY_ZC_INSTRUCTIONS(Bfloat, add_bf16, min_bf16, max_bf16);
CUPY_ZC_INSTRUCTION(float, Sum, add_f32, true);
CUPY_ZC_INSTRUCTION(float, Avg, add_f32, false);
CUPY_ZC_INSTRUCTION(double, Sum, add_f64, true);
CUPY_ZC_INSTRUCTION(double, Avg, add_f64, false);
CUPY_ZC_INSTRUCTION(Bool, Sum, or_b64, false);  // any: 1 | 2 is made 1. For `all`, 1 & 2 were lost
CUPY_ZC_INSTRUCTION(Bool, Max, or_b64, false);
#undef CUPY_ZC_INSTRUCTION
#undef CUPY_ZC_INSTRUCTIONS

struct Hardware {
    template <class R>
    static __device__ __forceinline__ Pack reduce(const Copies& from, u64 at) {
        using Reduce = Instruction<typename R::E, typename R::Operation>;
        const Pack pack = Reduce::load(from.all + at);
        if constexpr (Reduce::FINAL) {
            return pack;
        } else {
            typename R::template Fold<> fold;
            fold.start(pack);
            return fold.result(from.ranks);
        }
    }
    static __device__ __forceinline__ void store(const Copies& to, u64 at, const Pack& pack) {
        multimem_store(to.all + at, pack);
    }
    static __device__ __forceinline__ void store_word(const Copies& to, u64 at, u64 word) {
        multimem_store_word(to.all + at, word);
    }
    static __device__ __forceinline__ void add(const Copies& to, u64 at, u64 value) {
        multimem_add_release(to.all + at, value);
    }
};

struct Emulated {
    template <class R>
    static __device__ __forceinline__ Pack reduce(const Copies& from, u64 at) {
        typename R::template Fold<> fold;
        fold.start(memory<const Pack>(from.each[0] + at));
        for (u32 rank = 1; rank < from.ranks; ++rank) {
            fold.add(memory<const Pack>(from.each[rank] + at));
        }
        return fold.result(from.ranks);
    }
    static __device__ __forceinline__ void store(const Copies& to, u64 at, const Pack& pack) {
        for (u32 rank = 0; rank < to.ranks; ++rank) {
            memory<Pack>(to.each[rank] + at) = pack;
        }
    }
    static __device__ __forceinline__ void store_word(const Copies& to, u64 at, u64 word) {
        for (u32 rank = 0; rank < to.ranks; ++rank) {
            store_relaxed(&memory<u64>(to.each[rank] + at), word);
        }
    }
    static __device__ __forceinline__ void add(const Copies& to, u64 at, u64 value) {
        for (u32 rank = 0; rank < to.ranks; ++rank) {
            add_release(&memory<u64>(to.each[rank] + at), value);
        }
    }
};

// Whether arrays are at one place on all ranks, and bound there by all: the ranks agree on that.
static __device__ __forceinline__ bool everywhere(const Args& args, const u64* locations) {
    bool same = locations[0] != STAGED && (locations[0] & MULTICAST) != 0;
    for (u32 rank = 1; rank < args.size; ++rank) {
        same = same && locations[rank] == locations[0];
    }
    return same;
}

static __device__ __forceinline__ Copies lanes_of_all(const Args& args) {
    const u64 offset = args.lanes[args.rank] - address_of(args, args.rank, 0);
    return {args.lanes, address_of(args, args.size, offset), args.size};
}

// The packs of a stretch of bytes, for accesses of 16 bytes; `head` bytes come before the first.
struct Packs {
    u64 head, count;

    __device__ __forceinline__ Packs(u64 address, u64 bytes) {
        head = least((16 - address % 16) % 16, bytes);
        count = (bytes - head) / 16;
    }
    __device__ __forceinline__ u64 end() const { return head + count * 16; }

    // Packs [first, last) shared out among all threads of the grid, several in flight. `at` counts
    // bytes from the start of the stretch.
    template <class Load, class Store>
    __device__ __forceinline__ void pass(u64 first, u64 last, const Load& load,
                                         const Store& store) const {
        constexpr u32 FLIGHT = 4;
        const u64 stride = gridDim.x * static_cast<u64>(blockDim.x);
        u64 i = first + blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x;
        for (; i + (FLIGHT - 1) * stride < last; i += FLIGHT * stride) {
            Pack packs[FLIGHT];
#pragma unroll
            for (u32 k = 0; k < FLIGHT; ++k) {
                packs[k] = load(head + (i + k * stride) * 16);
            }
#pragma unroll
            for (u32 k = 0; k < FLIGHT; ++k) {
                store(head + (i + k * stride) * 16, packs[k]);
            }
        }
        for (; i < last; i += stride) {
            store(head + i * 16, load(head + i * 16));
        }
    }
};

// A rank that has not come to the meeting at which `all` is expected. Their counters are far away.
static __device__ __forceinline__ u32 late_for(const Args& args, u64 all) {
    for (u32 i = 1; i < args.size; ++i) {
        const u32 peer = (args.rank + i) % args.size;
        if (load_relaxed(&memory<u64>(args.lanes[peer] + expected_offset(blockIdx.x))) < all) {
            return peer;
        }
    }
    return (args.rank + 1) % args.size;
}

template <class M>
static __device__ __forceinline__ bool multimem_meet(const Args& args, u64 epoch) {
    bool met = true;
    __syncthreads();
    if (threadIdx.x == 0) {
        const u64 own = args.lanes[args.rank];
        u64* const expected = &memory<u64>(own + expected_offset(blockIdx.x));
        const u64* const arrivals = &memory<u64>(own + arrivals_offset(blockIdx.x));
        const u64 all = load_relaxed(expected) + args.size;
        store_relaxed(expected, all);
        M::add(lanes_of_all(args), arrivals_offset(blockIdx.x), 1);
        fence_alias();
        Watch watch;
        while (met && load_acquire(arrivals) < all) {
            met = !watch.over(args, epoch, [&] { return late_for(args, all); });
        }
    }
    return __syncthreads_and(met) != 0;
}

}  // namespace cupy_zc
