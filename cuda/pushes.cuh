// What push.cu does with one part of the columns; multimem_move.cu does the same where arrays are
// not everywhere.
//
// Contract
//   order     teams of warps write to several outputs at a time, the own one among them, which is
//             local and so costs no time beside the others
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
    if (count == 0) {
        return;
    }
    // The own output comes last. Where it is the input there is nothing to do, and no team for it.
    const u32 last = (first + count - 1) % args.size;
    const bool there = part.output(last, to) == part.own(args.input, row_each ? last : 0);
    const u32 outputs = there && count > 1 ? count - 1 : count;
    const Teams teams = in_teams(outputs);
    for (u32 i = teams.index; i < outputs; i += teams.count) {
        const u32 peer = (first + i) % args.size;
        copy(teams.own, part.output(peer, to), part.own(args.input, row_each ? peer : 0),
             part.bytes());
    }
}

static __device__ __forceinline__ void push_all_gather(const Args& args, const Part& part) {
    push(args, part, false, args.rank, args.rank + 1, args.size);
}
static __device__ __forceinline__ void push_broadcast(const Args& args, const Part& part) {
    push(args, part, false, 0, args.rank + 1, args.rank == args.root ? args.size : 0);
}

}  // namespace cupy_zc
