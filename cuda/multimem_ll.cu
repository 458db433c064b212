// All-reduce of small messages in packets that a rank stores once, to all ranks: ll.cu through the
// switch.
//
// Contract
//   memory    any, registered or not, any alignment, in place or not. Data pass through the buffers
//             of the lane, which is bound to a multicast object by all ranks: a place for each, of
//             multimem_packs packs, in the room of the places of ll.cu
//   packets   as packets.cuh has them, their words stored one by one, so that each is whole. The
//             number of their flags is the epoch
//   agreement, reuse, in place, result   as ll.cu: nothing is read before `agree`; places are
//             double by the parity of the epoch; rank order, so the same bits on all ranks and from
//             run to run. Its packets may lie where these lie: they have the same flags for the
//             same number, in the same halves of words
//   alias     fence_alias comes after `begin`, for what was loaded from the places before, and
//             after the stores. The waits read by ordinary addresses and have none: a flag comes
//             with its data in one word, and a word stored is seen at last
#include "multimem.cuh"
#include "packet_fold.cuh"
#include "select.cuh"

namespace cupy_zc {

static __device__ __forceinline__ u64 multimem_packets(const Args& args, u64 epoch, u32 from,
                                                       u64 index) {
    return multimem_ll_offset(args.size, args.ll128_lines, args.ll_packs, epoch & 1, from) +
           index * PACKET_BYTES;
}

template <class M>
static __device__ __forceinline__ void store_packets_everywhere(const Copies& to, u64 at,
                                                                const Pack& pack, u64 flag) {
    M::store_word(to, at, half_word(pack.low, 0, flag));
    M::store_word(to, at + 8, half_word(pack.low, 1, flag));
    M::store_word(to, at + 16, half_word(pack.high, 0, flag));
    M::store_word(to, at + 24, half_word(pack.high, 1, flag));
}

template <class R, class M>
static __device__ __forceinline__ void multimem_ll(const Args& args) {
    CUPY_ZC_SHARED(Places, places);
    const u64 epoch = begin(args);
    if (epoch == 0) {
        return;
    }
    announce<false>(args, epoch, args.output_location);
    const u64 flag = packet_flag(epoch);
    const ArrayPacks<R> packs(args);
    const Copies lanes = lanes_of_all(args);
    fence_alias();
    for (u64 i = packs.first(); i < packs.count(); i += packs.stride()) {
        const u64 at = multimem_packets(args, epoch, args.rank, i);
        store_packets_everywhere<M>(lanes, at, packs.load(i), flag);
    }
    fence_alias();
    if (!agree(args, epoch, args.output_location, places)) {
        return;
    }
    packs.reduce([&](u32 rank, u64 i, Pack& pack) {
        const u64 at = args.lanes[args.rank] + multimem_packets(args, epoch, rank, i);
        return take_packets(args, epoch, flag, rank, &memory<const u64>(at), pack);
    });
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(multimem_ll) {
    using namespace cupy_zc;
    multimem_ll<Selected, CUPY_ZC_MULTIMEM>(args);
}
