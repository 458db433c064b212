// The frame of every kernel with barriers: negotiate, then one pass, or a loop over chunks.
//
// Contract
//   frame     `negotiate`, then `exchange_agreed`; `exchange` is both. A kernel that has a better
//             way for what the ranks agreed on takes it in between
//   who       a rank whose array peers must reach is registered (they use its window) or STAGED
//             (they use its scratch). If any rank is staged, all follow the same loop over chunks:
//             the number of chunks depends on what all ranks know, never on local state
//   blocks    block b of every rank handles the same columns of a chunk: it fills the scratch that
//             block b of the others reads, and empties what they filled. So block b waits for the
//             blocks b of its peers only
//   order     fill(0) MEET { work(c) fill(c + 1) MEET empty(c) }...; with nobody staged: work MEET.
//             A first meet is not needed there: the words of `agree` are released and acquired
//   reuse     scratch is double. Input c % 2 is filled again, for c + 2, after a meet that the
//             peers reach once they have done work(c); output c % 2 is written again by work(c + 2)
//             after a meet that this block reaches once it has done empty(c). Nobody leaves the
//             kernel before all peers have read its input and written its output: the last meet
//   in place  work reads an element from all ranks before it writes it, and no other thread of any
//             rank touches it
#pragma once

#include "memory.cuh"
#include "negotiate.cuh"

namespace cupy_zc {

enum class Reach { NOBODY, ROOT, EVERYONE };

struct Shape {
    u32 input_rows;
    u32 output_rows;
    Reach read;        // whose inputs peers read
    Reach written;     // whose outputs peers write
    bool output_kept;  // false: this rank's output goes through scratch whatever its location
};

// Where a registered array of any rank starts, as mapped here; of rank `size`: where the array of
// all ranks does that have it there.
static __device__ __forceinline__ u64 address_of(const Args& args, u32 rank, u64 location) {
    const u64 arena = (location & ~MULTICAST) >> 48;
    const u64 window = memory<const u64>(args.windows + (rank * args.arenas + arena) * 8);
    return window + (location & ((1ull << 48) - 1));
}

// The columns [first, last) of one chunk that one block handles, and where they are.
struct Part {
    const Args& args;
    const Places& places;
    u64 chunk_first;  // first column of the chunk
    u64 pitch;        // columns of a row in scratch
    u64 parity;       // of the chunk
    u64 first, last;

    __device__ __forceinline__ u64 bytes() const { return (last - first) * args.element; }

    // Addresses of column `first` in a row, as peers see them.
    __device__ __forceinline__ u64 input(u32 rank, u64 row) const {
        return at(rank, places.input[rank], 0, row);
    }
    __device__ __forceinline__ u64 output(u32 rank, u64 row) const {
        return at(rank, places.output[rank], 2, row);
    }
    // The own array itself, registered or not.
    __device__ __forceinline__ u64 own(u64 base, u64 row) const {
        return base + (row * args.count + first) * args.element;
    }
    __device__ __forceinline__ u64 scratch(u32 rank, u64 which, u64 row) const {
        return scratch_of(args, rank, which + parity) +
               (row * pitch + first - chunk_first) * args.element;
    }

   private:
    __device__ __forceinline__ u64 at(u32 rank, u64 location, u64 which, u64 row) const {
        if (location == STAGED) {
            return scratch(rank, which, row);
        }
        return own(address_of(args, rank, location), row);
    }
};

static __device__ __forceinline__ bool reached(const Args& args, Reach reach, u32 rank) {
    return reach == Reach::EVERYONE || (reach == Reach::ROOT && rank == args.root);
}

// A block has the same columns of scratch in every chunk, the short last one included: otherwise it
// could fill what another block still reads.
static __device__ __forceinline__ Part part_of(const Args& args, const Places& places, u64 chunk,
                                               u64 columns) {
    const u64 start = chunk * columns, width = least(columns, args.count - start);
    const u64 line = LINE_BYTES / args.element;
    const u64 share = ceiling(ceiling(columns, gridDim.x), line) * line;
    const u64 skip = least(width, blockIdx.x * share);
    const u64 last = least(width, skip + share);
    return {args, places, start, columns, chunk & 1, start + skip, start + last};
}

static __device__ __forceinline__ bool is_staged(const Args& args, const u64* locations,
                                                 Reach reach, u32 rank) {
    return locations[rank] == STAGED && reached(args, reach, rank);
}
static __device__ __forceinline__ bool any_staged(const Args& args, const u64* locations,
                                                  Reach reach) {
    bool staged = false;
    for (u32 rank = 0; rank < args.size; ++rank) {
        staged = staged || is_staged(args, locations, reach, rank);
    }
    return staged;
}

// The number of the call, once all ranks agree on it and `places` has what they said; 0: return.
static __device__ __forceinline__ u64 negotiate(const Args& args, const Shape& shape,
                                                Places& places) {
    const u64 epoch = begin(args);
    if (epoch == 0) {
        return 0;
    }
    const u64 output_location = shape.output_kept ? args.output_location : STAGED;
    announce<true>(args, epoch, output_location);
    return agree(args, epoch, output_location, places) ? epoch : 0;
}

// The loop over chunks; in shared memory, as registers are wanted elsewhere.
struct Course {
    u64 columns;  // of a chunk
    u64 chunks;
    bool staged, fills, empties;
};

static __device__ __forceinline__ void lay_out(const Args& args, const Shape& shape,
                                               const Places& places, Course& course) {
    const u64 rows = shape.input_rows > shape.output_rows ? shape.input_rows : shape.output_rows;
    const u64 fitting = args.chunk / (rows * LINE_BYTES) * (LINE_BYTES / args.element);
    const bool staged = any_staged(args, places.input, shape.read) ||
                        any_staged(args, places.output, shape.written);
    course.columns = staged ? fitting : args.count;
    course.chunks = staged && args.count > 0 ? ceiling(args.count, fitting) : 1;
    course.staged = staged;
    course.fills = is_staged(args, places.input, shape.read, args.rank);
    course.empties = is_staged(args, places.output, shape.written, args.rank);
}

template <class Work>
static __device__ __forceinline__ void exchange_agreed(const Args& args, const Shape& shape,
                                                       u64 epoch, const Places& places,
                                                       const Work& work) {
    CUPY_ZC_SHARED(Course, course);
    const Course& shared = course;
    if (threadIdx.x == 0) {
        lay_out(args, shape, places, course);
    }
    __syncthreads();
    auto fill = [&](u64 chunk) {
        const Part part = part_of(args, places, chunk, shared.columns);
        for (u32 row = 0; shared.fills && row < shape.input_rows; ++row) {
            copy(part.scratch(args.rank, 0, row), part.own(args.input, row), part.bytes());
        }
    };
    auto empty = [&](u64 chunk) {
        const Part part = part_of(args, places, chunk, shared.columns);
        for (u32 row = 0; shared.empties && row < shape.output_rows; ++row) {
            copy(part.own(args.output, row), part.scratch(args.rank, 2, row), part.bytes());
        }
    };
    u64 step = 0;
    if (shared.staged) {
        fill(0);
        if (!meet(args, epoch, ++step)) {
            return;
        }
    }
    for (u64 chunk = 0; chunk < shared.chunks; ++chunk) {
        work(part_of(args, places, chunk, shared.columns));
        if (chunk + 1 < shared.chunks) {
            fill(chunk + 1);
        }
        if (!meet(args, epoch, ++step)) {
            return;
        }
        empty(chunk);
    }
}

template <class Work>
static __device__ __forceinline__ void exchange(const Args& args, const Shape& shape,
                                                const Work& work) {
    CUPY_ZC_SHARED(Places, places);
    const u64 epoch = negotiate(args, shape, places);
    if (epoch != 0) {
        exchange_agreed(args, shape, epoch, places, work);
    }
}

}  // namespace cupy_zc
