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

// EACH: the input has a row for each rank.
template <bool EACH, u32 UNIT>
class PairMove {
   public:
    __device__ __forceinline__ explicit PairMove(const Args& args)
        : args_(args),
          rows_(args),
          copies_(rows_.input(EACH ? args.rank : 0) != rows_.output(args.rank)) {}

    __device__ __forceinline__ u64 lines() const { return rows_.lines(); }
    __device__ __forceinline__ Pack load(u32 line) const {
        return rows_.load(EACH ? 1 - args_.rank : 0, line);
    }
    // Loaded also where it is in place already: to ask takes registers that there are not.
    __device__ __forceinline__ Pack own(u32 line, const Pack& sent) const {
        return EACH ? rows_.load(args_.rank, line) : sent;
    }
    __device__ __forceinline__ void finish(u32 line, const Pack& own, const Pack& theirs) const {
        rows_.store(1 - args_.rank, line, theirs);
        if (copies_) {
            rows_.store(args_.rank, line, own);
        }
    }

   private:
    const Args& args_;
    const Rows<UNIT, 120> rows_;
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
