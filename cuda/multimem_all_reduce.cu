// All-reduce through the switch: every rank reduces its slice of all inputs by one load a pack, and
// stores the result to all outputs by one store.
//
// Contract
//   memory    inputs and outputs each at one place on all ranks, bound to a multicast object by all
//             of them, and equal modulo 16. Otherwise, any memory at all: then the ranks, which
//             have told each other, take the shots of shots.cuh
//   slices    rank r handles a run of the packs, its blocks share them. What comes before the first
//             pack and after the last is folded over the links, by block 0 of the last rank alone
//   in place  output is input: the thread that stores an element is the one that had it reduced,
//             and no other thread of any rank touches it
//   order     fence_alias comes after `agree`, by which all inputs are visible, and before the last
//             meeting, which nobody leaves before all ranks have stored; see multimem.cuh
//   traffic   (n + 1) / n of the array in each direction, 2 (n - 1) / n without the switch
//   result    the same bits on all ranks, but sums of floats not from run to run
#include "multimem.cuh"
#include "select.cuh"
#include "shots.cuh"

namespace cupy_zc {

template <class R, class M>
static __device__ __forceinline__ void reduce_everywhere(const Args& args, const Places& places,
                                                         Bases& bases) {
    using P = PartsOf<R>;
    if (threadIdx.x < args.size) {
        bases.source[threadIdx.x] = address_of(args, threadIdx.x, places.input[threadIdx.x]);
        bases.target[threadIdx.x] = address_of(args, threadIdx.x, places.output[threadIdx.x]);
    }
    if (threadIdx.x == 0) {
        bases.sources = bases.targets = args.size;
    }
    __syncthreads();
    const Copies from = {bases.source, address_of(args, args.size, places.input[0]), args.size};
    const Copies to = {bases.target, address_of(args, args.size, places.output[0]), args.size};
    const u64 bytes = args.count * R::BYTES;
    const Packs packs(places.input[0], bytes);
    const u64 line = LINE_BYTES / 16;
    const u64 share = ceiling(ceiling(packs.count, args.size), line) * line;
    const u64 first = least(packs.count, args.rank * share);
    fence_alias();
    packs.pass(
        first, least(packs.count, first + share),
        [&](u64 at) { return M::template reduce<P>(from, at); },
        [&](u64 at, const Pack& pack) { M::store(to, at, pack); });
    if (blockIdx.x == 0 && args.rank == args.size - 1) {
        fold_elements<P>(bases, 0, packs.head / P::BYTES);
        fold_elements<P>(bases, packs.end() / P::BYTES, bytes / P::BYTES);
    }
    fence_alias();
}

template <class R, class M>
static __device__ __forceinline__ void multimem_all_reduce(const Args& args) {
    CUPY_ZC_SHARED(Places, places);
    CUPY_ZC_SHARED(Bases, bases);
    Bases& shared = bases;
    const Shape shape = two_shot_shape(args);
    const u64 epoch = negotiate(args, shape, places);
    if (epoch == 0) {
        return;
    }
    if (!everywhere(args, places.input) || !everywhere(args, places.output) ||
        (places.input[0] - places.output[0]) % 16 != 0) {
        exchange_agreed(args, shape, epoch, places,
                        [&](const Part& part) { two_shot_part<R>(args, part, shared); });
        return;
    }
    reduce_everywhere<R, M>(args, places, shared);
    multimem_meet<M>(args, epoch);
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(multimem_all_reduce) {
    using namespace cupy_zc;
    multimem_all_reduce<Selected, CUPY_ZC_MULTIMEM>(args);
}
