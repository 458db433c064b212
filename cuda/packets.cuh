// Packets: 16 bytes of data in 32, whole on any link, each 8 bytes with their own flag.
//
// Contract
//   packets   {4 bytes of data, flag, 4 bytes of data, flag}, twice: each 8-byte word is whole by
//             itself and carries the flag. One writer each; relaxed accesses
//   flag      of the number that the reader waits for: 1 to 2^32 - 1 in turn, and never the 0 of
//             fresh memory. It repeats after 2^32 - 1 numbers
#pragma once

#include "wait.cuh"

namespace cupy_zc {

static __device__ __forceinline__ u64 packet_flag(u64 number) { return number % 0xffffffff + 1; }

static __device__ __forceinline__ void store_packets(u64* at, const Pack& pack, u64 flag) {
    store_pair(at, {half_word(pack.low, 0, flag), half_word(pack.low, 1, flag)});
    store_pair(at + 2, {half_word(pack.high, 0, flag), half_word(pack.high, 1, flag)});
}

// False where they are not all there; then the pack has no meaning.
static __device__ __forceinline__ bool load_packets(const u64* at, u64 flag, Pack& pack) {
    const Pack low = load_pair(at), high = load_pair(at + 2);
    pack = {whole_word(low.low, low.high), whole_word(high.low, high.high)};
    return is_of(low.low, flag) && is_of(low.high, flag) && is_of(high.low, flag) &&
           is_of(high.high, flag);
}

}  // namespace cupy_zc
