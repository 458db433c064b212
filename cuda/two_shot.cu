// All-reduce and reduce in two shots, fused: every rank reduces its slice of all inputs and stores
// the result to all outputs (reduce: to the root's).
//
// Contract
//   memory    any, registered or not on any rank, any alignment, in place or not; see exchange.cuh
//             for who stages, who waits for whom, and why reuse is safe
//   slices    see shots.cuh
//   traffic   each rank reads and writes (n - 1) / n of the array over the links
//   result    bitwise the same on all ranks: each element is reduced once, in rank order
#include "select.cuh"
#include "shots.cuh"

namespace cupy_zc {

template <class R>
static __device__ __forceinline__ void two_shot(const Args& args) {
    CUPY_ZC_SHARED(Bases, bases);
    Bases& shared = bases;
    exchange(args, two_shot_shape(args),
             [&](const Part& part) { two_shot_part<R>(args, part, shared); });
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(two_shot) { cupy_zc::two_shot<cupy_zc::Selected>(args); }
