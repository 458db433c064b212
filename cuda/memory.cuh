// Plain accesses of any alignment: packs from and to arrays, and copies.
//
// Contract
//   weak      nothing here orders anything or may be polled. What a peer wrote is read after a
//             barrier of negotiate.cuh, what it will read is written before one
//   UNIT      bytes of the smallest part of an element (a complex number has two); addresses are
//             multiples of it, and of nothing more
//   bits      data that are moved only are never interpreted: -0.0, NaN and subnormals stay as they
//             are
#pragma once

#include "ptx.cuh"

namespace cupy_zc {

static __device__ __forceinline__ u64 least(u64 a, u64 b) { return a < b ? a : b; }
static __device__ __forceinline__ u64 ceiling(u64 value, u64 unit) {
    return (value + unit - 1) / unit;
}

template <u32 BYTES>
struct Unit;
template <>
struct Unit<1> {
    using Type = u8;
};
template <>
struct Unit<2> {
    using Type = u16;
};
template <>
struct Unit<4> {
    using Type = u32;
};
template <>
struct Unit<8> {
    using Type = u64;
};
template <>
struct Unit<16> {
    using Type = Pack;
};

template <class T>
static __device__ __forceinline__ T& memory(u64 address) {
    return *reinterpret_cast<T*>(address);
}

// The first `units` parts of 8 bytes, at most 8 / UNIT; the others are zero.
template <u32 UNIT>
static __device__ __forceinline__ u64 load_word(u64 address, u32 units) {
    using T = typename Unit<UNIT>::Type;
    if (units >= 8 / UNIT && address % 8 == 0) {
        return memory<const u64>(address);
    }
    u64 word = 0;
#pragma unroll
    for (u32 i = 0; i < 8 / UNIT; ++i) {
        if (i < units) {
            word |= static_cast<u64>(memory<const T>(address + i * UNIT)) << (8 * i * UNIT);
        }
    }
    return word;
}

template <u32 UNIT>
static __device__ __forceinline__ void store_word(u64 address, u32 units, u64 word) {
    using T = typename Unit<UNIT>::Type;
    if (units >= 8 / UNIT && address % 8 == 0) {
        memory<u64>(address) = word;
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 8 / UNIT; ++i) {
        if (i < units) {
            memory<T>(address + i * UNIT) = static_cast<T>(word >> (8 * i * UNIT));
        }
    }
}

// The first `units` parts of a pack, at most 16 / UNIT; the others are zero. By halves: the last
// lane of a line has a half only, and goes no other way than its neighbours.
template <u32 UNIT>
static __device__ __forceinline__ Pack load_pack(u64 address, u32 units) {
    constexpr u32 HALF = 8 / UNIT;
    return {load_word<UNIT>(address, units),
            load_word<UNIT>(address + 8, units > HALF ? units - HALF : 0)};
}

template <u32 UNIT>
static __device__ __forceinline__ void store_pack(u64 address, u32 units, const Pack& pack) {
    constexpr u32 HALF = 8 / UNIT;
    store_word<UNIT>(address, units, pack.low);
    store_word<UNIT>(address + 8, units > HALF ? units - HALF : 0, pack.high);
}

// The threads that share a copy: which of them this one is, and how many they are.
struct Team {
    u32 member, members;
};
static __device__ __forceinline__ Team whole_block() { return {threadIdx.x, blockDim.x}; }

// A block in teams of whole warps, `most` at most, that do several things at a time. `index` is that
// of the own team; threads that are left over have `most`.
struct Teams {
    Team own;
    u32 index, count;
};
static __device__ __forceinline__ Teams in_teams(u32 most) {
    const u32 warps = blockDim.x / 32, count = warps < most ? warps : most;
    const u32 members = warps / count * 32, index = threadIdx.x / members;
    return {{threadIdx.x % members, members}, index < count ? index : most, count};
}

// `bytes` in accesses of BYTES by a team, several in flight; gives what is done.
template <u32 BYTES>
static __device__ __forceinline__ u64 copy_units(const Team& team, u64 to, u64 from, u64 bytes) {
    using T = typename Unit<BYTES>::Type;
    constexpr u32 FLIGHT = 4;
    const u64 units = bytes / BYTES, stride = team.members;
    u64 i = team.member;
    for (; i + (FLIGHT - 1) * stride < units; i += FLIGHT * stride) {
        T values[FLIGHT];
#pragma unroll
        for (u32 k = 0; k < FLIGHT; ++k) {
            values[k] = memory<const T>(from + (i + k * stride) * BYTES);
        }
#pragma unroll
        for (u32 k = 0; k < FLIGHT; ++k) {
            memory<T>(to + (i + k * stride) * BYTES) = values[k];
        }
    }
    for (; i < units; i += stride) {
        memory<T>(to + i * BYTES) = memory<const T>(from + i * BYTES);
    }
    return units * BYTES;
}

// A copy by a team, or by all threads of the block, as wide as both addresses allow.
static __device__ __forceinline__ void copy(const Team& team, u64 to, u64 from, u64 bytes) {
    if (to == from) {
        return;
    }
    const u64 apart = to ^ from;
    if (apart % 16 == 0) {
        const u64 head = (16 - to % 16) % 16 < bytes ? (16 - to % 16) % 16 : bytes;
        copy_units<1>(team, to, from, head);
        const u64 done = head + copy_units<16>(team, to + head, from + head, bytes - head);
        copy_units<1>(team, to + done, from + done, bytes - done);
    } else if ((apart | to | bytes) % 8 == 0) {
        copy_units<8>(team, to, from, bytes);
    } else if ((apart | to | bytes) % 4 == 0) {
        copy_units<4>(team, to, from, bytes);
    } else if ((apart | to | bytes) % 2 == 0) {
        copy_units<2>(team, to, from, bytes);
    } else {
        copy_units<1>(team, to, from, bytes);
    }
}

static __device__ __forceinline__ void copy(u64 to, u64 from, u64 bytes) {
    copy(whole_block(), to, from, bytes);
}

}  // namespace cupy_zc
