// Reduce-scatter through the switch: rank r reduces row r of all inputs by one load a pack, into
// its own output.
//
// Contract
//   memory    inputs at one place on all ranks, bound to a multicast object by all of them; the
//             output is touched by its own rank only and may be any memory, at any alignment.
//             Otherwise, the ranks, which have told each other, take the shot of shots.cuh
//   edges     what comes before the first pack of a row and after its last is folded over the
//             links, by block 0
//   in place  the output may be row r of the own input, which only this rank reads: the thread that
//             stores an element is the one that had it reduced
//   order     as multimem_all_reduce.cu; nobody leaves before all ranks have read its input
//   traffic   each rank takes a row, and gives n to the switch
//   result    as multimem_all_reduce.cu
#include "multimem.cuh"
#include "select.cuh"
#include "shots.cuh"

namespace cupy_zc {

template <class R, class M>
static __device__ __forceinline__ void reduce_row_everywhere(const Args& args, const Places& places,
                                                             Bases& bases) {
    using P = PartsOf<R>;
    const u64 bytes = args.count * R::BYTES, row = args.rank * bytes, output = args.output;
    if (threadIdx.x < args.size) {
        bases.source[threadIdx.x] = address_of(args, threadIdx.x, places.input[threadIdx.x]) + row;
    }
    if (threadIdx.x == 0) {
        bases.target[0] = output;
        bases.sources = args.size;
        bases.targets = 1;
    }
    __syncthreads();
    const Copies from = {bases.source, address_of(args, args.size, places.input[0]) + row,
                         args.size};
    const Packs packs(places.input[0] + row, bytes);
    const bool aligned = (output + packs.head) % 16 == 0;
    fence_alias();
    packs.pass(
        0, packs.count, [&](u64 at) { return M::template reduce<P>(from, at); },
        [&](u64 at, const Pack& pack) {
            if (aligned) {
                memory<Pack>(output + at) = pack;
            } else {
                store_pack<P::BYTES>(output + at, 16 / P::BYTES, pack);
            }
        });
    if (blockIdx.x == 0) {
        fold_elements<P>(bases, 0, packs.head / P::BYTES);
        fold_elements<P>(bases, packs.end() / P::BYTES, bytes / P::BYTES);
    }
    fence_alias();
}

template <class R, class M>
static __device__ __forceinline__ void multimem_reduce_scatter(const Args& args) {
    CUPY_ZC_SHARED(Places, places);
    CUPY_ZC_SHARED(Bases, bases);
    Bases& shared = bases;
    const Shape shape = reduce_scatter_shape(args);
    const u64 epoch = negotiate(args, shape, places);
    if (epoch == 0) {
        return;
    }
    if (!everywhere(args, places.input)) {
        exchange_agreed(args, shape, epoch, places,
                        [&](const Part& part) { reduce_scatter_part<R>(args, part, shared); });
        return;
    }
    reduce_row_everywhere<R, M>(args, places, shared);
    multimem_meet<M>(args, epoch);
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(multimem_reduce_scatter) {
    using namespace cupy_zc;
    multimem_reduce_scatter<Selected, CUPY_ZC_MULTIMEM>(args);
}
