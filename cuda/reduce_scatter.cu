// Reduce-scatter in one shot: rank r reduces row r of all inputs into its own output.
//
// Contract
//   memory    any, registered or not on any rank, any alignment; in place: the output may be row r
//             of the own input, which only this rank reads. See exchange.cuh for the rest
//   traffic   each rank reads (n - 1) rows over the links
//   result    in rank order, as two_shot.cu has it
#include "select.cuh"
#include "shots.cuh"

namespace cupy_zc {

template <class R>
static __device__ __forceinline__ void reduce_scatter(const Args& args) {
    CUPY_ZC_SHARED(Bases, bases);
    Bases& shared = bases;
    exchange(args, reduce_scatter_shape(args),
             [&](const Part& part) { reduce_scatter_part<R>(args, part, shared); });
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(reduce_scatter) { cupy_zc::reduce_scatter<cupy_zc::Selected>(args); }
