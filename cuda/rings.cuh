// Rings of slots through which blocks send pieces of arrays to blocks of other ranks, by stores.
//
// Contract
//   pairs     blocks 2q and 2q + 1 are pair q: the sender and the receiver. The sender of a pair
//             serves the receivers of the same pair on all peers. The last block of an odd grid is
//             idle
//   ring      DEPTH slots for each peer and pair, in the scratch of the receiving rank, for which
//             the algorithm has no other use. Where it is follows from size, grid and chunk, which
//             all ranks share. One writer: the sender. Piece n is in slot n % DEPTH
//   flags     (epoch, number) in a word that one block of one rank writes: a sender's is the number
//             of pieces it stored, a receiver's the number of slots it emptied. The number counts
//             modulo 2^24, and neither is ever DEPTH ahead of what the other waits for: no array is
//             too long. Flags of former calls have other epochs, so nothing is reset; an epoch
//             repeats after 2^40 calls
//   own       OWN: a receiver also waits for the sender of its own pair, in its own lane, as what it
//             overwrites may be the input. That one is DEPTH ahead of the peer's receiver at most,
//             which waits for the peer's sender, which is DEPTH ahead of this receiver at most
//   signal    all that the block stored or loaded before comes before it (barrier, release); what
//             the partner blocks do after `await` comes after (acquire, barrier). So a receiver
//             sees the whole piece, and a sender overwrites no slot that is still being read
//   reuse     of scratch by the next call, whatever its algorithm: a rank's scratch is written by
//             that rank, or by peers once `agree` told them that it is in the same call. It enters
//             a call when its kernel of the call before has ended, hence when its receivers have
//             emptied all slots, for which they awaited every piece that peers stored. Here, no
//             scratch is written or read before `agree`, so the same holds for the call before.
//             No flag comes late either: each is awaited before the block that reads it returns,
//             and signals that nobody waits for are left out
#pragma once

#include "exchange.cuh"

namespace cupy_zc {

constexpr u64 DEPTH = 4;
constexpr u64 NUMBER_BITS = 24;
static_assert(2 * DEPTH <= (1ull << (NUMBER_BITS - 1)), "a number says which of two is ahead");

static __device__ __forceinline__ u64 pairs() { return gridDim.x / 2; }
static __device__ __forceinline__ u64 pair() { return blockIdx.x / 2; }
static __device__ __forceinline__ bool sends() { return blockIdx.x % 2 == 0; }

// Bytes of a slot; 0 where there are no pairs, no peers, or too little scratch, or none.
static __device__ __forceinline__ u64 slot_bytes(const Args& args) {
    const u64 slots = (args.size - 1) * pairs() * DEPTH;
    return slots == 0 || args.scratch == 0 ? 0 : 4 * args.chunk / slots / LINE_BYTES * LINE_BYTES;
}

static __device__ __forceinline__ u64 slot_of(const Args& args, u32 at, u32 from, u64 piece) {
    const u64 ring = seat(from, at) * pairs() + pair();
    return scratch_of(args, at, 0) +
           (ring * DEPTH + piece % DEPTH) * slot_bytes(args);
}

class Flags {
   public:
    __device__ __forceinline__ Flags(const Args& args, u64 epoch) : args_(args), epoch_(epoch) {}

    // Tells the partner blocks of all peers that this block is done with `number` pieces; and its
    // own partner, if OWN.
    template <bool OWN = false>
    __device__ __forceinline__ void signal(u64 number) const {
        const u32 peer = threadIdx.x;
        __syncthreads();
        if (peer < args_.size && (OWN || peer != args_.rank)) {
            store_release(flag(peer, args_.rank, blockIdx.x),
                          epoch_ << NUMBER_BITS | (number & NUMBERS));
        }
    }

    // Waits until the partner blocks of all peers, and the own one if OWN, are done with `number`
    // pieces; the same answer on all threads.
    template <bool OWN = false>
    __device__ __forceinline__ bool await(u64 number) const {
        const u32 peer = threadIdx.x;
        bool done = true;
        if (peer < args_.size && (OWN || peer != args_.rank)) {
            const u64* const mine = flag(args_.rank, peer, blockIdx.x ^ 1u);
            const u64 most = peer == args_.rank ? 2 * DEPTH : DEPTH;
            Watch watch;
            while (done && !counts(load_acquire(mine), number, most)) {
                done = !watch.over(args_, epoch_, peer);
            }
        }
        return __syncthreads_and(done) != 0;
    }

   private:
    static constexpr u64 NUMBERS = (1ull << NUMBER_BITS) - 1;

    __device__ __forceinline__ u64* flag(u32 at, u32 from, u32 block) const {
        return reinterpret_cast<u64*>(args_.lanes[at] + flag_offset(from, block));
    }
    // Whether a flag says `number`, or less than `most` beyond.
    __device__ __forceinline__ bool counts(u64 value, u64 number, u64 most) const {
        const bool of_this_call = (value ^ (epoch_ << NUMBER_BITS)) <= NUMBERS;
        return of_this_call && ((value - number) & NUMBERS) < most;
    }

    const Args& args_;
    const u64 epoch_;
};

}  // namespace cupy_zc
