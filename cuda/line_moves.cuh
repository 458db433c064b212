// The two halves of a collective that only moves lines: sending, and receiving what peers sent.
//
// Contract
//   order     `load_first`, `send`, `receive`, once each, by all threads of a block
//   first     the first line of a group is loaded before the epoch is known, and kept
//   two       of two ranks the one peer is asked for without a loop over all
#pragma once

#include "line_routes.cuh"
#include "line_rows.cuh"

namespace cupy_zc {

// The output has a row of each source, where all ranks are sources. EACH: the input has a row for
// each target.
template <bool FROM_ALL, bool TO_ALL, bool EACH, u32 UNIT>
class Move {
   public:
    __device__ __forceinline__ explicit Move(const Args& args)
        : args_(args), rows_(args), route_(args) {}

    // Of this group's first line: what `send` sends, and what is this rank's own.
    __device__ __forceinline__ void load_first() {
        if (EACH) {
            rows_.load_each(route_.targets, line_group(), packs_);
        } else if (route_.targets != 0 || route_.own) {
            packs_[0] = rows_.load(0, line_group());
        }
    }

    __device__ __forceinline__ void send(const Lines& lines) {
        route_.send_empty(lines, rows_.lines());
        if (EACH) {
            rows_.send_each(lines, route_.targets, packs_);
            return;
        }
        const u64 group = line_group();
        for (u64 line = group; route_.targets != 0 && line < rows_.lines(); line += line_groups()) {
            const Pack pack = line == group ? packs_[0] : rows_.load(0, line);
            if (TO_ALL) {
                lines.send(line, pack);
            } else {
                lines.send_to(args_.root, line, pack);
            }
        }
    }

    __device__ __forceinline__ void receive(const Lines& lines) {
        const u32 from = EACH ? args_.rank : 0, to = FROM_ALL ? args_.rank : 0;
        const bool copies = route_.own && rows_.input(from) != rows_.output(to);
        const u32 written = route_.sources | (copies ? 1u << args_.rank : 0);
        if (!route_.take_empty(lines, rows_.lines()) || written == 0) {
            return;
        }
        for (u64 line = line_group(); line < rows_.lines(); line += line_groups()) {
            Pack own = packs_[0];
            if (copies && (EACH || line != line_group())) {
                own = rows_.load(from, line);
            }
            if (FROM_ALL ? !rows_of_all(lines, line, own, written)
                         : !row_of_root(lines, line, own)) {
                return;
            }
        }
        // A line of each peer was here: from the same block of that.
        if (FROM_ALL && TO_ALL && line_group() < rows_.lines()) {
            let_next_kernel_start();
        }
    }

   private:
    __device__ __forceinline__ bool rows_of_all(const Lines& lines, u64 line, const Pack& own,
                                                u32 written) {
        if (args_.size == 2) {
            return rows_of_two(lines, line, own, written);
        }
#pragma unroll
        for (u32 rank = 0; rank < MAX_RANKS; ++rank) {
            packs_[rank] = own;
        }
        if (!lines.collect(route_.sources, line, packs_)) {
            return false;
        }
#pragma unroll
        for (u32 rank = 0; rank < MAX_RANKS; ++rank) {
            if (holds(written, rank)) {
                rows_.store(rank, line, packs_[rank]);
            }
        }
        return true;
    }
    __device__ __forceinline__ bool rows_of_two(const Lines& lines, u64 line, const Pack& own,
                                                u32 written) {
        const u32 peer = 1 - args_.rank;
        if (holds(route_.sources, peer)) {
            Pack pack;
            if (!lines.take(peer, line, pack)) {
                return false;
            }
            rows_.store(peer, line, pack);
        }
        if (holds(written, args_.rank)) {
            rows_.store(args_.rank, line, own);
        }
        return true;
    }
    __device__ __forceinline__ bool row_of_root(const Lines& lines, u64 line, Pack pack) {
        if (route_.sources != 0 && !lines.take(args_.root, line, pack)) {
            return false;
        }
        rows_.store(0, line, pack);
        return true;
    }

    const Args& args_;
    const Rows<UNIT, LINE_DATA> rows_;
    const Route<FROM_ALL, TO_ALL> route_;
    Pack packs_[MAX_RANKS];
};

}  // namespace cupy_zc
