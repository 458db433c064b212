// Stands in for cuda/ptx_multimem.cuh on the host: the same names, the same promises, nothing more.
//
// An address is one that no memory has, of an arena and an offset; the copies are where the driver
// says. They are reduced in another order from place to place, as no order is promised.
// Accesses are plain, so ThreadSanitizer sees those that nothing orders; and fences of aliases that
// are missing end the process with a message.
#pragma once

#include "ptx.cuh"

namespace emulation {

// Where what each rank has bound of an arena is: a row for each rank.
struct Multicast {
    static constexpr uint64_t BASE = 1ull << 62;

    const unsigned long long* table;
    unsigned ranks, arenas;

    uint64_t copy(unsigned rank, uint64_t at, unsigned access) const {
        const uint64_t arena = (at ^ BASE) >> 48;
        if (arena >= arenas || at % access != 0) {
            die("an access to all copies at no address for that");
        }
        return table[rank * arenas + arena] + (at & ((1ull << 48) - 1));
    }
};
inline Multicast multicast;

inline void access_alias(bool needs_fence, bool stores) {
    perhaps_yield();
    if (needs_fence && !current->fenced) {
        die("an access to all copies that no fence_alias comes before");
    }
    current->unfenced_store = current->unfenced_store || stores;
}

// `access` bytes at a time, so that alignment is checked as the instruction asks for it.
template <class BITS, class WIDE, class Widen, class Combine, class Narrow>
void ld_reduce(uint64_t at, unsigned access, void* result, Widen widen, Combine combine,
               Narrow narrow) {
    access_alias(true, false);
    for (unsigned i = 0; i < 16; i += sizeof(BITS)) {
        const unsigned first = at / 16 % multicast.ranks;
        WIDE total = {};
        for (unsigned step = 0; step < multicast.ranks; ++step) {
            const unsigned rank = (first + step) % multicast.ranks;
            const uint64_t start = multicast.copy(rank, at + i / access * access, access);
            const WIDE value = widen(*reinterpret_cast<const BITS*>(start + i % access));
            total = step == 0 ? value : combine(total, value);
        }
        const BITS bits = narrow(total);
        std::memcpy(static_cast<char*>(result) + i, &bits, sizeof(bits));
    }
}

}  // namespace emulation

namespace cupy_zc {

#define EMULATED_LD_REDUCE(name, access, BITS, WIDE, widen, expression, narrow)          \
    inline Pack ld_reduce_##name(u64 at) {                                               \
        Pack pack;                                                                       \
        emulation::ld_reduce<BITS, WIDE>(                                                \
            at, access, &pack, [](BITS bits) -> WIDE { return widen(bits); },            \
            [](WIDE a, WIDE b) -> WIDE { return expression; },                           \
            [](WIDE value) -> BITS { return narrow(value); });                           \
        return pack;                                                                     \
    }
#define EMULATED_INTEGER(name, access, T, expression) \
    EMULATED_LD_REDUCE(name, access, T, T, as_it_is, expression, as_it_is)
#define EMULATED_HALVES(type, widen, narrow)                                      \
    EMULATED_LD_REDUCE(add_##type, 16, u16, float, widen, a + b, narrow)          \
    EMULATED_LD_REDUCE(min_##type, 16, u16, float, widen, b < a ? b : a, narrow)  \
    EMULATED_LD_REDUCE(max_##type, 16, u16, float, widen, a < b ? b : a, narrow)

template <class T>
T as_it_is(T value) {
    return value;
}
inline float bfloat_to_float(u16 bits) { return float_of(static_cast<u32>(bits) << 16); }

EMULATED_HALVES(f16, half_to_float, float_to_half)
EMULATED_HALVES(bf16, bfloat_to_float, float_to_bfloat)
EMULATED_LD_REDUCE(add_f32, 16, float, float, as_it_is, a + b, as_it_is)
EMULATED_LD_REDUCE(add_f64, 8, double, double, as_it_is, a + b, as_it_is)
EMULATED_INTEGER(add_s32, 4, u32, a + b)  // as unsigned, which may wrap
EMULATED_INTEGER(min_s32, 4, int, b < a ? b : a)
EMULATED_INTEGER(max_s32, 4, int, a < b ? b : a)
EMULATED_INTEGER(add_u32, 4, u32, a + b)
EMULATED_INTEGER(min_u32, 4, u32, b < a ? b : a)
EMULATED_INTEGER(max_u32, 4, u32, a < b ? b : a)
EMULATED_INTEGER(add_u64, 8, u64, a + b)
EMULATED_INTEGER(min_s64, 8, long long, b < a ? b : a)
EMULATED_INTEGER(max_s64, 8, long long, a < b ? b : a)
EMULATED_INTEGER(min_u64, 8, u64, b < a ? b : a)
EMULATED_INTEGER(max_u64, 8, u64, a < b ? b : a)
EMULATED_INTEGER(or_b64, 8, u64, a | b)
#undef EMULATED_LD_REDUCE
#undef EMULATED_INTEGER
#undef EMULATED_HALVES

inline void multimem_store(u64 at, const Pack& pack) {
    emulation::access_alias(true, true);
    for (u32 rank = 0; rank < emulation::multicast.ranks; ++rank) {
        *reinterpret_cast<Pack*>(emulation::multicast.copy(rank, at, 16)) = pack;
    }
}
inline void multimem_store_word(u64 at, u64 word) {
    emulation::access_alias(true, true);
    for (u32 rank = 0; rank < emulation::multicast.ranks; ++rank) {
        store_relaxed(reinterpret_cast<u64*>(emulation::multicast.copy(rank, at, 8)), word);
    }
}
inline void multimem_add_release(u64 at, u64 value) {
    emulation::access_alias(false, true);
    for (u32 rank = 0; rank < emulation::multicast.ranks; ++rank) {
        add_release(reinterpret_cast<u64*>(emulation::multicast.copy(rank, at, 8)), value);
    }
}
inline void fence_alias() {
    emulation::current->fenced = true;
    emulation::current->unfenced_store = false;
}

}  // namespace cupy_zc
