// One end of a channel of mail.cuh, as one block sees it: where things are, and what it waits for.
//
// Contract
//   number    of a message on its channel, from 1: the order of the launches on either side. It
//             lives in device memory, in shares as the state of a lane (wait.cuh): a block adds its
//             own when it leaves, and nobody waits for that. So replaying a graph is like calling
//             again
//   taken     tells the pusher what letters it may write over: those of the messages before the one
//             that a drain begins with, which all blocks of earlier launches are done with
//   flag      of a header, which is a packet: that of the number, see packets.cuh. A line of data has
//             the number itself in its last 8 bytes; for lines, see lines.cuh
//   until     one wait, by any threads of a block; they must come together afterwards. It fails,
//             and all has been reported, where it lasts and the mail of this rank has failed, or
//             the peer refused a message, and where the budget is spent: then the peer is named.
//             Where the host gave a rank up, it fails as if that one had spent the budget
//   greet     waits for the header of the message, and gives the number of blocks that push it, or
//             0. One that is not expected is reported, and refused: the peer finds that out when it
//             waits, or calls again, and reports it too
//   failure   the first one ends the mail of the whole rank: later calls return at once, and touch
//             no memory of a peer. The host sets it, too, where graphs outlive the communicator
//   order     the words of a Desk that one peer writes are relaxed, except `refused`, and the
//             counters of slots, which mail.cu uses; the own Progress is ordered by the streams
#pragma once

#include "mail.cuh"
#include "memory.cuh"
#include "packets.cuh"

namespace cupy_zc {

class Channel {
   public:
    const MailPart& part;
    const bool push;  // which end
    const u32 block;

    __device__ __forceinline__ Channel(const MailArgs& args, bool push, u32 block)
        : part(push ? args.push : args.drain), push(push), block(block), args_(args) {
        over_ = load_relaxed(&memory<Area>(args_.area).failure) != 0;
        number_ = (load_relaxed(&progress().messages) >> SHARE_BITS) + 1;
    }

    // Whether the mail had failed when this thread began; others may have seen something else.
    __device__ __forceinline__ bool is_over() const { return over_; }

    // By a drain. The peer's memory may be gone where the mail is over.
    __device__ __forceinline__ void tell_what_is_taken() const {
        if (!push && block == 0 && threadIdx.x == 0 && !over_) {
            store_relaxed(&theirs().taken, number_ - 1);
        }
    }

    // False where the mail failed before, or the peer refused something.
    __device__ __forceinline__ bool alive() const {
        const u64 failure = load_relaxed(&memory<Area>(args_.area).failure);
        const u64 trouble = load_relaxed(&mine().refused);
        if (failure != 0 || trouble == 0) {
            return failure == 0;
        }
        const u64 refused = load_acquire(&mine().refused);
        report(CODE_MISMATCH, peer(), refused, load_relaxed(&mine().expected),
               load_relaxed(&mine().sent));
        return false;
    }

    template <class Ready>
    __device__ __forceinline__ bool until(const Ready& ready) const {
        Timer timer;
        while (!ready()) {
            if (over(timer)) {
                return false;
            }
        }
        return true;
    }
    // The first wait of a call. The loads of the first poll and those of `alive` travel together.
    template <class Ready>
    __device__ __forceinline__ bool alive_until(const Ready& ready) const {
        const bool at_once = ready();
        return alive() && (at_once || until(ready));
    }

    __device__ __forceinline__ bool letter_is_free() const {
        return load_relaxed(&mine().taken) + args_.letters >= number_;
    }
    __device__ __forceinline__ void send_header() const {
        const u64 blocks = part.blocks;
        store_packets(letter(), {part.fingerprint, part.bytes | blocks << BLOCKS_SHIFT}, flag());
    }
    __device__ __forceinline__ u32 greet() const {
        Pack header;
        if (!alive_until([&] { return load_packets(letter(), flag(), header); })) {
            return 0;
        }
        const u64 bytes = header.high & ((1ull << BLOCKS_SHIFT) - 1);
        if (header.low == part.fingerprint && bytes == part.bytes) {
            return static_cast<u32>(header.high >> BLOCKS_SHIFT);
        }
        store_relaxed(&theirs().expected, part.fingerprint);
        store_relaxed(&theirs().sent, header.low);
        store_release(&theirs().refused, number_);
        report(CODE_MISMATCH, peer(), number_, header.low, part.fingerprint);
        return 0;
    }

    // The start of a push through slots, by one thread of each block.
    __device__ __forceinline__ bool start() const {
        if (block != 0) {
            return alive();
        }
        const bool good = alive_until([&] { return letter_is_free(); });
        if (good) {
            send_header();
        }
        return good;
    }

    // A line of the data of a letter, by eight lanes together; the same answer on all of them.
    __device__ __forceinline__ void send(u32 line, const Pack& pack) const {
        meet_mates();
        store_line(place(line), {pack.low, line_lane() == 7 ? number_ : pack.high});
    }
    __device__ __forceinline__ bool take(u32 line, Pack& pack) const {
        enum : u32 { AGAIN, COMPLETE, FAILURE };
        const u64* const from = place(line);
        Timer timer;
        u32 verdict = AGAIN;
        meet_mates();
        do {
            pack = load_line(from);
            if (line_lane() == 7) {
                verdict = pack.high == number_ ? COMPLETE : over(timer) ? FAILURE : AGAIN;
            }
            verdict = from_last_lane(verdict);
        } while (verdict == AGAIN);
        return verdict == COMPLETE;
    }

    // Of the own block: slots passed in earlier messages; what the other side counts, and how far
    // this one may be ahead of it; what this side counts, at the other.
    __device__ __forceinline__ u64& passed() const { return progress().slots[block]; }
    __device__ __forceinline__ const u64* gate() const {
        return push ? &mine().drained[block] : &mine().filled[block];
    }
    __device__ __forceinline__ u64 lead() const { return push ? args_.slots : 0; }
    __device__ __forceinline__ u64* post() const {
        return push ? &theirs().filled[block] : &theirs().drained[block];
    }
    __device__ __forceinline__ u64 slot(u64 index) const {
        const u64 place = block * static_cast<u64>(args_.slots) + (index & (args_.slots - 1));
        return base() + args_.letters * letter_bytes(args_.letter) + place * args_.slot;
    }

    // By one thread of every block that passed the message, after all of the block have.
    __device__ __forceinline__ void leave() const {
        add_relaxed(&progress().messages, share_of(block, part.blocks));
    }

   private:
    __device__ __forceinline__ u32 peer() const { return static_cast<u32>(part.peer); }
    __device__ __forceinline__ Desk& mine() const { return memory<Area>(args_.area).desks[peer()]; }
    __device__ __forceinline__ Desk& theirs() const {
        return memory<Area>(part.area).desks[args_.rank];
    }
    __device__ __forceinline__ Progress& progress() const {
        return push ? mine().push : mine().drain;
    }

    // After a poll that found nothing: true once the wait has failed, and is reported.
    __device__ __forceinline__ bool over(Timer& timer) const {
        if (!timer.due(args_.budget)) {
            return false;
        }
        if (!alive()) {
            return true;
        }
        const u64 lost = timer.lost(args_.error);
        if (lost != 0 || timer.waited() >= args_.budget) {
            const u32 rank = lost == 0 ? peer() : static_cast<u32>(lost - 1);
            report(CODE_TIMEOUT, rank, number_, timer.waited(), part.fingerprint);
            return true;
        }
        return false;
    }

    // The channel is in the memory of the rank that drains it.
    __device__ __forceinline__ u64 base() const {
        const u64 place = push ? seat(args_.rank, peer()) : seat(peer(), args_.rank);
        return (push ? part.area : args_.area) + sizeof(Area) +
               place * channel_bytes(args_.letter, args_.letters, args_.slot, args_.slots,
                                     args_.tracks);
    }
    __device__ __forceinline__ u64* letter() const {
        return &memory<u64>(base() + (number_ & (args_.letters - 1)) * letter_bytes(args_.letter));
    }
    __device__ __forceinline__ u64* place(u32 line) const {  // behind the header
        return letter() + (line + 1) * (LINE_BYTES / 8);
    }
    __device__ __forceinline__ u64 flag() const { return packet_flag(number_); }

    __device__ __forceinline__ void report(Code code, u32 rank, u64 number, u64 detail,
                                           u64 mine) const {
        u64* const failure = &memory<Area>(args_.area).failure;
        record(failure, args_.error, {code, rank, args_.lane, number, detail, mine, 0});
    }

    const MailArgs& args_;
    u64 number_;
    bool over_;
};

}  // namespace cupy_zc
