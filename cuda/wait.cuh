// Calls are numbered, waits are bounded, and the first thing that goes wrong is told to the host.
//
// Contract
//   begin     (Beginning, in its parts) gives all threads of a block the number of this call on the
//             lane (its epoch, from 1), or 0 where an earlier call failed: then the kernel returns
//             at once. The lane's state word counts calls in parts of 2^16: every block reads it,
//             and adds its share of one call when all its threads have. The shares of a grid make
//             one call exactly, so the whole part changes with the last of them, when all blocks
//             have read. The epoch lives in device memory and only kernels advance it, so replaying
//             a graph is like calling again
//   Timer     one wait of any kind. `due` is asked after each poll that found nothing. It reads the
//             clock now and then only, and says yes from PATIENCE on, or once the budget is spent
//             `lost` reads what the host says of ranks that cannot come any more: a relaxed load,
//             as no data depend on it, over the bus to the host, hence once in LOOK nanoseconds
//   Watch     one wait of a collective. `over` is asked after each poll that found nothing. When it
//             is time to ask why, it looks whether a peer announced another call, whether another
//             block already failed, and whether the host gave a rank up, which it reports as a
//             time-out of that rank; after the budget it reports a time-out, naming a rank that
//             did not announce this call where there is one, else the one waited for
//   report    the first to note the call that failed writes the record: fields, then the code,
//             which is a release at system scope. Later failures of the lane write nothing. The
//             other blocks of a call that fails still run, for their peers must hear what was
//             called
//   order     both words of the state are touched by kernels of the own rank only, but that the host
//             may set the failure for good, to shut the lane: relaxed
#pragma once

#include "ptx.cuh"

namespace cupy_zc {

constexpr u64 PATIENCE = 1000000;  // nanoseconds until a wait asks why
constexpr u32 POLLS = 64;          // polls between two looks at the clock
constexpr u64 LOOK = 1u << 20;     // nanoseconds between two looks at the memory of the host
static_assert(LOOK >= PATIENCE, "a wait that is short never looks at the memory of the host");
constexpr u32 DIRECT_BLOCKS = 40;  // a grid of more reads the state by one thread of a block only

static __device__ __forceinline__ u64* words_of(const Args& args, u32 at, u64 epoch, u32 from) {
    return reinterpret_cast<u64*>(args.lanes[at] + words_offset(epoch & 1, from));
}

static __device__ __forceinline__ u64* state_of(const Args& args) {
    return reinterpret_cast<u64*>(args.lanes[args.rank] + STATE);
}

// The number of the call that failed, 0 for none.
static __device__ __forceinline__ u64* failure_of(const Args& args) { return state_of(args) + 8; }

// What one of so many blocks adds to a count; what does not divide evenly is that of block 0.
static __device__ __forceinline__ u64 share_of(u32 block, u32 blocks) {
    const u32 one = 1u << SHARE_BITS, each = one / blocks;
    return block == 0 ? one - (blocks - 1) * each : each;
}

// A call from its first instruction on, on all threads of a block. What a kernel does between the
// parts takes no time beside them.
class Beginning {
   public:
    // The loads. By all threads it is quicker than to pass the number on, unless there are very many.
    __device__ __forceinline__ explicit Beginning(const Args& args)
        : args_(args), direct_(gridDim.x <= DIRECT_BLOCKS) {
        if (direct_ || threadIdx.x == 0) {
            failed_ = load_relaxed(failure_of(args_));
            state_ = load_relaxed(state_of(args_));
        }
    }

    __device__ __forceinline__ u64 number() const {
        CUPY_ZC_SHARED(u64, epoch);
        const u64 next = (state_ >> SHARE_BITS) + 1, number = failed_ == 0 || failed_ == next ? next : 0;
        if (direct_) {  // the host may shut the lane right now: lanes that share lines go together
            return from_last_lane(number != 0) != 0 ? next : 0;
        }
        if (threadIdx.x == 0) {
            epoch = number;
        }
        __syncthreads();
        return epoch;
    }

    // Behind `number`, where that is not 0: the call is counted.
    __device__ __forceinline__ void count() const {
        if (direct_) {
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            add_relaxed(state_of(args_), share_of(blockIdx.x, gridDim.x));
        }
    }

   private:
    const Args& args_;
    const bool direct_;
    u64 failed_ = 0;
    u64 state_ = 0;
};

static __device__ __forceinline__ u64 begin(const Args& args) {
    const Beginning beginning(args);
    const u64 epoch = beginning.number();
    beginning.count();
    return epoch;
}

// The first to claim the failure word tells the host.
static __device__ __forceinline__ void record(u64* failure, u64 error, const ErrorRecord& said) {
    if (!atomic_claim(failure, said.epoch)) {
        return;
    }
    ErrorRecord* const to = reinterpret_cast<ErrorRecord*>(error);
    to->rank = said.rank;
    to->lane = said.lane;
    to->epoch = said.epoch;
    to->detail = said.detail;
    to->mine = said.mine;
    store_release(&to->code, said.code);
}

static __device__ __forceinline__ void report(const Args& args, u64 epoch, Code code, u32 rank,
                                              u64 detail) {
    record(failure_of(args), args.error,
           {code, rank, args.lane, epoch, detail, args.fingerprint, 0});
}

// A word carries the low half of the epoch in each of its halves, so that neither order nor tearing
// of the halves matters: {data low, epoch low, data high, epoch low}.
static __device__ __forceinline__ u64 half_word(u64 data, u32 half, u64 epoch) {
    return ((data >> (32 * half)) & 0xffffffffu) | (epoch << 32);
}
static __device__ __forceinline__ bool is_of(u64 half, u64 epoch) {
    return ((half ^ (epoch << 32)) >> 32) == 0;
}
static __device__ __forceinline__ u64 whole_word(u64 low, u64 high) {
    return (low & 0xffffffffu) | (high << 32);
}

// Whether a peer announced a call of this number at all.
static __device__ __forceinline__ bool came(const Args& args, u64 epoch, u32 peer) {
    const u64* const word = words_of(args, args.rank, epoch, peer);
    return is_of(load_relaxed(word), epoch) && is_of(load_relaxed(word + 1), epoch);
}

// Whether a peer announced another call under this number. Reports it.
static __device__ __forceinline__ bool differs(const Args& args, u64 epoch, u32 peer) {
    const u64* const word = words_of(args, args.rank, epoch, peer);
    const u64 low = load_relaxed(word), high = load_relaxed(word + 1);
    const u64 theirs = whole_word(low, high);
    if (!is_of(low, epoch) || !is_of(high, epoch) || theirs == args.fingerprint) {
        return false;
    }
    report(args, epoch, CODE_MISMATCH, peer, theirs);
    return true;
}

class Timer {
   public:
    // After a poll that found nothing: true once it is time to ask why.
    __device__ __forceinline__ bool due(u64 budget) {
        spin(patient_);
        if (++polls_ % (patient_ ? 1 : POLLS) != 0) {
            return false;
        }
        const u64 now = nanoseconds();
        if (started_ == 0) {
            started_ = now;
        }
        // The timers of two multiprocessors, or a thread that moved, may differ by a little.
        waited_ = now > started_ ? now - started_ : 0;
        patient_ = patient_ || waited_ >= PATIENCE;
        return patient_ || waited_ >= budget;
    }

    __device__ __forceinline__ u64 waited() const { return waited_; }

    // Where it is due: 1 + a rank that the host gave up; 0 for none, or too soon to look.
    __device__ __forceinline__ u64 lost(u64 error) {
        const u32 look = static_cast<u32>(waited_ / LOOK);
        if (look == looked_) {
            return 0;
        }
        looked_ = look;
        return load_relaxed(&reinterpret_cast<const ErrorRecord*>(error)->abort);
    }

   private:
    u64 started_ = 0;
    u64 waited_ = 0;
    u32 looked_ = 0;
    u32 polls_ = 0;
    bool patient_ = false;
};

class Watch {
   public:
    // After a poll that found nothing: true once the wait for `peer` has failed, and is reported.
    __device__ __forceinline__ bool over(const Args& args, u64 epoch, u32 peer) {
        return over(args, epoch, [peer] { return peer; });
    }

    // The same where it takes time to find out which peer it is.
    template <class Peer>
    __device__ __forceinline__ bool over(const Args& args, u64 epoch, const Peer& peer) {
        if (!timer_.due(args.budget)) {
            return false;
        }
        if (timer_.waited() >= args.budget) {
            report(args, epoch, CODE_TIMEOUT, culprit(args, epoch, peer()), timer_.waited());
            return true;
        }
        for (u32 other = 0; other < args.size; ++other) {
            if (other != args.rank && differs(args, epoch, other)) {
                return true;
            }
        }
        if (load_relaxed(failure_of(args)) != 0) {
            return true;
        }
        const u64 lost = timer_.lost(args.error);
        if (lost != 0) {
            report(args, epoch, CODE_TIMEOUT, static_cast<u32>(lost - 1), timer_.waited());
        }
        return lost != 0;
    }

   private:
    // The peer waited for may itself be waiting: a rank that did not even come is the one to name.
    static __device__ __forceinline__ u32 culprit(const Args& args, u64 epoch, u32 peer) {
        for (u32 other = 0; other < args.size; ++other) {
            if (other != args.rank && !came(args, epoch, other)) {
                return other;
            }
        }
        return peer;
    }

    Timer timer_;
};

}  // namespace cupy_zc
