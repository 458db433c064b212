// Trying multicast out at set-up: one store to the copies of all ranks, and one load of their sum.
//
// Contract
//   at        in a multicast mapping, aligned to 16 bytes, of which the first 4 are the word; the
//             others are overwritten as well. Nobody else accesses them
//   launch    one thread
//   order     none between the two, or between ranks: each rank waits for its kernel on the host,
//             and then for the others. The fences are for the copies that are reached by ordinary
//             addresses before and after
#include "ptx_multimem.cuh"

extern "C" __global__ void multimem_probe_store(cupy_zc::u64 at, cupy_zc::u64 word) {
    cupy_zc::fence_alias();
    cupy_zc::multimem_store(at, {word, 0});
    cupy_zc::fence_alias();
}

extern "C" __global__ void multimem_probe_reduce(cupy_zc::u64 at, cupy_zc::u64* sum) {
    cupy_zc::fence_alias();
    *sum = cupy_zc::ld_reduce_add_u32(at).low & 0xffffffff;
}
