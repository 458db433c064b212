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
//   in place  the thread that sends an element is the one that later overwrites it
//   result    reduced in rank order by every rank: bitwise the same on all
#include "memory.cuh"
#include "negotiate.cuh"
#include "packets.cuh"
#include "select.cuh"

namespace cupy_zc {

static __device__ __forceinline__ u64* packets_of(const Args& args, u64 epoch, u32 at, u32 from,
                                                  u64 index) {
    const u64 offset =
        ll_offset(args.size, args.ll128_lines, args.ll_packs, epoch & 1, seat(from, at));
    return reinterpret_cast<u64*>(args.lanes[at] + offset + index * PACKET_BYTES);
}

static __device__ __forceinline__ bool receive(const Args& args, u64 epoch, u64 flag, u32 peer,
                                               u64 index, Pack& pack) {
    const u64* const at = packets_of(args, epoch, args.rank, peer, index);
    Watch watch;
    while (!load_packets(at, flag, pack)) {
        if (watch.over(args, epoch, peer)) {
            return false;
        }
    }
    return true;
}

template <class R>
static __device__ __forceinline__ void ll(const Args& args) {
    CUPY_ZC_SHARED(Places, places);
    constexpr u32 UNIT = Element<typename R::E>::UNIT, UNITS = 16 / UNIT;
    const u64 epoch = begin(args);
    if (epoch == 0) {
        return;
    }
    announce<false>(args, epoch, args.output_location);
    const u64 flag = packet_flag(epoch);
    const u64 units = args.count * (R::BYTES / UNIT), packs = (units + UNITS - 1) / UNITS;
    const u64 first = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x;
    const u64 stride = gridDim.x * static_cast<u64>(blockDim.x);
    auto valid = [&](u64 i) {
        return static_cast<u32>(units - i * UNITS < UNITS ? units - i * UNITS : UNITS);
    };
    for (u64 i = first; i < packs; i += stride) {
        const Pack pack = load_pack<UNIT>(args.input + i * 16, valid(i));
        for (u32 step = 1; step < args.size; ++step) {
            const u32 peer = (args.rank + step) % args.size;
            store_packets(packets_of(args, epoch, peer, args.rank, i), pack, flag);
        }
    }
    if (!agree(args, epoch, args.output_location, places)) {
        return;
    }
    for (u64 i = first; i < packs; i += stride) {
        typename R::template Fold<> fold;
        for (u32 rank = 0; rank < args.size; ++rank) {
            Pack pack;
            if (rank == args.rank) {
                pack = load_pack<UNIT>(args.input + i * 16, valid(i));
            } else if (!receive(args, epoch, flag, rank, i, pack)) {
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

CUPY_ZC_KERNEL(ll) { cupy_zc::ll<cupy_zc::Selected>(args); }
