// Lines of 128 bytes between ranks: 120 of data and a flag of 8, stored and polled by eight lanes.
//
// Contract
//   lines     one writer each: the peer whose place it is. Eight lanes store a line in one access
//             and poll it in one; the flag, 40 bits of the epoch and 24 of the fingerprint, is in
//             the last 8 bytes. That a line arrives whole is the promise of the link that set-up
//             tests; no other order is needed, and none is given: accesses are volatile, that is
//             relaxed
//   waits     the last lane of eight sees the flag, looks at the clock, and passes its verdict on:
//             the eight take the same turn of the loop always. Threads that share a line call
//             together
//   reuse     double by the parity of the epoch, safe as in negotiate.cuh as long as a call takes
//             at least one line from every peer, which is why an empty array has a line too
//   LINE      elements of a line: 120 bytes, but 112 where elements have 16
#pragma once

#include "memory.cuh"
#include "negotiate.cuh"
#include "reduce.cuh"

namespace cupy_zc {

template <class R>
class Lines {
   public:
    // Loads and counts need no epoch; what follows `start` does.
    __device__ __forceinline__ explicit Lines(const Args& args) : args_(args) {}

    __device__ __forceinline__ void start(u64 epoch) {
        epoch_ = epoch;
        flag_ = epoch << 24 | (args_.fingerprint & 0xffffff);
    }

    __device__ __forceinline__ u64 count() const {
        return args_.count == 0 ? 1 : (args_.count + LINE - 1) / LINE;
    }

    // Which eight lanes of the grid these are.
    static __device__ __forceinline__ u64 group() {
        return (blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x) / 8;
    }
    static __device__ __forceinline__ u64 groups() {
        return gridDim.x * static_cast<u64>(blockDim.x) / 8;
    }

    // The own part of a line of the input, or to the output.
    __device__ __forceinline__ Pack load(u64 line) const {
        u64 first;
        const u32 count = units(line, first);
        return load_pack<UNIT>(args_.input + first * UNIT, count);
    }
    __device__ __forceinline__ void store(u64 line, const Pack& pack) const {
        u64 first;
        const u32 count = units(line, first);
        store_pack<UNIT>(args_.output + first * UNIT, count, pack);
    }

    __device__ __forceinline__ void send_to(u32 peer, u64 line, const Pack& pack) const {
        const Pack flagged = {pack.low, lane() == 7 ? flag_ : pack.high};
        store_line(place(peer, args_.rank, line), flagged);
    }
    __device__ __forceinline__ void send(u64 line, const Pack& pack) const {
        for (u32 i = 1; i < args_.size; ++i) {
            send_to((args_.rank + i) % args_.size, line, pack);
        }
    }

    // Waits for a line of a peer; the same answer on all eight lanes.
    __device__ __forceinline__ bool take(u32 peer, u64 line, Pack& pack) const {
        const u64* const at = place(args_.rank, peer, line);
        Watch watch;
        for (;;) {
            pack = load_line(at);
            const Verdict verdict = judge(pack.high == flag_ ? args_.size : peer, watch);
            if (verdict != AGAIN) {
                return verdict == COMPLETE;
            }
        }
    }

    // Waits for a line of every peer, all of which are polled in one turn, and folds them and the
    // own pack in the order of the ranks.
    __device__ __forceinline__ bool reduce(u64 line, Pack& pack) const {
        Pack packs[MAX_RANKS];
        Watch watch;
        for (;;) {
            u32 missing = args_.size;
#pragma unroll
            for (u32 rank = 0; rank < MAX_RANKS; ++rank) {
                packs[rank] = pack;
                if (rank < args_.size && rank != args_.rank) {
                    packs[rank] = load_line(place(args_.rank, rank, line));
                }
            }
#pragma unroll
            for (u32 rank = 0; rank < MAX_RANKS; ++rank) {
                const bool waited_for = rank < args_.size && rank != args_.rank;
                missing = waited_for && packs[rank].high != flag_ ? rank : missing;
            }
            const Verdict verdict = judge(missing, watch);
            if (verdict == COMPLETE) {
                break;
            }
            if (verdict == FAILURE) {
                return false;
            }
        }
        typename R::template Fold<> fold;
        fold.start(packs[0]);
#pragma unroll
        for (u32 rank = 1; rank < MAX_RANKS; ++rank) {
            if (rank < args_.size) {
                fold.add(packs[rank]);
            }
        }
        pack = fold.result(args_.size);
        return true;
    }

   private:
    enum Verdict : u32 { AGAIN, COMPLETE, FAILURE };

    static constexpr u32 UNIT = Element<typename R::E>::UNIT;
    static constexpr u32 LINE = 120 / R::BYTES;  // elements

    static __device__ __forceinline__ u32 lane() { return threadIdx.x % 8; }

    __device__ __forceinline__ u64* place(u32 at, u32 from, u64 line) const {
        const u64 offset = ll128_offset(args_.size, args_.ll128_lines, epoch_ & 1, seat(from, at)) +
                           line * LINE_BYTES;
        return reinterpret_cast<u64*>(args_.lanes[at] + offset);
    }

    // The parts of elements that this lane has of a line, from `first` on in the array.
    __device__ __forceinline__ u32 units(u64 line, u64& first) const {
        constexpr u64 IN_LINE = LINE * R::BYTES / UNIT;
        const u64 total = args_.count * (R::BYTES / UNIT), skip = lane() * (16 / UNIT);
        const u64 in_line = IN_LINE > skip ? IN_LINE - skip : 0;
        first = line * IN_LINE + skip;
        const u64 left = total > first ? total - first : 0;
        const u64 most = in_line < 16 / UNIT ? in_line : 16 / UNIT;
        return static_cast<u32>(left < most ? left : most);
    }

    // What the last lane, which has seen the flags, says to all eight: is a rank missing still?
    __device__ __forceinline__ Verdict judge(u32 missing, Watch& watch) const {
        Verdict verdict = missing == args_.size ? COMPLETE : AGAIN;
        if (lane() == 7 && verdict == AGAIN && watch.over(args_, epoch_, missing)) {
            verdict = FAILURE;
        }
        return static_cast<Verdict>(from_last_lane(verdict));
    }

    const Args& args_;
    u64 epoch_ = 0;
    u64 flag_ = 0;
};

}  // namespace cupy_zc
