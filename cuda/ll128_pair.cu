// Reductions between two ranks in lines of 128 bytes (LL128), of any size: no barrier, no
// registration. ll128_pair_all_reduce, and ll128_pair_reduce_scatter, which reduces row r into the
// output of rank r.
//
// Contract
//   memory    any, registered or not, any alignment; data pass through the buffers of the lane. See
//             line_pairs.cuh
//   reuse     either rank sends a line at least
//   mismatch  nothing is written before the line of the peer for it is there, so ranks that call
//             different things write nothing. The announcement is stored for those who wait longer
//             than usual; nobody waits for it
//   in place  all-reduce: output is input. Reduce-scatter: the output may be row r of the own input
//   result    in rank order, as ll128.cu has it: the same bits on both ranks
//   launch    two blocks fit on a multiprocessor: the more lines are under way, the better
#include "line_fold.cuh"
#include "line_pairs.cuh"
#include "select.cuh"

namespace cupy_zc {

template <class R, bool SCATTER>
class PairReduce : public PairRows<ElementRows<R>, SCATTER> {
   public:
    using PairRows<ElementRows<R>, SCATTER>::PairRows;

    __device__ __forceinline__ void finish(u32 line, const Pack& own, const Pack& theirs) const {
        this->rows_.store(0, line, fold_two<R>(this->args_, own, theirs));
    }
};

template <class R>
static __device__ __forceinline__ void ll128_pair_all_reduce(const Args& args) {
    pass_lines<PairReduce<R, false>>(args);
}
template <class R>
static __device__ __forceinline__ void ll128_pair_reduce_scatter(const Args& args) {
    pass_lines<PairReduce<R, true>>(args);
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL_OF(ll128_pair_all_reduce, cupy_zc::Args, 2) {
    cupy_zc::ll128_pair_all_reduce<cupy_zc::Selected>(args);
}
CUPY_ZC_KERNEL_OF(ll128_pair_reduce_scatter, cupy_zc::Args, 2) {
    cupy_zc::ll128_pair_reduce_scatter<cupy_zc::Selected>(args);
}
