// The values that the mail kernel is given, and where things are in a mail area.
//
// Contract
//   MailArgs  the one argument of the kernel; the host fills it as bytes, so its layout is fixed
//   area      memory that every rank owns one of, at the same layout, zeroed before its first use,
//             and mapped by all peers: an Area, then one channel for each peer
//   channel   what one rank pushes to another, in the memory of the one that drains it. A channel
//             has letters, one for each message in turn: its header and, of a small message, its
//             data; and slots for the data of large ones. Slots come in tracks: the block of a
//             track fills, or drains, its slots alone. How many tracks a message takes, the pusher
//             says in the header: a push that waits for its peer shall leave room for other kernels
//   Desk      what a rank knows of one peer. Its three parts have different writers; nobody else
//             writes to them
//   launch    one-dimensional, of push.blocks + drain.blocks blocks, all resident at once. A multiple
//             of 32 threads up to 512. The number of threads, and of the blocks that pass a letter,
//             may differ from rank to rank; letter, slot, letters, slots and tracks may not
#pragma once

#include "types.cuh"

namespace cupy_zc {

constexpr u32 MAX_TRACKS = 64;
constexpr u32 BLOCKS_SHIFT = 48;  // of the blocks of a push, above its bytes, in a header
constexpr u64 LEAST_CHUNK = 8192;
constexpr u64 FINE = 65536;

struct MailPart {
    u64 array;        // address of what to push, or of where to drain to: any alignment
    u64 bytes;        // of it: less than 2^48
    u64 fingerprint;  // of all that both sides must agree on: element type, order, count
    u64 area;         // address of the peer's mail area as mapped here
    u64 peer;         // another rank than the own one
    u32 blocks;       // that pass it; 0 where the launch does not push, or does not drain. A drain of
                      // slots has one for every track that a push of so many bytes may take
    u32 chunk;        // bytes that a block passes at a time: see chunk_of; of a letter, all that it
                      // passes, a multiple of LINE_DATA
};
static_assert(sizeof(MailPart) == 48, "the host fills 48 bytes");
static_assert(MAX_TRACKS < (1ull << (64 - BLOCKS_SHIFT)), "a header has room for any number");

struct MailArgs {
    MailPart push, drain;  // their arrays do not overlap: neither part waits for the other
    u64 area;              // address of the own mail area
    u64 error;             // address of an ErrorRecord, zeroed by the host; one for each area
    u64 lane;              // a number for the record
    u64 budget;            // nanoseconds that a wait may last
    u64 letter;            // bytes of data that a letter holds: less than 4 GiB, and 0 where links do
                           // not keep lines whole
    u64 slot;              // bytes of a slot: a multiple of 128, less than 4 GiB
    u32 letters;           // of a channel: a power of two
    u32 slots;             // of a track: a power of two
    u32 tracks;            // of a channel: MAX_TRACKS at most
    u32 rank;
};
static_assert(sizeof(MailArgs) == 160, "the host fills 160 bytes");
static_assert(__is_trivially_copyable(MailArgs), "the host fills it as bytes");

// How far the own rank has come on a channel. Only its own kernels touch it.
struct Progress {
    u64 messages;  // passed so far, in parts of 2^16
    u64 reserved[15];
    u64 slots[MAX_TRACKS];  // passed so far
};

struct Desk {
    // Written by the peer, which drains what this rank pushes.
    u64 taken;     // messages whose letter may be written over
    u64 refused;   // the number of a message that it did not expect, stored last
    u64 expected;  // and the fingerprint that it expected
    u64 sent;      // in place of the one that the message had
    u64 unused[12];
    u64 drained[MAX_TRACKS];  // slots
    // Written by the peer, which pushes to this rank.
    u64 filled[MAX_TRACKS];  // slots
    // Written by this rank.
    Progress push, drain;
};
static_assert(sizeof(Desk) == 2432, "parts with different writers share no line of 128 bytes");

struct Area {
    u64 failure;  // not 0 once something went wrong. Only the own rank touches it
    u64 reserved[15];
    Desk desks[MAX_RANKS];
};
static_assert(sizeof(Area) == 19584, "the host adds 19584 bytes to those of the channels");

__device__ constexpr u64 letter_bytes(u64 letter) {
    return LINE_BYTES * (1 + (letter + LINE_DATA - 1) / LINE_DATA);  // the header has a line, too
}
__device__ constexpr u64 channel_bytes(u64 letter, u64 letters, u64 slot, u64 slots, u64 tracks) {
    return letters * letter_bytes(letter) + tracks * slots * slot;
}
__device__ constexpr u64 mail_bytes(u32 size, u64 letter, u64 letters, u64 slot, u64 slots,
                                    u64 tracks) {
    return sizeof(Area) + (size - 1) * channel_bytes(letter, letters, slot, slots, tracks);
}
static_assert(mail_bytes(3, 1024, 4, 4096, 2, 8) == 19584 + 2 * (4 * 1280 + 65536),
              "as the host counts it");

// Bytes of a chunk of slots, which the host says as well: so many that every track has one, and of more
// than FINE bytes two or more, to drain one while the next is filled; but no more than a slot, nor less
// than is worth a block. Alike on both sides, as it follows from what they share.
__device__ constexpr u64 chunk_of(u64 bytes, u64 tracks, u64 slot) {
    const u64 least = slot > LEAST_CHUNK ? LEAST_CHUNK : 128;
    const u64 share = ((bytes + tracks - 1) / tracks + 127) / 128 * 128;
    const u64 half = (share + 255) / 256 * 128, fine = half < FINE ? FINE : half;
    const u64 chunk = share < fine ? share : fine;
    return chunk < least ? least : chunk < slot ? chunk : slot;
}

}  // namespace cupy_zc
