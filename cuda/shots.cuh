// What two_shot.cu and reduce_scatter.cu do with one part of the columns; push_reduce.cu does the
// same where it cannot push.
//
// Contract
//   calls     by all threads of a block; `bases` is shared memory, and between two parts there is a
//             barrier of exchange.cuh
//   slices    all-reduce and reduce: block b of rank r handles slice r of the columns of block b,
//             alone among all threads. Reduce-scatter: row r
#pragma once

#include "exchange.cuh"
#include "fold.cuh"

namespace cupy_zc {

static __device__ __forceinline__ Shape two_shot_shape(const Args& args) {
    return {1, 1, Reach::EVERYONE, args.root == EVERY_RANK ? Reach::EVERYONE : Reach::ROOT, true};
}

template <class R>
static __device__ __forceinline__ void two_shot_part(const Args& args, const Part& part,
                                                     Bases& bases) {
    const bool to_all = args.root == EVERY_RANK;
    const u64 line = LINE_BYTES / R::BYTES, width = part.last - part.first;
    const u64 share = ceiling(ceiling(width, args.size), line) * line;
    const u64 skip = least(width, args.rank * share);
    if (threadIdx.x < args.size) {
        const u32 rank = threadIdx.x;
        bases.source[rank] = part.input(rank, 0) + skip * R::BYTES;
        bases.target[rank] = part.output(to_all ? rank : args.root, 0) + skip * R::BYTES;
    }
    if (threadIdx.x == 0) {
        bases.sources = args.size;
        bases.targets = to_all ? args.size : 1;
    }
    __syncthreads();
    fold_all<R>(bases, least(share, width - skip));
}

static __device__ __forceinline__ Shape reduce_scatter_shape(const Args& args) {
    return {args.size, 1, Reach::EVERYONE, Reach::NOBODY, true};
}

template <class R>
static __device__ __forceinline__ void reduce_scatter_part(const Args& args, const Part& part,
                                                           Bases& bases) {
    if (threadIdx.x < args.size) {
        bases.source[threadIdx.x] = part.input(threadIdx.x, args.rank);
    }
    if (threadIdx.x == 0) {
        bases.target[0] = part.own(args.output, 0);
        bases.sources = args.size;
        bases.targets = 1;
    }
    __syncthreads();
    fold_all<R>(bases, part.last - part.first);
}

}  // namespace cupy_zc
