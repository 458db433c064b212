// Reduce-scatter in one shot: rank r reduces row r of all inputs into its own output.
//
// Contract
//   memory    any, registered or not on any rank, any alignment; in place: the output may be row r
//             of the own input, which only this rank reads. See exchange.cuh for the rest
//   traffic   each rank reads (n - 1) rows over the links
//   result    in rank order, as two_shot.cu has it
#include "exchange.cuh"
#include "fold.cuh"
#include "select.cuh"

namespace cupy_zc {

template <class R>
static __device__ __forceinline__ void reduce_scatter(const Args& args) {
    CUPY_ZC_SHARED(Bases, bases);
    Bases& shared = bases;
    const Shape shape = {args.size, 1, Reach::EVERYONE, Reach::NOBODY, true};
    exchange(args, shape, [&](const Part& part) {
        if (threadIdx.x < args.size) {
            shared.source[threadIdx.x] = part.input(threadIdx.x, args.rank);
        }
        if (threadIdx.x == 0) {
            shared.target[0] = part.own(args.output, 0);
            shared.sources = args.size;
            shared.targets = 1;
        }
        __syncthreads();
        fold_all<R>(shared, part.last - part.first);
    });
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(reduce_scatter) { cupy_zc::reduce_scatter<cupy_zc::Selected>(args); }
