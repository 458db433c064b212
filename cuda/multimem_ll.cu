// All-reduce of small messages in packets that a rank stores once, to all ranks: ll.cu through the
// switch.
//
// Contract
//   memory    any, registered or not, any alignment, in place or not. Data pass through the buffers
//             of the lane, which is bound to a multicast object by all ranks: a place for each, of
//             multimem_packs packs, in the room of the places of ll.cu
//   packets   as packets.cuh has them, their words stored one by one, so that each is whole. The
//             number in their flags is the epoch
//   agreement, reuse, in place, result   as ll.cu: nothing is read before `agree`; places are
//             double by the parity of the epoch; rank order, so the same bits on all ranks and from
//             run to run. Its packets may lie where these lie: flags are in the same halves of
//             words, and of other epochs
//   alias     fence_alias comes after `begin`, for what was loaded from the places before, and
//             after the stores. The waits read by ordinary addresses and have none: a flag comes
//             with its data in one word, and a word stored is seen at last
#include "memory.cuh"
#include "multimem.cuh"
#include "packets.cuh"
#include "select.cuh"

namespace cupy_zc {

static __device__ __forceinline__ u64 multimem_packets(const Args& args, u64 epoch, u32 from,
                                                       u64 index) {
    return multimem_ll_offset(args.size, args.ll128_lines, args.ll_packs, epoch & 1, from) +
           index * PACKET_BYTES;
}

template <class M>
static __device__ __forceinline__ void store_packets_everywhere(const Copies& to, u64 at,
                                                                const Pack& pack, u64 epoch) {
    M::store_word(to, at, half_word(pack.low, 0, epoch));
    M::store_word(to, at + 8, half_word(pack.low, 1, epoch));
    M::store_word(to, at + 16, half_word(pack.high, 0, epoch));
    M::store_word(to, at + 24, half_word(pack.high, 1, epoch));
}

static __device__ __forceinline__ bool take_packets(const Args& args, u64 epoch, u32 peer,
                                                    u64 index, Pack& pack) {
    const u64 at = args.lanes[args.rank] + multimem_packets(args, epoch, peer, index);
    Watch watch;
    while (!load_packets(&memory<const u64>(at), epoch, pack)) {
        if (watch.over(args, epoch, peer)) {
            return false;
        }
    }
    return true;
}

template <class R, class M>
static __device__ __forceinline__ void multimem_ll(const Args& args) {
    CUPY_ZC_SHARED(Places, places);
    constexpr u32 UNIT = Element<typename R::E>::UNIT, UNITS = 16 / UNIT;
    const u64 epoch = begin(args);
    if (epoch == 0) {
        return;
    }
    announce<false>(args, epoch, args.output_location);
    const u64 units = args.count * (R::BYTES / UNIT), packs = (units + UNITS - 1) / UNITS;
    const u64 first = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x;
    const u64 stride = gridDim.x * static_cast<u64>(blockDim.x);
    auto valid = [&](u64 i) {
        return static_cast<u32>(units - i * UNITS < UNITS ? units - i * UNITS : UNITS);
    };
    const Copies lanes = lanes_of_all(args);
    fence_alias();
    for (u64 i = first; i < packs; i += stride) {
        const Pack pack = load_pack<UNIT>(args.input + i * 16, valid(i));
        const u64 at = multimem_packets(args, epoch, args.rank, i);
        store_packets_everywhere<M>(lanes, at, pack, epoch);
    }
    fence_alias();
    if (!agree(args, epoch, args.output_location, places)) {
        return;
    }
    for (u64 i = first; i < packs; i += stride) {
        typename R::template Fold<> fold;
        for (u32 rank = 0; rank < args.size; ++rank) {
            Pack pack;
            if (rank == args.rank) {
                pack = load_pack<UNIT>(args.input + i * 16, valid(i));
            } else if (!take_packets(args, epoch, rank, i, pack)) {
                return;
            }
            if (rank == 0) {
                fold.start(pack);
            } else {
                fold.add(pack);
            }
        }
        store_pack<UNIT>(args.output + i * 16, valid(i), fold.result(args.size));
    }
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(multimem_ll) {
    using namespace cupy_zc;
    multimem_ll<Selected, CUPY_ZC_MULTIMEM>(args);
}
