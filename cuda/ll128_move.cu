// Collectives that only move data, of small and middle messages, in lines of 128 bytes (LL128): no
// barrier, no registration. all_gather, all_to_all, broadcast, scatter, gather.
//
// Contract
//   memory    any, registered or not, any alignment, bytes that nobody interprets; data pass
//             through the buffers of the lane, whose capacity for each peer is the lines of one
//             row: max(1, ceil(count * element / 120)). See lines.cuh
//   reuse     all_gather, all_to_all: every rank sends every peer a row, of a line at least. The
//             others: every pair with no data to pass exchanges an empty line (line_routes.cuh).
//             Each hears from all
//   mismatch  a line is written once those of all peers with data for it are there and the block
//             has the empty lines of all others, so ranks that call different things write nothing.
//             The announcement is stored for those who wait longer than usual; nobody waits for it
//   in place  all_gather: the input may be row r of the output; broadcast, scatter, gather: at the
//             root, which has the row already. all_to_all: output is input; the lane that sends a
//             part of row p is the one that later overwrites that part, and it sends all it has
//             before it waits for the first line
//   traffic   each byte crosses a link once, 16 in 15 with the flags
#include "line_routes.cuh"
#include "line_rows.cuh"
#include "select.cuh"

namespace cupy_zc {

// The output has a row of each source, where all ranks are sources. EACH: the input has a row for
// each target.
template <bool FROM_ALL, bool TO_ALL, bool EACH, u32 UNIT>
class Move {
   public:
    __device__ __forceinline__ explicit Move(const Args& args)
        : args_(args), rows_(args), route_(args) {}

    // Of this group's first line: what `send` sends.
    __device__ __forceinline__ void load_first() {
        if (EACH) {
            rows_.load_each(route_.targets, line_group(), packs_);
        } else if (route_.targets != 0) {
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
            Pack own = {0, 0};
            if (copies) {
                own = rows_.load(from, line);
            }
            if (FROM_ALL ? !rows_of_all(lines, line, own, written)
                         : !row_of_root(lines, line, own)) {
                return;
            }
        }
    }

   private:
    __device__ __forceinline__ bool rows_of_all(const Lines& lines, u64 line, const Pack& own,
                                                u32 written) {
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
    __device__ __forceinline__ bool row_of_root(const Lines& lines, u64 line, Pack pack) {
        if (route_.sources != 0 && !lines.take(args_.root, line, pack)) {
            return false;
        }
        rows_.store(0, line, pack);
        return true;
    }

    const Args& args_;
    const Rows<UNIT, 120> rows_;
    const Route<FROM_ALL, TO_ALL> route_;
    Pack packs_[MAX_RANKS];
};

template <bool FROM_ALL, bool TO_ALL, bool EACH, u32 UNIT>
static __device__ __forceinline__ void move_in_units(const Args& args) {
    const Beginning beginning(args);
    Move<FROM_ALL, TO_ALL, EACH, UNIT> move(args);
    move.load_first();
    const u64 epoch = beginning.number();
    if (epoch == 0) {
        return;
    }
    const Lines lines(args, epoch);
    move.send(lines);
    announce<false>(args, epoch, args.output_location);
    move.receive(lines);
}

template <bool FROM_ALL, bool TO_ALL, bool EACH>
static __device__ __forceinline__ void move(const Args& args) {
    if ((args.input | args.output | args.count * args.element) % 4 == 0) {
        move_in_units<FROM_ALL, TO_ALL, EACH, 4>(args);
    } else {
        move_in_units<FROM_ALL, TO_ALL, EACH, 1>(args);
    }
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(ll128_all_gather) { cupy_zc::move<true, true, false>(args); }
CUPY_ZC_KERNEL(ll128_all_to_all) { cupy_zc::move<true, true, true>(args); }
CUPY_ZC_KERNEL(ll128_broadcast) { cupy_zc::move<false, true, false>(args); }
CUPY_ZC_KERNEL(ll128_scatter) { cupy_zc::move<false, true, true>(args); }
CUPY_ZC_KERNEL(ll128_gather) { cupy_zc::move<true, false, false>(args); }
