// All-reduce of small and middle messages in lines of 128 bytes (LL128): no barrier, no
// registration.
//
// Contract
//   memory    any, registered or not, any alignment, in place or not; data pass through the buffers
//             of the lane, whose capacity for each peer is `count()` lines in one step, and 2 *
//             ceil(count() / size) in two. See lines.cuh for the lines themselves
//   steps     one: everyone sends everything to all. Two (more than two ranks, Args::two_step): a
//             rank reduces its slice of the lines and sends the result to all
//   mismatch  nothing is written before the lines of all ranks for it are there, so ranks that call
//             different things write nothing. The announcement is stored for those who wait longer
//             than usual; nobody waits for it
//   in place  the eight lanes that send an element are those that later overwrite it
//   result    bitwise the same on all ranks: reduced in rank order by all, or by one
#include "lines.cuh"
#include "select.cuh"

namespace cupy_zc {

template <class R>
static __device__ __forceinline__ void one_step(const Lines<R>& lines, const Pack& first) {
    const u64 group = lines.group(), groups = lines.groups(), count = lines.count();
    for (u64 line = group; line < count; line += groups) {
        lines.send(line, line == group ? first : lines.load(line));
    }
    for (u64 line = group; line < count; line += groups) {
        Pack pack = line == group ? first : lines.load(line);
        if (!lines.reduce(line, pack)) {
            return;
        }
        lines.store(line, pack);
    }
}

template <class R>
static __device__ __forceinline__ void two_steps(const Args& args, const Lines<R>& lines) {
    const u64 group = lines.group(), groups = lines.groups();
    const u64 slice = (lines.count() + args.size - 1) / args.size, mine = args.rank * slice;
    for (u64 line = group; line < slice * args.size; line += groups) {
        const u32 owner = static_cast<u32>(line / slice);
        if (owner != args.rank) {
            lines.send_to(owner, line % slice, lines.load(line));
        }
    }
    for (u64 line = group; line < slice; line += groups) {
        Pack pack = lines.load(mine + line);
        if (!lines.reduce(line, pack)) {
            return;
        }
        lines.store(mine + line, pack);
        lines.send(slice + line, pack);
    }
    for (u64 line = group; line < slice * args.size; line += groups) {
        const u32 owner = static_cast<u32>(line / slice);
        Pack pack;
        if (owner != args.rank) {
            if (!lines.take(owner, slice + line % slice, pack)) {
                return;
            }
            lines.store(line, pack);
        }
    }
}

template <class R>
static __device__ __forceinline__ void ll128(const Args& args) {
    Lines<R> lines(args);
    const Pack first = lines.load(lines.group());  // its way is not longer than that of the epoch
    const u64 epoch = begin(args);
    if (epoch == 0) {
        return;
    }
    lines.start(epoch);
    announce<false>(args, epoch, args.output_location);
    if (args.two_step != 0) {
        two_steps(args, lines);
    } else {
        one_step(lines, first);
    }
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(ll128) { cupy_zc::ll128<cupy_zc::Selected>(args); }
