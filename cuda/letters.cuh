// Letters: messages that fit in one, pushed and drained by the blocks of a launch.
//
// Contract
//   letters   every message takes the next letter of its channel: a header of {fingerprint, bytes
//             and blocks} and, where the data fit, the data, in lines (lines.cuh): one way over the
//             link. Any number of blocks may push it, and any number drain it; each of these looks at
//             the header before it writes: a message that is not expected writes nothing
//   reuse     the pusher is at most `letters` ahead of `taken`: all blocks that drained a message up
//             to there had the data of all lines that they read. Each came with its flag, so no later
//             line can be what they saw
#pragma once

#include "channel.cuh"

namespace cupy_zc {

// This lane's part of a line, of which the last one may have less, or none.
struct LinePart {
    u64 address;
    u32 bytes;

    __device__ __forceinline__ LinePart(const MailPart& part, u32 line) {
        const u64 at = static_cast<u64>(line) * LINE_DATA + line_lane() * 16;
        const u64 left = part.bytes > at ? part.bytes - at : 0;
        const u32 most = line_lane() == 7 ? 8 : 16;
        address = part.array + at;
        bytes = left < most ? static_cast<u32>(left) : most;
    }
    __device__ __forceinline__ Pack load() const { return load_pack<1>(address, bytes); }
    __device__ __forceinline__ void store(const Pack& pack) const {
        store_pack<1>(address, bytes, pack);
    }
};

// The lines of a letter that this block passes: its chunk. Numbers of 32 bits, as registers are few.
static __device__ __forceinline__ u32 first_line(const Channel& channel) {
    return channel.block * (channel.part.chunk / LINE_DATA);
}
static __device__ __forceinline__ u32 end_of_lines(const Channel& channel) {
    const u32 all = (static_cast<u32>(channel.part.bytes) + LINE_DATA - 1) / LINE_DATA;
    const u32 end = first_line(channel) + channel.part.chunk / LINE_DATA;
    return end < all ? end : all;
}

static __device__ __forceinline__ void push_letter(const Channel& channel) {
    const u32 end = end_of_lines(channel);
    u32 line = first_line(channel) + threadIdx.x / 8;
    Pack pack = {0, 0};
    if (line < end) {
        pack = LinePart(channel.part, line).load();  // its way is not longer than that of the words
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
    while (line < end) {
        channel.send(line, pack);
        line += blockDim.x / 8;
        if (line < end) {
            pack = LinePart(channel.part, line).load();
        }
    }
    if (threadIdx.x == 0) {
        channel.leave();
    }
}

static __device__ __forceinline__ void drain_letter(const Channel& channel) {
    const u32 end = end_of_lines(channel);
    u32 line = first_line(channel) + threadIdx.x / 8;
    Pack pack = {0, 0};
    // One lane looks at the header; those that share a line with it go its way.
    const bool expected =
        !channel.is_over() && (threadIdx.x != blockDim.x - 1 || channel.greet() != 0);
    bool good = from_last_lane(expected) != 0;
    good = good && (line >= end || channel.take(line, pack));
    if (!__syncthreads_and(good)) {
        return;
    }
    while (good && line < end) {
        LinePart(channel.part, line).store(pack);
        line += blockDim.x / 8;
        good = line >= end || channel.take(line, pack);
    }
    if (__syncthreads_and(good) && threadIdx.x == 0) {
        channel.leave();
    }
}

}  // namespace cupy_zc
