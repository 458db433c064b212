// Reduce to a root, of small and middle messages, in lines of 128 bytes (LL128): no barrier, no
// registration.
//
// Contract
//   memory    any, registered or not, any alignment; data pass through the buffers of the lane,
//             whose capacity for each peer is the lines of one row. See lines.cuh
//   reuse     the root takes data from all; every other pair, and the root with each, exchanges an
//             empty line (line_routes.cuh): each hears from all
//   mismatch  the root writes nothing before the lines of all ranks for it are there, the others
//             write nothing at all. The announcement is stored for those who wait longer than usual
//   in place  at the root, which sends no data
//   result    in rank order, as ll128.cu has it
#include "line_fold.cuh"
#include "line_routes.cuh"
#include "select.cuh"

namespace cupy_zc {

template <class R>
static __device__ __forceinline__ void ll128_reduce(const Args& args) {
    const Beginning beginning(args);
    const ElementRows<R> rows(args);
    const u64 group = line_group();
    const Pack first = rows.load(0, group);
    const u64 epoch = beginning.number();
    if (epoch == 0) {
        return;
    }
    const Lines lines(args, epoch);
    const Route<true, false> route(args);
    route.send_empty(lines, rows.lines());
    for (u64 line = group; route.targets != 0 && line < rows.lines(); line += line_groups()) {
        lines.send_to(args.root, line, line == group ? first : rows.load(0, line));
    }
    follow_up(args, beginning, epoch);
    if (!route.take_empty(lines, rows.lines()) || !route.own) {
        return;
    }
    for (u64 line = group; line < rows.lines(); line += line_groups()) {
        Pack pack = line == group ? first : rows.load(0, line);
        if (!reduce<R>(args, lines, line, pack)) {
            return;
        }
        rows.store(0, line, pack);
    }
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(ll128_reduce) { cupy_zc::ll128_reduce<cupy_zc::Selected>(args); }
