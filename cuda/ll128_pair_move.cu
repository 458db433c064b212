// All-gather and all-to-all between two ranks in lines of 128 bytes (LL128), of any size: no
// barrier, no registration. ll128_pair_all_gather, ll128_pair_all_to_all.
//
// Contract
//   memory    any, registered or not, any alignment, bytes that nobody interprets; data pass through
//             the buffers of the lane. See line_pairs.cuh
//   reuse     either rank sends a line at least
//   mismatch  nothing is written before the line of the peer for it is there, so ranks that call
//             different things write nothing. The announcement is stored for those who wait longer
//             than usual; nobody waits for it
//   in place  all-gather: the input may be row r of the output. All-to-all: output is input
//   launch    two blocks fit on a multiprocessor: the more lines are under way, the better
#include "kernel.cuh"
#include "line_pairs.cuh"

namespace cupy_zc {

// The own row is loaded also where it is in place already: to ask takes registers that there are not.
template <bool EACH, u32 UNIT>
class PairMove : public PairRows<Rows<UNIT, LINE_DATA>, EACH> {
   public:
    __device__ __forceinline__ explicit PairMove(const Args& args)
        : PairRows<Rows<UNIT, LINE_DATA>, EACH>(args),
          copies_(this->rows_.input(EACH ? args.rank : 0) != this->rows_.output(args.rank)) {}

    __device__ __forceinline__ void finish(u32 line, const Pack& own, const Pack& theirs) const {
        this->rows_.store(1 - this->args_.rank, line, theirs);
        if (copies_) {
            this->rows_.store(this->args_.rank, line, own);
        }
    }

   private:
    const bool copies_;
};

template <bool EACH>
static __device__ __forceinline__ void move_between_two(const Args& args) {
    if ((args.input | args.output | args.count * args.element) % 4 == 0) {
        pass_lines<PairMove<EACH, 4>>(args);
    } else {
        pass_lines<PairMove<EACH, 1>>(args);
    }
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL_OF(ll128_pair_all_gather, cupy_zc::Args, 2) {
    cupy_zc::move_between_two<false>(args);
}
CUPY_ZC_KERNEL_OF(ll128_pair_all_to_all, cupy_zc::Args, 2) {
    cupy_zc::move_between_two<true>(args);
}
