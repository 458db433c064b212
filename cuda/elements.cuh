// Element types: their bits, and what their sum, product, minimum and so on are.
//
// Contract
//   width     float16 and bfloat16 are added, multiplied and averaged in float32. Integers wrap
//             around; their average is the sum in their own type, divided and truncated towards
//             zero. bool: sum and max are "any", prod and min are "all". Complex numbers have no
//             order, and averages of them divide part by part
//   exact     no option of the compiler changes a result: see ptx.cuh
//   NaN       min and max of floats give NaN where any operand is NaN, as NumPy's do
#pragma once

#include "ptx.cuh"

namespace cupy_zc {

struct Bool;
struct Half;
struct Bfloat;
template <class T>
struct Complex {
    T real, imaginary;
};

// Element<E>: BYTES in memory, UNIT of its parts (memory.cuh), Wide to reduce in, and the way
// between the bits and that.
template <class E, class WIDE, class UNSIGNED>
struct IntegerElement {
    static constexpr u32 BYTES = sizeof(E);
    static constexpr u32 UNIT = BYTES;
    using Wide = WIDE;
    static __device__ __forceinline__ Wide widen(u64 bits) {
        return static_cast<Wide>(static_cast<E>(bits));
    }
    static __device__ __forceinline__ u64 narrow(Wide value) { return static_cast<u64>(value); }
    static __device__ __forceinline__ Wide sum(Wide a, Wide b) {
        return static_cast<Wide>(static_cast<UNSIGNED>(a) + static_cast<UNSIGNED>(b));
    }
    static __device__ __forceinline__ Wide prod(Wide a, Wide b) {
        return static_cast<Wide>(static_cast<UNSIGNED>(a) * static_cast<UNSIGNED>(b));
    }
    static __device__ __forceinline__ Wide min(Wide a, Wide b) { return b < a ? b : a; }
    static __device__ __forceinline__ Wide max(Wide a, Wide b) { return a < b ? b : a; }
    static __device__ __forceinline__ Wide avg(Wide sum, u32 by) {
        return widen(narrow(sum)) / static_cast<Wide>(by);
    }
};

template <class WIDE>
struct FloatElement {
    using Wide = WIDE;
    static __device__ __forceinline__ Wide sum(Wide a, Wide b) { return plus(a, b); }
    static __device__ __forceinline__ Wide prod(Wide a, Wide b) { return product(a, b); }
    static __device__ __forceinline__ Wide min(Wide a, Wide b) {
        return is_nan(a) || less(a, b) ? a : b;
    }
    static __device__ __forceinline__ Wide max(Wide a, Wide b) {
        return is_nan(a) || less(b, a) ? a : b;
    }
    static __device__ __forceinline__ Wide avg(Wide sum, u32 by) {
        return quotient(sum, static_cast<Wide>(by));
    }
};

template <class E>
struct Element;
template <>
struct Element<signed char> : IntegerElement<signed char, int, u32> {};
template <>
struct Element<u8> : IntegerElement<u8, u32, u32> {};
template <>
struct Element<short> : IntegerElement<short, int, u32> {};
template <>
struct Element<u16> : IntegerElement<u16, u32, u32> {};
template <>
struct Element<int> : IntegerElement<int, int, u32> {};
template <>
struct Element<u32> : IntegerElement<u32, u32, u32> {};
template <>
struct Element<long long> : IntegerElement<long long, long long, u64> {};
template <>
struct Element<u64> : IntegerElement<u64, u64, u64> {};

template <>
struct Element<Bool> {
    static constexpr u32 BYTES = 1;
    static constexpr u32 UNIT = BYTES;
    using Wide = bool;
    static __device__ __forceinline__ Wide widen(u64 bits) { return (bits & 0xff) != 0; }
    static __device__ __forceinline__ u64 narrow(Wide value) { return value ? 1 : 0; }
    static __device__ __forceinline__ Wide sum(Wide a, Wide b) { return a || b; }
    static __device__ __forceinline__ Wide prod(Wide a, Wide b) { return a && b; }
    static __device__ __forceinline__ Wide min(Wide a, Wide b) { return a && b; }
    static __device__ __forceinline__ Wide max(Wide a, Wide b) { return a || b; }
};

template <>
struct Element<Half> : FloatElement<float> {
    static constexpr u32 BYTES = 2;
    static constexpr u32 UNIT = BYTES;
    static __device__ __forceinline__ Wide widen(u64 bits) {
        return half_to_float(static_cast<u16>(bits));
    }
    static __device__ __forceinline__ u64 narrow(Wide value) { return float_to_half(value); }
};

template <>
struct Element<Bfloat> : FloatElement<float> {
    static constexpr u32 BYTES = 2;
    static constexpr u32 UNIT = BYTES;
    static __device__ __forceinline__ Wide widen(u64 bits) {
        return float_of(static_cast<u32>(bits) << 16);
    }
    static __device__ __forceinline__ u64 narrow(Wide value) { return float_to_bfloat(value); }
};

template <>
struct Element<float> : FloatElement<float> {
    static constexpr u32 BYTES = 4;
    static constexpr u32 UNIT = BYTES;
    static __device__ __forceinline__ Wide widen(u64 bits) {
        return float_of(static_cast<u32>(bits));
    }
    static __device__ __forceinline__ u64 narrow(Wide value) { return bits_of(value); }
};

template <>
struct Element<double> : FloatElement<double> {
    static constexpr u32 BYTES = 8;
    static constexpr u32 UNIT = BYTES;
    static __device__ __forceinline__ Wide widen(u64 bits) { return double_of(bits); }
    static __device__ __forceinline__ u64 narrow(Wide value) { return bits_of(value); }
};

template <class T>
struct Element<Complex<T>> {
    static constexpr u32 BYTES = 2 * sizeof(T);
    static constexpr u32 UNIT = sizeof(T);
    using Wide = Complex<T>;
    static __device__ __forceinline__ Wide sum(Wide a, Wide b) {
        return {plus(a.real, b.real), plus(a.imaginary, b.imaginary)};
    }
    static __device__ __forceinline__ Wide prod(Wide a, Wide b) {
        return {plus(product(a.real, b.real), -product(a.imaginary, b.imaginary)),
                plus(product(a.real, b.imaginary), product(a.imaginary, b.real))};
    }
    static __device__ __forceinline__ Wide avg(Wide sum, u32 by) {
        const T divisor = static_cast<T>(by);
        return {quotient(sum.real, divisor), quotient(sum.imaginary, divisor)};
    }
};

}  // namespace cupy_zc
