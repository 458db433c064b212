// Lines between two ranks, sent and taken side by side, any number of them.
//
// Contract
//   rounds    line i is passed in round i / line_groups() by group i % line_groups() of either rank:
//             grids are alike, for the plan is. A group sends the line of round n + 1 before it takes
//             that of round n, so that the link is busy while it waits and stores
//   ring      round n has place n % ROUNDS of its group, in the buffer for the one peer, and turn
//             n / ROUNDS is in the flag: no line is taken for that of another turn. Capacity: the
//             lines of a row, or ROUNDS for each group
//   reuse     in a call: who has the peer's line of round n knows that the peer took the own line of
//             round n - 2 before it sent that one. What comes next is the own line of round n + 2,
//             over that of round n - 2: hence ROUNDS. A store does not overtake the load of the flag
//             that the branch before it needs. Between calls: as in lines.cuh
//   Work      PairRows and a `finish` that stores the result of a line: `load` gives this lane's part
//             of what is sent, `own` what of this rank goes with the peer's line, before that is
//             there. The lane that stores a part is the one that loaded it, two rounds ahead at most:
//             outputs may be inputs, part by part
#pragma once

#include "line_rows.cuh"

namespace cupy_zc {

constexpr u32 AHEAD = 1;  // rounds that are sent before one is taken
constexpr u32 ROUNDS = 4;
static_assert(ROUNDS >= 2 * AHEAD + 2, "a line is written over when its taker is known to have it");

class Ring {
   public:
    __device__ __forceinline__ Ring(const Args& args, u64 epoch)
        : lines_(args, epoch), peer_(1 - args.rank) {}

    __device__ __forceinline__ void send(u32 round, const Pack& pack) const {
        lines_.of_turn(round / ROUNDS).send_to(peer_, place(round), pack);
    }
    __device__ __forceinline__ bool take(u32 round, Pack& pack) const {
        return lines_.of_turn(round / ROUNDS).take(peer_, place(round), pack);
    }

   private:
    static __device__ __forceinline__ u32 place(u32 round) {
        return round % ROUNDS * static_cast<u32>(line_groups()) + static_cast<u32>(line_group());
    }

    const Lines lines_;
    const u32 peer_;
};

// EACH: the input has a row for each rank, of which the peer gets its own.
template <class RowsOf, bool EACH>
class PairRows {
   public:
    __device__ __forceinline__ explicit PairRows(const Args& args) : args_(args), rows_(args) {}

    __device__ __forceinline__ u64 lines() const { return rows_.lines(); }
    __device__ __forceinline__ Pack load(u32 line) const {
        return rows_.load(EACH ? 1 - args_.rank : 0, line);
    }
    __device__ __forceinline__ Pack own(u32 line, const Pack& sent) const {
        return EACH ? rows_.load(args_.rank, line) : sent;
    }

   protected:
    const Args& args_;
    const RowsOf rows_;
};

// `Work` is made before the number of the call is known, and loads the first line.
template <class Work>
static __device__ __forceinline__ void pass_lines(const Args& args) {
    const Beginning beginning(args);
    const Work work(args);
    const u32 groups = static_cast<u32>(line_groups()), group = static_cast<u32>(line_group());
    const u32 count = static_cast<u32>(work.lines());
    Pack sent = {0, 0}, next = {0, 0}, after = {0, 0};
    if (group < count) {
        sent = work.load(group);
    }
    const u64 epoch = beginning.number();
    if (epoch == 0) {
        return;
    }
    const Ring ring(args, epoch);
    if (group < count) {
        ring.send(0, sent);
    }
    follow_up(args, beginning, epoch);
    if (group + groups < count) {
        next = work.load(group + groups);
    }
    for (u32 line = group, round = 0; line < count; line += groups, ++round) {
        if (line + groups < count) {
            ring.send(round + AHEAD, next);
        }
        if (line + 2 * groups < count) {
            after = work.load(line + 2 * groups);
        }
        const Pack own = work.own(line, sent);
        Pack theirs;
        if (!ring.take(round, theirs)) {
            return;
        }
        work.finish(line, own, theirs);
        sent = next;
        next = after;
    }
    if (group < count) {  // a line of the peer was here: from the same block of that
        let_next_kernel_start();
    }
}

}  // namespace cupy_zc
