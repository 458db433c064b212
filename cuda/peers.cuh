// Sets of ranks, and the order in which peers are served.
//
// Contract
//   sets      masks with a bit for each rank; MAX_RANKS is far below 32
//   order     a rank starts with its right-hand neighbour, so that no rank is written by all at once
#pragma once

#include "types.cuh"

namespace cupy_zc {

static __device__ __forceinline__ bool holds(u32 ranks, u32 rank) {
    return (ranks >> rank & 1) != 0;
}
static __device__ __forceinline__ u32 peers_of(const Args& args) {
    return ((1u << args.size) - 1) & ~(1u << args.rank);
}

// The i-th peer to serve, from 1.
static __device__ __forceinline__ u32 neighbour(const Args& args, u32 i) {
    const u32 peer = args.rank + i;
    return peer < args.size ? peer : peer - args.size;
}

}  // namespace cupy_zc
