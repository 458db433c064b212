// A barrier of all ranks: what ran before it on any rank's stream is visible to all after it.
//
// Contract
//   order     announce is a release, agree an acquire of every peer's announcement: one exchange
//   launch    one block of at least 32 threads; Args: no arrays, count 0
#include "negotiate.cuh"
#include "select.cuh"

CUPY_ZC_KERNEL(barrier) {
    using namespace cupy_zc;
    CUPY_ZC_SHARED(Places, places);
    const u64 epoch = begin(args);
    if (epoch != 0) {
        announce<true>(args, epoch, args.output_location);
        agree(args, epoch, args.output_location, places);
    }
}
