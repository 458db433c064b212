// How columns are cut for push_reduce.cu: a slice for every rank, of every slice a share for every
// pair of blocks, of every share the same number of pieces.
//
// Contract
//   shared    all follows from what ranks share: they count the same pieces. Those of the last
//             slice, which is shorter, may be short or empty, and are sent and folded like others
//   aligned   slices, shares and pieces start at multiples of 128 bytes of a row
//   Cutting   what slice r is. SLICES: a part of the columns. ROWS: row r, all its columns. WHOLE:
//             all columns of the only row, for both of two ranks
#pragma once

#include "rings.cuh"

namespace cupy_zc {

constexpr u64 PIECES = 16;         // of a share at least, so that the two hops overlap...
constexpr u64 STEP_BYTES = 65536;  // ...but no less than this for a piece to every peer

enum class Cutting { SLICES, ROWS, WHOLE };

// In shared memory: filled by one thread, read by all after a barrier.
struct Cut {
    u64 slice, share, piece;  // columns
    u64 pieces;               // of this pair in every slice
    u64 before;               // columns of a slice before the share of this pair
};

template <Cutting HOW>
static __device__ __forceinline__ void cut_up(const Args& args, Cut& cut) {
    const u64 line = LINE_BYTES / args.element;
    cut.slice = HOW == Cutting::SLICES ? ceiling(ceiling(args.count, args.size), line) * line
                                       : args.count;
    cut.share = ceiling(ceiling(cut.slice, pairs()), line) * line;
    const u64 wanted = ceiling(cut.share / line, PIECES);
    const u64 fewest = ceiling(STEP_BYTES / LINE_BYTES, args.size - 1);
    cut.piece = least(wanted < fewest ? fewest : wanted, slot_bytes(args) / LINE_BYTES) * line;
    cut.before = pair() * cut.share;
    cut.pieces = ceiling(least(cut.share, cut.slice - least(cut.slice, cut.before)), cut.piece);
}

// Bytes before a piece: in a slice, and in an array.
static __device__ __forceinline__ u64 in_slice(const Args& args, const Cut& cut, u64 piece) {
    return (cut.before + piece * cut.piece) * args.element;
}
template <Cutting HOW>
static __device__ __forceinline__ u64 in_array(const Args& args, const Cut& cut, u32 rank,
                                               u64 piece) {
    const u64 before = HOW == Cutting::WHOLE ? 0 : rank * cut.slice;
    return before * args.element + in_slice(args, cut, piece);
}

template <Cutting HOW>
static __device__ __forceinline__ u64 columns(const Args& args, const Cut& cut, u32 rank,
                                              u64 piece) {
    const u64 left = args.count - least(args.count, rank * cut.slice);
    const u64 width = HOW == Cutting::SLICES ? least(cut.slice, left) : cut.slice;
    const u64 first = cut.before + piece * cut.piece;
    const u64 last = least(least(first + cut.piece, cut.before + cut.share), width);
    return last - least(last, first);
}

}  // namespace cupy_zc
