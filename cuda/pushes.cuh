// What push.cu does with one part of the columns; multimem_move.cu does the same where arrays are
// not everywhere.
//
// Contract
//   order     a rank starts with the output it is told to, so that no rank is written by all at
//             once
#pragma once

#include "exchange.cuh"

namespace cupy_zc {

static __device__ __forceinline__ Shape all_gather_shape(const Args& args) {
    return {1, args.size, Reach::NOBODY, Reach::EVERYONE, true};
}
static __device__ __forceinline__ Shape broadcast_shape() {
    return {1, 1, Reach::NOBODY, Reach::EVERYONE, true};
}

// Rows of the own input go to row `to` of the outputs of `count` ranks from `first` on: to each its
// own row where there is one for each, row 0 to all otherwise.
static __device__ __forceinline__ void push(const Args& args, const Part& part, bool row_each,
                                            u32 to, u32 first, u32 count) {
    for (u32 i = 0; i < count; ++i) {
        const u32 peer = (first + i) % args.size;
        copy(part.output(peer, to), part.own(args.input, row_each ? peer : 0), part.bytes());
    }
}

static __device__ __forceinline__ void push_all_gather(const Args& args, const Part& part) {
    push(args, part, false, args.rank, args.rank + 1, args.size);
}
static __device__ __forceinline__ void push_broadcast(const Args& args, const Part& part) {
    push(args, part, false, 0, args.rank + 1, args.rank == args.root ? args.size : 0);
}

}  // namespace cupy_zc
