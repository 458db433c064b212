// Reduce-scatter of small and middle messages in lines of 128 bytes (LL128): no barrier, no
// registration. Rank r reduces row r of all inputs into its output. Between two ranks,
// ll128_pair.cu takes its place.
//
// Contract
//   memory    any, registered or not, any alignment; data pass through the buffers of the lane,
//             whose capacity for each peer is the lines of one row. See lines.cuh
//   reuse     every rank sends every peer a row, of a line at least: each hears from all
//   mismatch  nothing is written before the lines of all ranks for it are there, so ranks that call
//             different things write nothing. The announcement is stored for those who wait longer
//             than usual; nobody waits for it
//   in place  the output may be row r of the own input: no peer gets that row, and the lane that
//             reads a part of it is the one that overwrites it
//   result    in rank order, as ll128.cu has it
#include "line_fold.cuh"
#include "select.cuh"

namespace cupy_zc {

template <class R>
static __device__ __forceinline__ void ll128_reduce_scatter(const Args& args) {
    const Beginning beginning(args);
    const ElementRows<R> rows(args);
    Pack packs[MAX_RANKS];
    rows.load_each(peers_of(args), line_group(), packs);
    const u64 epoch = beginning.number();
    if (epoch == 0) {
        return;
    }
    const Lines lines(args, epoch);
    rows.send_each(lines, peers_of(args), packs);
    follow_up(args, beginning, epoch);
    for (u64 line = line_group(); line < rows.lines(); line += line_groups()) {
        Pack pack = rows.load(args.rank, line);
        if (!reduce<R>(args, lines, line, pack)) {
            return;
        }
        rows.store(0, line, pack);
    }
    if (line_group() < rows.lines()) {  // a line of each peer was here: from the same block of that
        let_next_kernel_start();
    }
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(ll128_reduce_scatter) { cupy_zc::ll128_reduce_scatter<cupy_zc::Selected>(args); }
