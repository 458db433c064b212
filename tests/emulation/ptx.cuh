// Stands in for cuda/ptx.cuh on the host: the same names, the same promises, nothing more.
//
// Eight lanes store a line together, and load it together: whoever comes last does it, storing the flag
// last and loading it first. The words are relaxed atomics, which order nothing in the eyes of
// ThreadSanitizer, as on the device. With EMULATION_SPLIT_LINES each lane loads its part by itself, as
// memory would that keeps no line whole.
#pragma once

#include "runtime.h"
#include "types.cuh"

#define CUPY_ZC_SHARED(type, name)    \
    static const char name##_key = 0; \
    type& name = ::emulation::shared<type>(&name##_key)

namespace cupy_zc {

inline u64 load_relaxed(const u64* at) {
    emulation::perhaps_yield();
    return __atomic_load_n(at, __ATOMIC_RELAXED);
}
inline u64 load_acquire(const u64* at) {
    emulation::perhaps_yield();
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
inline void store_relaxed(u64* at, u64 value) {
    emulation::perhaps_yield();
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
}
inline void store_release(u64* at, u64 value) {
    emulation::perhaps_yield();
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
inline void add_release(u64* at, u64 value) {
    emulation::perhaps_yield();
    __atomic_fetch_add(at, value, __ATOMIC_RELEASE);
}
inline void store_release(u32* at, u32 value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

// Whole words, but not a whole pair: another thread may run in between.
inline Pack load_pair(const u64* at) {
    const u64 low = load_relaxed(at);
    return {low, load_relaxed(at + 1)};
}
inline void store_pair(u64* at, Pack pack) {
    store_relaxed(at, pack.low);
    store_relaxed(at + 1, pack.high);
}

inline u32 line_lane() { return threadIdx.x % 8; }
inline void meet_mates() {}  // the eight meet where the line is stored

inline void store_line(u64* line, Pack pack) {
    emulation::perhaps_yield();
    emulation::eight(pack.low, pack.high, [line](uint64_t* in, uint64_t*) {
        for (int i = 0; i < 16; ++i) {
            __atomic_store_n(line + i, in[i], __ATOMIC_RELAXED);
        }
    });
}
inline Pack load_line(const u64* line) {
#ifdef EMULATION_SPLIT_LINES
    return load_pair(line + line_lane() * 2);
#else
    emulation::perhaps_yield();
    emulation::current->had_line = true;
    const uint64_t* const words = emulation::eight(0, 0, [line](uint64_t*, uint64_t* out) {
        for (int i = 15; i >= 0; --i) {
            out[i] = __atomic_load_n(line + i, __ATOMIC_RELAXED);
        }
    });
    return {words[0], words[1]};
#endif
}
inline u32 from_last_lane(u32 value) {
    return static_cast<u32>(*emulation::eight(value, 0, [](uint64_t* in, uint64_t* out) {
        for (int i = 0; i < 8; ++i) {
            out[i * 2] = in[14];
        }
    }));
}

inline void add_relaxed(u64* at, u64 value) {
    emulation::perhaps_yield();
    __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
inline u64 atomic_add(u64* at, u64 value) {
    emulation::perhaps_yield();
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
inline bool atomic_claim(u64* at, u64 value) {
    u64 none = 0;
    return __atomic_compare_exchange_n(at, &none, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

// Kernels of a stream run one after the other. But a thread may only say that the next one may start
// when it has had a line, and with it the word of its counterparts.
inline void await_kernels_before() { emulation::current->had_line = false; }
inline void let_next_kernel_start() {
    if (!emulation::current->had_line && !emulation::alone) {
        emulation::die("lets the next kernel start before it heard from the other ranks");
    }
}

inline u64 nanoseconds() { return emulation::now(); }
inline void spin(bool) { emulation::yield(); }

template <class To, class From>
inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits are kept, all of them");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
inline float float_of(u32 bits) { return same_bits<float>(bits); }
inline u32 bits_of(float value) { return same_bits<u32>(value); }
inline double double_of(u64 bits) { return same_bits<double>(bits); }
inline u64 bits_of(double value) { return same_bits<u64>(value); }
template <class T>
T plus(T a, T b) {
    return a + b;
}
template <class T>
T product(T a, T b) {
    return a * b;
}
template <class T>
T quotient(T a, T b) {
    return a / b;
}
template <class T>
bool less(T a, T b) {
    return a < b;
}
template <class T>
bool is_nan(T value) {
    return value != value;
}

inline float half_to_float(u16 bits) { return static_cast<float>(same_bits<_Float16>(bits)); }
inline u16 float_to_half(float value) { return same_bits<u16>(static_cast<_Float16>(value)); }
inline u16 float_to_bfloat(float value) {  // to nearest, ties to even; NaN as the device has it
    const u32 bits = bits_of(value);
    return value != value ? 0x7fff : static_cast<u16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace cupy_zc
