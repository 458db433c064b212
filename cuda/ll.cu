// All-reduce of small messages in 16-byte packets, for links that do not promise whole lines.
//
// Contract
//   memory    any, registered or not, any alignment, in place or not; the buffers of the lane hold
//             ceil(bytes / 16) packs for each peer, as two packets each
//   packets   see packets.cuh; the number of their flags is the epoch
//   agreement packets are sent first, but nothing is read before `agree`: the flag has no room for
//             the fingerprint, and ranks that call different things must write nothing
//   reuse     double by the parity of the epoch, as in negotiate.cuh. A flag repeats after 2^32 - 1
//             calls on one lane, and in the same buffer after twice that: a packet last written
//             exactly that many calls ago would be taken for new
//   in place, result   see packet_fold.cuh; every rank reduces all
#include "negotiate.cuh"
#include "packet_fold.cuh"
#include "select.cuh"

namespace cupy_zc {

static __device__ __forceinline__ u64* packets_of(const Args& args, u64 epoch, u32 at, u32 from,
                                                  u64 index) {
    const u64 offset =
        ll_offset(args.size, args.ll128_lines, args.ll_packs, epoch & 1, seat(from, at));
    return reinterpret_cast<u64*>(args.lanes[at] + offset + index * PACKET_BYTES);
}

template <class R>
static __device__ __forceinline__ void ll(const Args& args) {
    CUPY_ZC_SHARED(Places, places);
    const u64 epoch = begin(args);
    if (epoch == 0) {
        return;
    }
    announce<false>(args, epoch, args.output_location);
    const u64 flag = packet_flag(epoch);
    const ArrayPacks<R> packs(args);
    for (u64 i = packs.first(); i < packs.count(); i += packs.stride()) {
        const Pack pack = packs.load(i);
        for (u32 step = 1; step < args.size; ++step) {
            const u32 peer = (args.rank + step) % args.size;
            store_packets(packets_of(args, epoch, peer, args.rank, i), pack, flag);
        }
    }
    if (!agree(args, epoch, args.output_location, places)) {
        return;
    }
    packs.reduce([&](u32 rank, u64 i, Pack& pack) {
        const u64* const at = packets_of(args, epoch, args.rank, rank, i);
        return take_packets(args, epoch, flag, rank, at, pack);
    });
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(ll) { cupy_zc::ll<cupy_zc::Selected>(args); }
