// Reduces a line of every rank.
//
// Contract
//   ElementRows  lines of whole elements: 120 bytes of them, but 112 where elements have 16
//   order        by rank, as fold.cuh has it: bitwise the same wherever it is done
#pragma once

#include "line_rows.cuh"
#include "reduce.cuh"

namespace cupy_zc {

template <class R>
using ElementRows = Rows<Element<typename R::E>::UNIT, LINE_DATA / R::BYTES * R::BYTES>;

// The own pack and that of the one peer there is, in rank order. Words are chosen: of whole packs the
// addresses would be, in local memory.
template <class R>
static __device__ __forceinline__ Pack fold_two(const Args& args, const Pack& mine,
                                                const Pack& theirs) {
    const bool last = args.rank != 0;
    typename R::template Fold<> fold;
    fold.start({last ? theirs.low : mine.low, last ? theirs.high : mine.high});
    fold.add({last ? mine.low : theirs.low, last ? mine.high : theirs.high});
    return fold.result(2);
}

// Waits for a line of every peer, and folds them and the own pack; the result replaces that.
template <class R>
static __device__ __forceinline__ bool reduce(const Args& args, const Lines& lines, u64 line,
                                              Pack& pack) {
    if (args.size == 2) {
        Pack theirs;
        const bool there = lines.take(1 - args.rank, line, theirs);
        pack = fold_two<R>(args, pack, theirs);
        return there;
    }
    Pack packs[MAX_RANKS];
#pragma unroll
    for (u32 rank = 0; rank < MAX_RANKS; ++rank) {
        packs[rank] = pack;
    }
    if (!lines.collect(peers_of(args), line, packs)) {
        return false;
    }
    typename R::template Fold<> fold;
    fold.start(packs[0]);
#pragma unroll
    for (u32 rank = 1; rank < MAX_RANKS; ++rank) {
        if (rank < args.size) {
            fold.add(packs[rank]);
        }
    }
    pack = fold.result(args.size);
    return true;
}

}  // namespace cupy_zc
