// Letters: messages that fit in one, pushed and drained by the blocks of a launch.
//
// Contract
//   letters   every message takes the next letter of its channel: a header of {fingerprint, bytes
//             and blocks} and, where the data fit, the data, in packets: one way over the link. Any
//             number of blocks may push it, and any number drain it; each of these looks at the
//             header before it writes: a message that is not expected writes nothing
//   reuse     the pusher is at most `letters` ahead of `taken`, which the last block to leave stores
//             when all blocks have the values of all packets that they read: they have compared the
//             flags in them, so no later packet can be what they saw
#pragma once

#include "channel.cuh"

namespace cupy_zc {

static __device__ __forceinline__ u32 bytes_of_pack(u64 bytes, u64 index) {
    return static_cast<u32>(bytes - index * 16 < 16 ? bytes - index * 16 : 16);
}

static __device__ __forceinline__ Pack load_part(const MailPart& part, u64 index) {
    return load_pack<1>(part.array + index * 16, bytes_of_pack(part.bytes, index));
}

// The packs of a letter that this block passes: its chunk. Numbers of 32 bits, as registers are few.
static __device__ __forceinline__ u32 first_pack(const Channel& channel) {
    return channel.block * (channel.part.chunk / 16);
}
static __device__ __forceinline__ u32 end_of_packs(const Channel& channel) {
    const u32 all = (static_cast<u32>(channel.part.bytes) + 15) / 16;
    const u32 end = first_pack(channel) + channel.part.chunk / 16;
    return end < all ? end : all;
}

static __device__ __forceinline__ void push_letter(const Channel& channel) {
    const MailPart& part = channel.part;
    const u32 end = end_of_packs(channel);
    u32 i = first_pack(channel) + threadIdx.x;
    Pack pack = {0, 0};
    if (i < end) {
        pack = load_part(part, i);  // its way is not longer than that of the words
    }
    bool good = true;
    if (threadIdx.x == 0) {
        good = channel.alive_until([&] { return channel.letter_is_free(); });
    }
    if (!__syncthreads_and(good)) {
        return;
    }
    if (channel.block == 0 && threadIdx.x == blockDim.x - 1) {
        channel.send_header();
    }
    while (i < end) {
        channel.send(i, pack);
        i += blockDim.x;
        if (i < end) {
            pack = load_part(part, i);
        }
    }
    if (threadIdx.x == 0) {
        channel.leave();
    }
}

static __device__ __forceinline__ void drain_letter(const Channel& channel) {
    const MailPart& part = channel.part;
    const u32 end = end_of_packs(channel);
    u32 i = first_pack(channel) + threadIdx.x;
    Pack pack = {0, 0};
    bool good = threadIdx.x != blockDim.x - 1 || channel.greet() != 0;
    good = good && (i >= end || channel.take(i, pack));
    if (!__syncthreads_and(good)) {
        return;
    }
    while (good && i < end) {
        store_pack<1>(part.array + i * 16, bytes_of_pack(part.bytes, i), pack);
        i += blockDim.x;
        good = i >= end || channel.take(i, pack);
    }
    if (__syncthreads_and(good) && threadIdx.x == 0) {
        channel.leave();
    }
}

}  // namespace cupy_zc
