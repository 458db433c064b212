// All-reduce and reduce in two shots, fused: every rank reduces its slice of all inputs and stores
// the result to all outputs (reduce: to the root's).
//
// Contract
//   memory    any, registered or not on any rank, any alignment, in place or not; see exchange.cuh
//             for who stages, who waits for whom, and why reuse is safe
//   slices    block b of rank r handles slice r of the columns of block b, alone among all threads
//   traffic   each rank reads and writes (n - 1) / n of the array over the links
//   result    bitwise the same on all ranks: each element is reduced once, in rank order
#include "exchange.cuh"
#include "fold.cuh"
#include "select.cuh"

namespace cupy_zc {

template <class R>
static __device__ __forceinline__ void two_shot(const Args& args) {
    CUPY_ZC_SHARED(Bases, bases);
    Bases& shared = bases;
    const bool to_all = args.root == EVERY_RANK;
    const Reach written = to_all ? Reach::EVERYONE : Reach::ROOT;
    const Shape shape = {1, 1, Reach::EVERYONE, written, true};
    exchange(args, shape, [&](const Part& part) {
        const u64 line = LINE_BYTES / R::BYTES, width = part.last - part.first;
        const u64 share = ceiling(ceiling(width, args.size), line) * line;
        const u64 skip = least(width, args.rank * share);
        if (threadIdx.x < args.size) {
            const u32 rank = threadIdx.x;
            shared.source[rank] = part.input(rank, 0) + skip * R::BYTES;
            shared.target[rank] = part.output(to_all ? rank : args.root, 0) + skip * R::BYTES;
        }
        if (threadIdx.x == 0) {
            shared.sources = args.size;
            shared.targets = to_all ? args.size : 1;
        }
        __syncthreads();
        fold_all<R>(shared, least(share, width - skip));
    });
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(two_shot) { cupy_zc::two_shot<cupy_zc::Selected>(args); }
