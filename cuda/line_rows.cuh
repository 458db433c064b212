// Rows of arrays cut into lines, and the rows for all peers sent.
//
// Contract
//   DATA      bytes of a row in a line: 120, but 112 where elements have 16. Line i has those from
//             i * DATA on, lane l of eight the 16 from 16 * l on. The same on all ranks
//   UNIT      bytes of the parts in which this rank reads and writes its arrays, whose addresses
//             and rows are multiples of it. A matter of this rank alone
//   in place  a part of a row is loaded and stored by the same lane of the grid always, whatever
//             the row: a lane may overwrite what it has sent
#pragma once

#include "lines.cuh"
#include "memory.cuh"

namespace cupy_zc {

template <u32 UNIT, u32 DATA>
class Rows {
    static_assert(DATA <= LINE_BYTES - 8 && DATA % UNIT == 0, "the flag has the last 8 bytes");
    static_assert(DATA == 112 || DATA == 120, "the last of eight lanes has no word, or one");

   public:
    __device__ __forceinline__ explicit Rows(const Args& args)
        : args_(args), bytes_(args.count * args.element) {
        full_ = (args.input | args.output | bytes_) % 8 == 0 ? bytes_ / DATA : 0;
    }

    // Lines of a row: an empty one has a line as well.
    __device__ __forceinline__ u64 lines() const {
        return bytes_ == 0 ? 1 : (bytes_ + DATA - 1) / DATA;
    }

    __device__ __forceinline__ u64 input(u32 row) const { return args_.input + row * bytes_; }
    __device__ __forceinline__ u64 output(u32 row) const { return args_.output + row * bytes_; }

    // This lane's part of a line.
    __device__ __forceinline__ Pack load(u32 row, u64 line) const {
        if (line < full_) {
            return load_full(row, line);
        }
        return load_pack<UNIT>(input(row) + first(line), units(line));
    }
    __device__ __forceinline__ void store(u32 row, u64 line, const Pack& pack) const {
        if (line < full_) {
            store_full(row, line, pack);
        } else {
            store_pack<UNIT>(output(row) + first(line), units(line), pack);
        }
    }

    // Of the row for each of `peers`, in the order in which they are served. All are loaded before
    // the first is sent, for a load takes longer than all the stores.
    __device__ __forceinline__ void load_each(u32 peers, u64 line, Pack (&packs)[MAX_RANKS]) const {
#pragma unroll
        for (u32 i = 1; i < MAX_RANKS; ++i) {
            const u32 peer = neighbour(args_, i);
            if (i < args_.size && holds(peers, peer)) {
                packs[i] = load(peer, line);
            }
        }
    }

    // The row for each of `peers`; `packs` are of this group's first line, loaded already.
    __device__ __forceinline__ void send_each(const Lines& to, u32 peers,
                                              Pack (&packs)[MAX_RANKS]) const {
        const u64 group = line_group();
        for (u64 line = group; line < lines(); line += line_groups()) {
            if (line != group) {
                load_each(peers, line, packs);
            }
            to.send_each(peers, line, packs);
        }
    }

   private:
    // Of a line that is known to be full.
    __device__ __forceinline__ Pack load_full(u32 row, u64 line) const {
        const u64 from = input(row) + first(line);
        Pack pack = {0, 0};
        if (has_low()) {
            pack.low = memory<const u64>(from);
        }
        if (has_high()) {
            pack.high = memory<const u64>(from + 8);
        }
        return pack;
    }
    __device__ __forceinline__ void store_full(u32 row, u64 line, const Pack& pack) const {
        const u64 to = output(row) + first(line);
        if (has_low()) {
            memory<u64>(to) = pack.low;
        }
        if (has_high()) {
            memory<u64>(to + 8) = pack.high;
        }
    }

    // Whether the line has data in the halves of this lane's part.
    static __device__ __forceinline__ bool has_low() { return DATA > 112 || line_lane() != 7; }
    static __device__ __forceinline__ bool has_high() { return line_lane() != 7; }

    static __device__ __forceinline__ u64 first(u64 line) { return line * DATA + line_lane() * 16; }
    __device__ __forceinline__ u32 units(u64 line) const {
        const u32 skip = line_lane() * 16, in_line = DATA > skip ? DATA - skip : 0;
        const u64 left = bytes_ > first(line) ? bytes_ - first(line) : 0;
        const u32 most = in_line < 16 ? in_line : 16;
        return (left < most ? static_cast<u32>(left) : most) / UNIT;
    }

    const Args& args_;
    const u64 bytes_;
    u64 full_;  // the first lines of a row, which lanes read and write by whole words
};

}  // namespace cupy_zc
