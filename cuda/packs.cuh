// From packs of 16 bytes to elements and back.
//
// Contract
//   packs     elements lie in a pack as in memory; all indices are compile-time constants after
//             unrolling, so nothing goes to local memory
#pragma once

#include "elements.cuh"

namespace cupy_zc {

template <class E>
static __device__ __forceinline__ typename Element<E>::Wide element_of(const Pack& pack,
                                                                       u32 index) {
    constexpr u32 BYTES = Element<E>::BYTES;
    const u32 at = index * BYTES;
    const u64 bits = (at < 8 ? pack.low : pack.high) >> (8 * (at % 8));
    return Element<E>::widen(bits);
}
template <>
__device__ __forceinline__ Complex<float> element_of<Complex<float>>(const Pack& pack, u32 index) {
    const u64 bits = index == 0 ? pack.low : pack.high;
    return {float_of(static_cast<u32>(bits)), float_of(static_cast<u32>(bits >> 32))};
}
template <>
__device__ __forceinline__ Complex<double> element_of<Complex<double>>(const Pack& pack, u32) {
    return {double_of(pack.low), double_of(pack.high)};
}

template <class E>
static __device__ __forceinline__ void put(Pack& pack, u32 index, typename Element<E>::Wide value) {
    constexpr u32 BYTES = Element<E>::BYTES;
    constexpr u64 MASK = ~0ull >> (64 - 8 * BYTES);
    const u32 at = index * BYTES;
    const u64 bits = (Element<E>::narrow(value) & MASK) << (8 * (at % 8));
    (at < 8 ? pack.low : pack.high) |= bits;
}
template <>
__device__ __forceinline__ void put<Complex<float>>(Pack& pack, u32 index, Complex<float> value) {
    (index == 0 ? pack.low : pack.high) =
        bits_of(value.real) | static_cast<u64>(bits_of(value.imaginary)) << 32;
}
template <>
__device__ __forceinline__ void put<Complex<double>>(Pack& pack, u32, Complex<double> value) {
    pack.low = bits_of(value.real);
    pack.high = bits_of(value.imaginary);
}

}  // namespace cupy_zc
