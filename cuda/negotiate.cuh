// Ranks tell each other what they call and where their arrays are; and barriers between blocks.
//
// Contract
//   announce  block 0 writes this rank's three words to every peer's ring of two: fingerprint,
//             location of the input, location of the output. RELEASE makes what ran before on the
//             stream, the input, visible to the peer that sees them. Every kernel of a lane
//             announces itself, whatever its algorithm
//   agree     every block waits for the words of all peers (acquire), in its own lane. True on all
//             threads where all ranks call the same; `places` then holds all locations. False: the
//             failure is reported and the kernel must return without writing anything
//   meet      block b of this rank with block b of every other: what either wrote before is visible
//             to the other after. A pad has one writer: (epoch, step), which repeats after
//             2^40 calls
//   reuse     a rank ends a call only after it heard from every peer in that call. So a peer that
//             writes the words of call e + 2 has ended call e + 1, for which it heard from a rank
//             that had ended call e: two places, by the parity of the epoch, are enough
#pragma once

#include "wait.cuh"

namespace cupy_zc {

constexpr u64 STEP_BITS = 24;

struct Places {
    u64 input[MAX_RANKS];
    u64 output[MAX_RANKS];
};

template <bool RELEASE>
static __device__ __forceinline__ void announce(const Args& args, u64 epoch, u64 output_location) {
    const u32 peer = threadIdx.x;
    if (blockIdx.x != 0 || peer >= args.size || peer == args.rank) {
        return;
    }
    u64* const words = words_of(args, peer, epoch, args.rank);
    store_relaxed(words + 0, half_word(args.fingerprint, 0, epoch));
    store_relaxed(words + 1, half_word(args.fingerprint, 1, epoch));
    store_relaxed(words + 2, half_word(args.input_location, 0, epoch));
    store_relaxed(words + 3, half_word(args.input_location, 1, epoch));
    store_relaxed(words + 4, half_word(output_location, 0, epoch));
    if (RELEASE) {
        store_release(words + 5, half_word(output_location, 1, epoch));
    } else {
        store_relaxed(words + 5, half_word(output_location, 1, epoch));
    }
}

// In the low-latency kernels, behind what they send: nobody waits for it.
static __device__ __forceinline__ void follow_up(const Args& args, const Beginning& beginning,
                                                 u64 epoch) {
    beginning.count();
    announce<false>(args, epoch, args.output_location);
}

static __device__ __forceinline__ bool agree(const Args& args, u64 epoch, u64 output_location,
                                             Places& places) {
    const u32 peer = threadIdx.x;
    bool agreed = true;
    if (peer == args.rank) {
        places.input[peer] = args.input_location;
        places.output[peer] = output_location;
    } else if (peer < args.size) {
        const u64* const words = words_of(args, args.rank, epoch, peer);
        u64 halves[6];
        Watch watch;
        for (;;) {
            halves[5] = load_acquire(words + 5);
            bool complete = is_of(halves[5], epoch);
#pragma unroll
            for (u32 i = 0; i < 5; ++i) {
                halves[i] = load_relaxed(words + i);
                complete = complete && is_of(halves[i], epoch);
            }
            if (complete) {
                break;
            }
            if (watch.over(args, epoch, peer)) {
                agreed = false;
                break;
            }
        }
        agreed = agreed && !differs(args, epoch, peer);
        places.input[peer] = whole_word(halves[2], halves[3]);
        places.output[peer] = whole_word(halves[4], halves[5]);
    }
    return __syncthreads_and(agreed) != 0;
}

static __device__ __forceinline__ bool meet(const Args& args, u64 epoch, u64 step) {
    const u32 peer = threadIdx.x;
    const u64 arrived = (epoch << STEP_BITS) + step;
    bool met = true;
    __syncthreads();
    if (peer < args.size && peer != args.rank) {
        u64* const theirs =
            reinterpret_cast<u64*>(args.lanes[peer] + pad_offset(args.rank, blockIdx.x));
        const u64* const mine =
            reinterpret_cast<const u64*>(args.lanes[args.rank] + pad_offset(peer, blockIdx.x));
        store_release(theirs, arrived);
        Watch watch;
        // A peer is one step ahead at most. Anything else is old, however long ago: compared as
        // signed numbers, a pad would look new half a wrap, 2^39 calls, later.
        while (met && load_acquire(mine) - arrived > 1) {
            met = !watch.over(args, epoch, peer);
        }
    }
    return __syncthreads_and(met) != 0;
}

}  // namespace cupy_zc
