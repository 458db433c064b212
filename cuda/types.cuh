// The values that a kernel is given, and where things are in a lane.
//
// Contract
//   Args      the one argument of every kernel; the host fills it as bytes, so its layout is fixed
//   lane      memory that every rank owns one of, at the same layout and the same offset of arena
//             0, zeroed before its first use, and mapped by all peers: call words, pads, flags,
//             low-latency buffers; and its scratch, beside it. Calls that share a lane are ordered by a stream on
//             every rank, the same calls in the same order
//   Location  where peers find an array: its arena and offset in a window, or STAGED. With the bit
//             MULTICAST where the array, all of it, is bound to the multicast object of its arena
//   windows   a table with a row for each rank, where its arenas are mapped here, and as row `size`
//             where the multicast objects of the arenas are, 0 for none
//   arrays    an array is a matrix of `count` columns and one row, or one row for each rank, rows
//             one after the other. Counts are elements, sizes and offsets are bytes
//
// Freestanding: no headers, compiles with NVRTC as C++17.
#pragma once

namespace cupy_zc {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "the host counts on these");

constexpr u32 MAX_RANKS = 8;
constexpr u32 MAX_BLOCKS = 256;
constexpr u64 SHARE_BITS = 16;   // calls, and messages, are counted in parts of 2^16
static_assert(MAX_BLOCKS <= (1u << SHARE_BITS), "every block has a share of a call");
constexpr u32 EVERY_RANK = ~0u;  // Args::root where there is no root
constexpr u64 STAGED = ~0ull;    // a Location that peers cannot reach
constexpr u64 MULTICAST = 1ull << 63;

enum Code : u32 { CODE_NONE = 0, CODE_TIMEOUT = 1, CODE_MISMATCH = 2 };

// What went wrong first on a lane; in memory that the host reads. `code` is stored last (release).
// All but `abort` is written by kernels, and that by the host alone, at any time.
struct ErrorRecord {
    u32 code;    // a Code
    u32 rank;    // the rank that was waited for, or that called something else
    u64 lane;    // Args::lane
    u64 epoch;   // the number of the call on this lane, from 1
    u64 detail;  // mismatch: the other rank's fingerprint; time-out: nanoseconds waited
    u64 mine;    // the own fingerprint of the call that failed
    u64 abort;   // 0, or 1 + a rank that cannot come any more: no wait outlives that by long
};
static_assert(sizeof(ErrorRecord) == 48, "the host reads the record as 48 bytes");

struct Args {
    u64 input;  // address of the own input and output; 0 where the rank has none
    u64 output;
    u64 input_location;  // MULTICAST or 0 | arena << 48 | offset, or STAGED
    u64 output_location;
    u64 count;        // elements of a row
    u64 fingerprint;  // of operation, element type, reduction, root, order and count
    u64 windows;      // address of u64[size + 1][arenas]: bases as mapped here
    u64 error;        // address of an ErrorRecord, zeroed by the host
    u64 lane;         // number of the lane, for the record
    u64 budget;       // nanoseconds that a wait may last
    u64 ll128_lines;  // capacity of a low-latency buffer, for each peer and parity
    u64 ll_packs;
    u64 chunk;    // bytes of a scratch buffer: a multiple of 128, 128 for each row at least
    u64 scratch;  // from a lane to its four scratch buffers, on every rank; 0: it has none
    u64 lanes[MAX_RANKS];  // address of every rank's lane as mapped here, the own one included
    u32 rank;
    u32 size;
    u32 arenas;
    u32 root;      // a rank or EVERY_RANK
    u32 element;   // bytes of an element
    u32 two_step;  // ll128: reduce-scatter and all-gather in place of one exchange
};
static_assert(sizeof(Args) == 200, "the host fills 200 bytes");
static_assert(__is_trivially_copyable(Args), "the host fills it as bytes");

// One 16-byte access: the unit in which data are moved and reduced.
struct alignas(16) Pack {
    u64 low, high;
};
static_assert(sizeof(Pack) == 16, "a pack is one vector access");

// ---- Layout of a lane. Everything that a peer writes has exactly one writer. ----

constexpr u64 WORD_BYTES = 64;    // what a rank says about a call: 3 words of 16 bytes, and padding
constexpr u64 LINE_BYTES = 128;   // LL128
constexpr u32 LINE_DATA = 120;    // of them, the others are a flag
constexpr u64 PACKET_BYTES = 32;  // LL: a pack as two packets

__device__ constexpr u64 words_offset(u64 parity, u64 from) {
    return (parity * MAX_RANKS + from) * WORD_BYTES;
}

constexpr u64 PADS = words_offset(2, 0);
__device__ constexpr u64 pad_offset(u64 from, u64 block) {
    return PADS + (from * MAX_BLOCKS + block) * 8;
}

constexpr u64 FLAGS = pad_offset(MAX_RANKS, 0);
__device__ constexpr u64 flag_offset(u64 from, u64 block) {
    return FLAGS + (from * MAX_BLOCKS + block) * 8;
}

constexpr u64 STATE = flag_offset(MAX_RANKS, 0);  // of the own lane only: calls, and a failure

// Of the barriers of multimem.cuh: a counter that all ranks add to, and one that this rank writes.
constexpr u64 ARRIVALS = STATE + 128;
__device__ constexpr u64 arrivals_offset(u64 block) { return ARRIVALS + block * 8; }
__device__ constexpr u64 expected_offset(u64 block) { return arrivals_offset(MAX_BLOCKS + block); }

constexpr u64 LL128 = 40960;
static_assert(expected_offset(MAX_BLOCKS) <= LL128, "the fixed part ends before the buffers");

// A peer's buffers do not have a place for the rank itself.
__device__ constexpr u64 seat(u32 from, u32 at) { return from < at ? from : from - 1; }

__device__ constexpr u64 ll128_offset(u32 size, u64 lines, u64 parity, u64 place) {
    return LL128 + (parity * (size - 1) + place) * lines * LINE_BYTES;
}
__device__ constexpr u64 ll_offset(u32 size, u64 lines, u64 packs, u64 parity, u64 place) {
    return ll128_offset(size, lines, 2, 0) + (parity * (size - 1) + place) * packs * PACKET_BYTES;
}

// multimem_ll.cu has places for all ranks, the same on all of them, where ll.cu has one for each
// peer: as many packs in all.
__device__ constexpr u64 multimem_packs(u32 size, u64 packs) { return packs * (size - 1) / size; }
__device__ constexpr u64 multimem_ll_offset(u32 size, u64 lines, u64 packs, u64 parity, u64 from) {
    return ll_offset(size, lines, packs, parity, 0) +
           from * multimem_packs(size, packs) * PACKET_BYTES;
}
__device__ constexpr u64 lane_bytes(u32 size, u64 lines, u64 packs) {
    return ll_offset(size, lines, packs, 2, 0);
}
static_assert(lane_bytes(2, 0, 0) == LL128, "two ranks and no buffers: the fixed part alone");
static_assert(lane_bytes(8, 2, 1) == LL128 + 2 * 7 * (256 + 32), "as the host counts it");

// Scratch: input 0, input 1, output 0, output 1. A lane gets it when a call first needs it, at one
// distance from the lane on all ranks.
static __device__ __forceinline__ u64 scratch_of(const Args& args, u32 rank, u64 which) {
    return args.lanes[rank] + args.scratch + which * args.chunk;
}

}  // namespace cupy_zc
