// Collectives that only move data, of small and middle messages, in lines of 128 bytes (LL128): no
// barrier, no registration. all_gather, all_to_all, broadcast, scatter, gather. The first two between
// two ranks: ll128_pair_move.cu.
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
#include "line_moves.cuh"
#include "select.cuh"

namespace cupy_zc {

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
    follow_up(args, beginning, epoch);
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
