// Between which ranks a collective sends lines with data, and the empty lines of the others.
//
// Contract
//   data      from every rank, or from the root alone; to every rank, or to the root alone
//   empty     a block sends a line without data, in the place of the first line that it handles, to
//             every peer that gets no data from this rank; and takes one from every peer that has
//             none for it. So every rank hears from every other in every call: the buffers may be
//             used again (lines.cuh), and nobody writes anything while a rank calls something
//             else. They leave with the data, so the call still takes one trip
//   blocks    block b hears from the blocks b of its peers before it writes. A block that handles
//             no line sends none and waits for none; block 0 always handles one
//   capacity  an empty line has the place of one with data: the lines of a row for each peer
#pragma once

#include "lines.cuh"

namespace cupy_zc {

template <bool FROM_ALL, bool TO_ALL>
class Route {
   public:
    u32 targets, sources;  // the peers that get data from this rank, and those that have some for it
    bool own;              // this rank's output has data of its own input

    __device__ __forceinline__ explicit Route(const Args& args) : args_(args) {
        const u32 peers = peers_of(args), root = 1u << args.root % 32;
        const bool sends = FROM_ALL || args.rank == args.root;
        const bool gets = TO_ALL || args.rank == args.root;
        targets = !sends ? 0 : TO_ALL ? peers : peers & root;
        sources = !gets ? 0 : FROM_ALL ? peers : peers & root;
        own = sends && gets;
    }

    // Every eight lanes of a block greet a peer of their own, and hear from one.
    __device__ __forceinline__ void send_empty(const Lines& lines, u64 count) const {
        const u64 line = first_group_of_block();
        const u32 peers = silent(targets);
        if (peers == 0 || line >= count) {
            return;
        }
        for (u32 peer = threadIdx.x / 8; peer < args_.size; peer += blockDim.x / 8) {
            if (holds(peers, peer)) {
                lines.send_to(peer, line, {0, 0});
            }
        }
    }

    // The same answer on all threads of a block.
    __device__ __forceinline__ bool take_empty(const Lines& lines, u64 count) const {
        const u64 line = first_group_of_block();
        const u32 peers = silent(sources);
        if (peers == 0 || line >= count) {
            return true;
        }
        bool heard = true;
        for (u32 peer = threadIdx.x / 8; peer < args_.size; peer += blockDim.x / 8) {
            if (holds(peers, peer)) {
                Pack nothing;
                heard = lines.take(peer, line, nothing) && heard;
            }
        }
        return __syncthreads_and(heard) != 0;
    }

   private:
    __device__ __forceinline__ u32 silent(u32 with_data) const {
        return FROM_ALL && TO_ALL ? 0 : peers_of(args_) & ~with_data;
    }
    static __device__ __forceinline__ u64 first_group_of_block() {
        return blockIdx.x * static_cast<u64>(blockDim.x) / 8;
    }

    const Args& args_;
};

}  // namespace cupy_zc
