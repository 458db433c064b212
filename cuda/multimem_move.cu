// all_gather and broadcast through the switch: a rank stores what it has once, to all outputs.
//
// Contract
//   memory    outputs at one place on all ranks, bound to a multicast object by all of them; inputs
//             are read by their own rank only: any memory, any alignment. Otherwise, the ranks,
//             which have told each other, take the way of push.cu. Nothing is interpreted
//   edges     what comes before the first pack of a row and after its last is copied to the ranks
//             one by one, by block 0
//   in place  all_gather: the input may be row r of the output; broadcast: output is input at the
//             root. Each byte of that is written by the thread that read it, with itself
//   order     fence_alias comes after `agree`, by which everybody has done with the outputs, and
//             before the last meeting, which nobody leaves before all ranks have stored
//   traffic   a rank gives its row once, and takes all rows, its own included
#include "multimem.cuh"
#include "pushes.cuh"
#include "select.cuh"

namespace cupy_zc {

// A row of `bytes` to all copies, 16 bytes at a time; loads are of UNIT where it is not aligned as
// the copies are.
template <class M, u32 UNIT>
static __device__ __forceinline__ void store_packs(const Copies& to, const Packs& packs,
                                                   u64 input) {
    packs.pass(
        0, packs.count,
        [&](u64 at) {
            if constexpr (UNIT == 16) {
                return memory<const Pack>(input + at);
            } else {
                return load_pack<UNIT>(input + at, 16 / UNIT);
            }
        },
        [&](u64 at, const Pack& pack) { M::store(to, at, pack); });
}

// The own input becomes the row that starts `row` bytes after the outputs.
template <class M>
static __device__ __forceinline__ void store_everywhere(const Args& args, const Places& places,
                                                        Bases& bases, u64 row) {
    if (threadIdx.x < args.size) {
        bases.target[threadIdx.x] =
            address_of(args, threadIdx.x, places.output[threadIdx.x]) + row;
    }
    __syncthreads();
    const u64 input = args.input, bytes = args.count * args.element;
    const Copies to = {bases.target, address_of(args, args.size, places.output[0]) + row,
                       args.size};
    const Packs packs(places.output[0] + row, bytes);
    fence_alias();
    if ((input + packs.head) % 16 == 0) {
        store_packs<M, 16>(to, packs, input);
    } else if ((input + packs.head) % 4 == 0) {
        store_packs<M, 4>(to, packs, input);
    } else {
        store_packs<M, 1>(to, packs, input);
    }
    for (u32 rank = 0; blockIdx.x == 0 && rank < args.size; ++rank) {
        const u64 target = bases.target[rank];
        copy(target, input, packs.head);
        copy(target + packs.end(), input + packs.end(), bytes - packs.end());
    }
    fence_alias();
}

template <class M, bool GATHER>
static __device__ __forceinline__ void multimem_move(const Args& args) {
    CUPY_ZC_SHARED(Places, places);
    CUPY_ZC_SHARED(Bases, bases);
    Bases& shared = bases;
    const Shape shape = GATHER ? all_gather_shape(args) : broadcast_shape();
    const u64 epoch = negotiate(args, shape, places);
    if (epoch == 0) {
        return;
    }
    if (!everywhere(args, places.output)) {
        exchange_agreed(args, shape, epoch, places, [&](const Part& part) {
            GATHER ? push_all_gather(args, part) : push_broadcast(args, part);
        });
        return;
    }
    if (GATHER || args.rank == args.root) {
        const u64 row = GATHER ? args.rank * args.count * args.element : 0;
        store_everywhere<M>(args, places, shared, row);
    }
    multimem_meet<M>(args, epoch);
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(multimem_all_gather) {
    using namespace cupy_zc;
    multimem_move<CUPY_ZC_MULTIMEM, true>(args);
}
CUPY_ZC_KERNEL(multimem_broadcast) {
    using namespace cupy_zc;
    multimem_move<CUPY_ZC_MULTIMEM, false>(args);
}
