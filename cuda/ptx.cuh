// Everything that is PTX, under names that say what is promised. No other file holds PTX, but
// ptx_multimem.cuh.
//
// Contract
//   *_relaxed   one access of the size of the type, neither torn nor cached; orders nothing
//   *_release   all that this thread did before, and saw through a barrier, is visible to whoever
//               sees the value with *_acquire. Scope: the whole system, peers and host included
//   *_pair      two 8-byte words as one instruction; each word is whole, the pair need not be
//   *_line      eight neighbouring lanes access one 128-byte line. They are at one place, by
//               meet_mates or from_last_lane with no branch since that parts them, so that a store
//               leaves, and a load is served, as one transaction. CUDA promises neither that lanes
//               stay together so long, nor that no part of a line comes out of it older than its
//               last word: that is a property of the hardware, its links (NVLink) included, which
//               NCCL's LL128 relies on as well, and which set-up must have tested
//   *_mates, from_last_lane   name eight lanes in their mask, and they alone: others of the warp
//               may be anywhere, or have returned. A mask that is no constant costs tens of cycles:
//               one for several stores, and one for each turn of a wait
//   spin        one turn of a wait; the waits themselves are in wait.cuh
//
// A host emulation supplies a header of this name in its place; nothing else differs there.
#pragma once

#include "types.cuh"

#define CUPY_ZC_SHARED(type, name) __shared__ type name

namespace cupy_zc {

static __device__ __forceinline__ u64 load_relaxed(const u64* at) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

static __device__ __forceinline__ u64 load_acquire(const u64* at) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

static __device__ __forceinline__ void store_relaxed(u64* at, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

static __device__ __forceinline__ void store_release(u64* at, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

static __device__ __forceinline__ void store_release(u32* at, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

static __device__ __forceinline__ void add_release(u64* at, u64 value) {
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

static __device__ __forceinline__ Pack load_pair(const u64* at) {
    Pack pack;
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(pack.low), "=l"(pack.high)
                 : "l"(at)
                 : "memory");
    return pack;
}

static __device__ __forceinline__ void store_pair(u64* at, Pack pack) {
    asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(pack.low),
                 "l"(pack.high)
                 : "memory");
}

// The eight lanes of the warp that this lane shares a line with.
static __device__ __forceinline__ u32 line_mates() { return 0xffu << (threadIdx.x & 24u); }

static __device__ __forceinline__ void meet_mates() { __syncwarp(line_mates()); }

static __device__ __forceinline__ u32 line_lane() { return threadIdx.x & 7u; }

static __device__ __forceinline__ void store_line(u64* line, Pack pack) {
    store_pair(line + line_lane() * 2, pack);
}

static __device__ __forceinline__ Pack load_line(const u64* line) {
    return load_pair(line + line_lane() * 2);
}

// What the last of the eight lanes passes: it is the one that sees the flag of a line.
static __device__ __forceinline__ u32 from_last_lane(u32 value) {
    return __shfl_sync(line_mates(), value, 7, 8);
}

static __device__ __forceinline__ void add_relaxed(u64* at, u64 value) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

static __device__ __forceinline__ u64 atomic_add(u64* at, u64 value) {
    u64 before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(at), "l"(value)
                 : "memory");
    return before;
}

// Sets a word that is 0, as the first of all; false where another was quicker.
static __device__ __forceinline__ bool atomic_claim(u64* at, u64 value) {
    u64 before;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], 0, %2;"
                 : "=l"(before)
                 : "l"(at), "l"(value)
                 : "memory");
    return before == 0;
}

static __device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

static __device__ __forceinline__ void spin(bool patient) {
    if (patient) {
        __nanosleep(200);
    }
}

// Kernels of one stream may overlap (programmatic dependent launch, from sm_90 on): one starts while
// those before it still run. It must do nothing but wait then: what they wrote is visible after it.
static __device__ __forceinline__ void await_kernels_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may start once of each block a thread has said this, or all have ended.
static __device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

static __device__ __forceinline__ float float_of(u32 bits) { return __uint_as_float(bits); }
static __device__ __forceinline__ u32 bits_of(float value) { return __float_as_uint(value); }
static __device__ __forceinline__ double double_of(u64 bits) {
    return __longlong_as_double(static_cast<long long>(bits));
}
static __device__ __forceinline__ u64 bits_of(double value) {
    return static_cast<u64>(__double_as_longlong(value));
}

// Arithmetic that no option of the compiler changes: nothing is fused, and subnormal numbers are
// kept (CuPy compiles with -ftz=true).
static __device__ __forceinline__ float plus(float a, float b) {
    float result;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
static __device__ __forceinline__ float product(float a, float b) {
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
static __device__ __forceinline__ float quotient(float a, float b) {
    float result;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
static __device__ __forceinline__ bool less(float a, float b) {
    u32 result;
    asm("{ .reg .pred p; setp.lt.f32 p, %1, %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(result)
        : "f"(a), "f"(b));
    return result != 0;
}
static __device__ __forceinline__ bool is_nan(float value) {
    u32 result;
    asm("{ .reg .pred p; setp.nan.f32 p, %1, %1; selp.u32 %0, 1, 0, p; }"
        : "=r"(result)
        : "f"(value));
    return result != 0;
}
static __device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }
static __device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }
static __device__ __forceinline__ double quotient(double a, double b) { return __ddiv_rn(a, b); }
static __device__ __forceinline__ bool less(double a, double b) { return a < b; }
static __device__ __forceinline__ bool is_nan(double value) { return value != value; }

static __device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

static __device__ __forceinline__ u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

static __device__ __forceinline__ u16 float_to_bfloat(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

}  // namespace cupy_zc
