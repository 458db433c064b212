// The multimem instructions: one access to the copies that all ranks have of some bytes. Beside
// ptx.cuh the only file with PTX.
//
// Contract
//   address     of a multicast mapping, in which all ranks' memory is bound; aligned to the access:
//               16 bytes for *_v4, else 4 or 8 for each of those that make up a pack
//   ld_reduce_* a pack of 16 bytes of every copy, reduced in the switch, in an order that nobody
//               promises. 16-bit floats are added in float32 and rounded once. min and max of
//               16-bit floats may lose a NaN
//   multimem_*  a store to, or an addition in, all copies, the own one among them
//   relaxed     nothing is ordered, as in ptx.cuh; add_release is a release at system scope
//   alias       a multicast address and the ordinary ones are aliases of the same bytes. Accesses
//               through one and through another are ordered only if, beside everything else, some
//               thread on the way from one to the other calls fence_alias
//   needs       sm_90
//
// A host emulation supplies a header of this name in its place; nothing else differs there.
#pragma once

#include "ptx.cuh"

namespace cupy_zc {

// A pack by one access of four registers.
#define CUPY_ZC_LD_REDUCE_V4(name, instruction)                                                 \
    static __device__ __forceinline__ Pack ld_reduce_##name(u64 at) {                           \
        u32 a, b, c, d;                                                                         \
        asm volatile("multimem.ld_reduce.relaxed.sys.global." instruction " {%0, %1, %2, %3}, " \
                     "[%4];"                                                                    \
                     : "=r"(a), "=r"(b), "=r"(c), "=r"(d)                                       \
                     : "l"(at)                                                                  \
                     : "memory");                                                               \
        return {a | static_cast<u64>(b) << 32, c | static_cast<u64>(d) << 32};                  \
    }
// By four accesses of 32 bits, and by two of 64: what is no vector in the switch.
#define CUPY_ZC_LD_REDUCE_32(name, instruction)                                           \
    static __device__ __forceinline__ Pack ld_reduce_##name(u64 at) {                     \
        u32 parts[4];                                                                     \
        _Pragma("unroll") for (u32 i = 0; i < 4; ++i) {                                   \
            asm volatile("multimem.ld_reduce.relaxed.sys.global." instruction " %0, [%1];" \
                         : "=r"(parts[i])                                                 \
                         : "l"(at + i * 4)                                                \
                         : "memory");                                                     \
        }                                                                                 \
        return {parts[0] | static_cast<u64>(parts[1]) << 32,                              \
                parts[2] | static_cast<u64>(parts[3]) << 32};                             \
    }
#define CUPY_ZC_LD_REDUCE_64(name, instruction, TYPE, constraint, bits)                    \
    static __device__ __forceinline__ Pack ld_reduce_##name(u64 at) {                      \
        TYPE parts[2];                                                                     \
        _Pragma("unroll") for (u32 i = 0; i < 2; ++i) {                                    \
            asm volatile("multimem.ld_reduce.relaxed.sys.global." instruction " %0, [%1];" \
                         : "=" constraint(parts[i])                                        \
                         : "l"(at + i * 8)                                                 \
                         : "memory");                                                      \
        }                                                                                  \
        return {bits(parts[0]), bits(parts[1])};                                           \
    }
#define CUPY_ZC_LD_REDUCE_WORDS(name, instruction) \
    CUPY_ZC_LD_REDUCE_64(name, instruction, u64, "l", )

CUPY_ZC_LD_REDUCE_V4(add_f16, "add.acc::f32.v4.f16x2")
CUPY_ZC_LD_REDUCE_V4(min_f16, "min.v4.f16x2")
CUPY_ZC_LD_REDUCE_V4(max_f16, "max.v4.f16x2")
CUPY_ZC_LD_REDUCE_V4(add_bf16, "add.acc::f32.v4.bf16x2")
CUPY_ZC_LD_REDUCE_V4(min_bf16, "min.v4.bf16x2")
CUPY_ZC_LD_REDUCE_V4(max_bf16, "max.v4.bf16x2")
CUPY_ZC_LD_REDUCE_V4(add_f32, "add.v4.f32")
CUPY_ZC_LD_REDUCE_64(add_f64, "add.f64", double, "d", bits_of)
CUPY_ZC_LD_REDUCE_32(add_s32, "add.s32")
CUPY_ZC_LD_REDUCE_32(min_s32, "min.s32")
CUPY_ZC_LD_REDUCE_32(max_s32, "max.s32")
CUPY_ZC_LD_REDUCE_32(add_u32, "add.u32")
CUPY_ZC_LD_REDUCE_32(min_u32, "min.u32")
CUPY_ZC_LD_REDUCE_32(max_u32, "max.u32")
CUPY_ZC_LD_REDUCE_WORDS(add_u64, "add.u64")  // of s64 as well: the same bits
CUPY_ZC_LD_REDUCE_WORDS(min_s64, "min.s64")
CUPY_ZC_LD_REDUCE_WORDS(max_s64, "max.s64")
CUPY_ZC_LD_REDUCE_WORDS(min_u64, "min.u64")
CUPY_ZC_LD_REDUCE_WORDS(max_u64, "max.u64")
CUPY_ZC_LD_REDUCE_WORDS(or_b64, "or.b64")
#undef CUPY_ZC_LD_REDUCE_V4
#undef CUPY_ZC_LD_REDUCE_32
#undef CUPY_ZC_LD_REDUCE_64
#undef CUPY_ZC_LD_REDUCE_WORDS

// Bits, whatever they mean; the type of a vector is a float's because there is no other one.
static __device__ __forceinline__ void multimem_store(u64 at, const Pack& pack) {
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at),
                 "r"(static_cast<u32>(pack.low)), "r"(static_cast<u32>(pack.low >> 32)),
                 "r"(static_cast<u32>(pack.high)), "r"(static_cast<u32>(pack.high >> 32))
                 : "memory");
}

// A word that arrives whole at every copy.
static __device__ __forceinline__ void multimem_store_word(u64 at, u64 word) {
    asm volatile("multimem.st.relaxed.sys.global.b64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
}

static __device__ __forceinline__ void multimem_add_release(u64 at, u64 value) {
    asm volatile("multimem.red.release.sys.global.add.u64 [%0], %1;" ::"l"(at), "l"(value)
                 : "memory");
}

static __device__ __forceinline__ void fence_alias() {
    asm volatile("fence.proxy.alias;" ::: "memory");
}

}  // namespace cupy_zc
