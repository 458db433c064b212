// All-reduce of small and middle messages in lines of 128 bytes (LL128): no barrier, no
// registration. Between two ranks, ll128_pair.cu takes its place.
//
// Contract
//   memory    any, registered or not, any alignment, in place or not; data pass through the buffers
//             of the lane, whose capacity for each peer is the lines of a row in one step, and 2 *
//             ceil(lines / size) in two. See lines.cuh for the lines themselves
//   steps     one: everyone sends everything to all. Two (more than two ranks, Args::two_step): a
//             rank reduces its slice of the lines and sends the result to all
//   mismatch  nothing is written before the lines of all ranks for it are there, so ranks that call
//             different things write nothing. The announcement is stored for those who wait longer
//             than usual; nobody waits for it, so it leaves behind the lines
//   in place  the eight lanes that send an element are those that later overwrite it
//   result    bitwise the same on all ranks: reduced in rank order by all, or by one
#include "line_fold.cuh"
#include "select.cuh"

namespace cupy_zc {

template <class R>
static __device__ __forceinline__ void one_step(const Args& args, const ElementRows<R>& rows,
                                                const Lines& lines, const Pack& first,
                                                const Beginning& beginning, u64 epoch) {
    const u32 groups = static_cast<u32>(line_groups()), group = static_cast<u32>(line_group());
    const u32 count = static_cast<u32>(rows.lines());
    for (u32 line = group; line < count; line += groups) {
        lines.send(line, line == group ? first : rows.load(0, line));
    }
    follow_up(args, beginning, epoch);
    for (u32 line = group; line < count; line += groups) {
        Pack pack = line == group ? first : rows.load(0, line);
        if (!reduce<R>(args, lines, line, pack)) {
            return;
        }
        rows.store(0, line, pack);
    }
    if (group < count) {  // a line of each peer was here: from the same block of that
        let_next_kernel_start();
    }
}

template <class R>
static __device__ __forceinline__ void two_steps(const Args& args, const ElementRows<R>& rows,
                                                 const Lines& lines, const Beginning& beginning,
                                                 u64 epoch) {
    // Lines of a buffer have numbers of 32 bits, which are quicker to divide.
    const u32 group = static_cast<u32>(line_group()), groups = static_cast<u32>(line_groups());
    const u32 count = static_cast<u32>(rows.lines());
    const u32 slice = (count + args.size - 1) / args.size, mine = args.rank * slice;
    for (u32 line = group; line < slice * args.size; line += groups) {
        const u32 owner = line / slice;
        if (owner != args.rank) {
            lines.send_to(owner, line % slice, rows.load(0, line));
        }
    }
    follow_up(args, beginning, epoch);
    for (u32 line = group; line < slice; line += groups) {
        Pack pack = rows.load(0, mine + line);
        if (!reduce<R>(args, lines, line, pack)) {
            return;
        }
        rows.store(0, mine + line, pack);
        lines.send(slice + line, pack);
    }
    for (u32 line = group; line < slice * args.size; line += groups) {
        const u32 owner = line / slice;
        Pack pack;
        if (owner != args.rank) {
            if (!lines.take(owner, slice + line % slice, pack)) {
                return;
            }
            rows.store(0, line, pack);
        }
    }
}

template <class R>
static __device__ __forceinline__ void ll128(const Args& args) {
    const Beginning beginning(args);
    const ElementRows<R> rows(args);
    const Pack first = rows.load(0, line_group());
    const u64 epoch = beginning.number();
    if (epoch == 0) {
        return;
    }
    const Lines lines(args, epoch);
    if (args.two_step != 0) {
        two_steps<R>(args, rows, lines, beginning, epoch);
    } else {
        one_step<R>(args, rows, lines, first, beginning, epoch);
    }
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(ll128) { cupy_zc::ll128<cupy_zc::Selected>(args); }
