// Lines of 128 bytes between ranks: 120 of data and a flag of 8, stored and loaded by eight lanes.
//
// Contract
//   lines     one writer each: the peer whose place it is. Eight lanes store a line in one access,
//             and load it in one; the flag, 40 bits of the epoch and 24 of the fingerprint plus the
//             turn, is in the last 8 bytes. What is asked of link and memory, and tested at set-up:
//             what one access loads is no older than the flag it loads. No other order is needed,
//             and none is given: accesses are relaxed
//   waits     eight lanes poll a line as a whole. The last of them finds the flag, looks at the
//             clock, and passes its verdict on: they take the same turn of the loop always, and have
//             the data with the turn that finds the flag
//   groups    threads that share a line call together. The four groups of a warp may be at
//             different places: the masks of ptx.cuh name the lanes of one group each
//   reuse     double by the parity of the epoch, safe as in negotiate.cuh as long as a call takes
//             at least one line from every peer, which is why an empty row has a line too, and why
//             ranks without data for each other exchange empty lines (line_routes.cuh)
#pragma once

#include "negotiate.cuh"
#include "peers.cuh"

namespace cupy_zc {

// Which eight lanes of the grid these are, and how many eights there are.
static __device__ __forceinline__ u64 line_group() {
    return (blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x) / 8;
}
static __device__ __forceinline__ u64 line_groups() {
    return gridDim.x * static_cast<u64>(blockDim.x) / 8;
}

class Lines {
   public:
    __device__ __forceinline__ Lines(const Args& args, u64 epoch)
        : args_(args),
          epoch_(epoch),
          flag_(epoch << 24 | (args_.fingerprint & 0xffffff)),
          parity_(static_cast<u32>(epoch) & 1) {}

    // The same with the flags of a later turn, of lines that have the places of earlier ones.
    __device__ __forceinline__ Lines of_turn(u32 turn) const {
        Lines lines = *this;
        lines.flag_ = epoch_ << 24 | ((args_.fingerprint + turn) & 0xffffff);
        return lines;
    }

    __device__ __forceinline__ void send_to(u32 peer, u64 line, const Pack& pack) const {
        meet_mates();
        store(peer, line, pack);
    }
    __device__ __forceinline__ void send(u64 line, const Pack& pack) const {
        meet_mates();
        for (u32 i = 1; i < args_.size; ++i) {
            store(neighbour(args_, i), line, pack);
        }
    }
    // To each of `peers` its own; packs are in the order in which they are served.
    __device__ __forceinline__ void send_each(u32 peers, u64 line,
                                              const Pack (&packs)[MAX_RANKS]) const {
        meet_mates();
#pragma unroll
        for (u32 i = 1; i < MAX_RANKS; ++i) {
            const u32 peer = neighbour(args_, i);
            if (i < args_.size && holds(peers, peer)) {
                store(peer, line, packs[i]);
            }
        }
    }

    // Waits for a line of a peer; the same answer on all eight lanes.
    __device__ __forceinline__ bool take(u32 peer, u64 line, Pack& pack) const {
        const u64* const from = place(args_.rank, peer, line);
        Watch watch;
        Verdict verdict;
        meet_mates();
        do {
            pack = load_line(from);
            verdict = judge(is_old(pack) ? peer : args_.size, watch);
        } while (verdict == AGAIN);
        return verdict == COMPLETE;
    }

    // Waits for a line of every one of `peers`, all of which are polled in one turn. The packs of
    // other ranks stay as they are.
    __device__ __forceinline__ bool collect(u32 peers, u64 line, Pack (&packs)[MAX_RANKS]) const {
        Watch watch;
        Verdict verdict;
        meet_mates();
        do {
#pragma unroll
            for (u32 rank = 0; rank < MAX_RANKS; ++rank) {
                if (holds(peers, rank)) {
                    packs[rank] = load_line(place(args_.rank, rank, line));
                }
            }
            u32 missing = args_.size;
#pragma unroll
            for (u32 rank = 0; rank < MAX_RANKS; ++rank) {
                missing = holds(peers, rank) && is_old(packs[rank]) ? rank : missing;
            }
            verdict = judge(missing, watch);
        } while (verdict == AGAIN);
        return verdict == COMPLETE;
    }

   private:
    enum Verdict : u32 { AGAIN, COMPLETE, FAILURE };

    static __device__ __forceinline__ bool last() { return line_lane() == 7; }

    // What the last lane loaded has the flag; the others cannot say.
    __device__ __forceinline__ bool is_old(const Pack& pack) const {
        return last() && pack.high != flag_;
    }

    __device__ __forceinline__ void store(u32 peer, u64 line, const Pack& pack) const {
        const Pack flagged = {pack.low, last() ? flag_ : pack.high};
        store_line(place(peer, args_.rank, line), flagged);
    }

    // Lines of a lane have numbers of 32 bits, which take fewer instructions; and those count.
    __device__ __forceinline__ u64* place(u32 at, u32 from, u32 line) const {
        const u32 lines = static_cast<u32>(args_.ll128_lines);
        const u32 buffer = parity_ * (args_.size - 1) + static_cast<u32>(seat(from, at));
        const u64 offset = ll128_offset(args_.size, 0, 0, 0) + (buffer * lines + line) * LINE_BYTES;
        return reinterpret_cast<u64*>(args_.lanes[at] + offset);
    }

    // What the last lane, which has seen the flags, says to all eight: is a rank missing still?
    __device__ __forceinline__ Verdict judge(u32 missing, Watch& watch) const {
        Verdict verdict = missing == args_.size ? COMPLETE : AGAIN;
        if (last() && verdict == AGAIN && watch.over(args_, epoch_, missing)) {
            verdict = FAILURE;
        }
        return static_cast<Verdict>(from_last_lane(verdict));
    }

    const Args& args_;
    const u64 epoch_;
    u64 flag_;
    const u32 parity_;
};

}  // namespace cupy_zc
