// Packets: 16 bytes of data in 32, whole on any link, each 8 bytes with their own flag.
//
// Contract
//   packets   {4 bytes of data, flag, 4 bytes of data, flag}, twice: each 8-byte word is whole by
//             itself and carries the low half of a number. One writer each; relaxed accesses
//   flag      the reader knows the number that it waits for; a number repeats after 2^32
#pragma once

#include "wait.cuh"

namespace cupy_zc {

static __device__ __forceinline__ void store_packets(u64* at, const Pack& pack, u64 number) {
    store_pair(at, {half_word(pack.low, 0, number), half_word(pack.low, 1, number)});
    store_pair(at + 2, {half_word(pack.high, 0, number), half_word(pack.high, 1, number)});
}

// False where they are not all there; then the pack has no meaning.
static __device__ __forceinline__ bool load_packets(const u64* at, u64 number, Pack& pack) {
    const Pack low = load_pair(at), high = load_pair(at + 2);
    pack = {whole_word(low.low, low.high), whole_word(high.low, high.high)};
    return is_of(low.low, number) && is_of(low.high, number) && is_of(high.low, number) &&
           is_of(high.high, number);
}

}  // namespace cupy_zc
