// An array in packs that travel as packets: how it is cut, the wait for a peer's, and the fold.
//
// Contract
//   packs     of 16 bytes of the array, the last one shorter; thread t of the grid has t, t + the
//             number of threads, ... in every loop, so the one that sends an element is the one
//             that later overwrites it
//   order     none of its own: a flag comes with its data in one word (packets.cuh)
//   result    reduced in rank order: bitwise the same on all ranks
#pragma once

#include "memory.cuh"
#include "packets.cuh"
#include "reduce.cuh"

namespace cupy_zc {

// Waits for the packets of a pack that a peer stores at `at`.
static __device__ __forceinline__ bool take_packets(const Args& args, u64 epoch, u64 flag, u32 peer,
                                                    const u64* at, Pack& pack) {
    Watch watch;
    while (!load_packets(at, flag, pack)) {
        if (watch.over(args, epoch, peer)) {
            return false;
        }
    }
    return true;
}

template <class R>
class ArrayPacks {
   public:
    __device__ __forceinline__ explicit ArrayPacks(const Args& args)
        : args_(args), units_(args.count * (R::BYTES / UNIT)) {}

    __device__ __forceinline__ u64 count() const { return (units_ + UNITS - 1) / UNITS; }
    static __device__ __forceinline__ u64 first() {
        return blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x;
    }
    static __device__ __forceinline__ u64 stride() {
        return gridDim.x * static_cast<u64>(blockDim.x);
    }
    __device__ __forceinline__ Pack load(u64 index) const {
        return load_pack<UNIT>(args_.input + index * 16, valid(index));
    }

    // Folds the own packs and those of all peers, which `take(rank, index, pack)` waits for.
    template <class Take>
    __device__ __forceinline__ void reduce(const Take& take) const {
        for (u64 i = first(); i < count(); i += stride()) {
            typename R::template Fold<> fold;
            for (u32 rank = 0; rank < args_.size; ++rank) {
                Pack pack;
                if (rank == args_.rank) {
                    pack = load(i);
                } else if (!take(rank, i, pack)) {
                    return;
                }
                if (rank == 0) {
                    fold.start(pack);
                } else {
                    fold.add(pack);
                }
            }
            store_pack<UNIT>(args_.output + i * 16, valid(i), fold.result(args_.size));
        }
    }

   private:
    static constexpr u32 UNIT = Element<typename R::E>::UNIT, UNITS = 16 / UNIT;

    __device__ __forceinline__ u32 valid(u64 index) const {
        const u64 left = units_ - index * UNITS;
        return static_cast<u32>(left < UNITS ? left : UNITS);
    }

    const Args& args_;
    const u64 units_;
};

}  // namespace cupy_zc
