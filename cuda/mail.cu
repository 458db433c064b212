// send, recv and send_recv: a message from one rank to another, through the mail of a channel.
//
// Contract
//   memory    any, registered or not, any alignment, any number of bytes; input and output must not
//             overlap. See mail.cuh for the areas, channel.cuh for numbers and waits
//   parts     a launch pushes, drains, or does both at once, each with blocks of its own; neither
//             part waits for the other. So any kinds can meet: a send_recv with a send_recv, or
//             with a send and a recv. A push waits for its peer only where the channel is full
//   streams   launches that push on one channel are ordered by streams or events, and so are those
//             that drain it. All else may run at the same time
//   letters   every message takes the next letter of its channel: a header of {fingerprint, bytes
//             and blocks} and, where the data fit, the data, in packets: one way over the link. The
//             header is looked at before anything is written: a message that is not expected writes
//             nothing
//   slots     larger data go through the slots of the tracks, chunk by chunk, chunk c through track
//             c % blocks: as many blocks as the header says. A chunk is what a slot holds, or less.
//             The drain has a block for each track that the data could take; those beyond only take
//             part in leaving. The filler of a slot stores it plainly, all its threads meet, and
//             one RELEASES the count of filled slots; one thread of the drainer ACQUIRES that, and
//             all its threads meet. The same the other way, with the count of drained slots
//   reuse     of a slot: the filler is at most `slots` ahead of the drained count it acquired. Of a
//             letter: the pusher is at most `letters` ahead of `taken`, which the last block to
//             leave stores when all blocks have the values of all packets that they read: they
//             have compared the flags in them, so no later packet can be what they saw
#include "channel.cuh"

namespace cupy_zc {

static __device__ __forceinline__ u32 bytes_of_pack(u64 bytes, u64 index) {
    return static_cast<u32>(bytes - index * 16 < 16 ? bytes - index * 16 : 16);
}

static __device__ __forceinline__ Pack load_part(const MailPart& part, u64 index) {
    return load_pack<1>(part.array + index * 16, bytes_of_pack(part.bytes, index));
}

static __device__ __forceinline__ void push_letter(const Channel& channel) {
    const MailPart& part = channel.part;
    const u64 packs = (part.bytes + 15) / 16;
    u64 i = threadIdx.x;
    Pack pack = {0, 0};
    if (i < packs) {
        pack = load_part(part, i);  // its way is not longer than that of the words
    }
    bool good = true;
    if (threadIdx.x == 0) {
        good = channel.alive_until([&] { return channel.letter_is_free(); });
    }
    if (!__syncthreads_and(good)) {
        return;
    }
    if (threadIdx.x == blockDim.x - 1) {
        channel.send_header();
    }
    while (i < packs) {
        channel.send(i, pack);
        i += blockDim.x;
        if (i < packs) {
            pack = load_part(part, i);
        }
    }
    if (threadIdx.x == 0) {
        channel.leave();
    }
}

static __device__ __forceinline__ void drain_letter(const Channel& channel) {
    const MailPart& part = channel.part;
    const u64 packs = (part.bytes + 15) / 16;
    u64 i = threadIdx.x;
    Pack pack = {0, 0};
    bool good = threadIdx.x != blockDim.x - 1 || channel.greet() != 0;
    good = good && (i >= packs || channel.take(i, pack));
    if (!__syncthreads_and(good)) {
        return;
    }
    while (good && i < packs) {
        store_pack<1>(part.array + i * 16, bytes_of_pack(part.bytes, i), pack);
        i += blockDim.x;
        good = i >= packs || channel.take(i, pack);
    }
    if (__syncthreads_and(good) && threadIdx.x == 0) {
        channel.leave();
    }
}

// How many tracks a message takes, for all threads of a drain; 0: it is not to be had.
static __device__ __forceinline__ u32 tracks_said(const Channel& channel) {
    CUPY_ZC_SHARED(u32, tracks);
    if (threadIdx.x == 0) {
        tracks = channel.greet();
    }
    __syncthreads();
    return tracks;
}

// The chunks of one track through its slots, in either direction.
static __device__ __forceinline__ void pass_slots(const Channel& channel) {
    const MailPart& part = channel.part;
    const u64 chunk = part.chunk;
    const u32 tracks = channel.push ? channel.blocks() : tracks_said(channel);
    if (tracks == 0) {
        return;
    }
    bool good = !channel.push || threadIdx.x != 0 || channel.start();
    u64 passed = load_relaxed(&channel.passed());
    u64 at = channel.track < tracks ? channel.track * chunk : part.bytes;
    for (; at < part.bytes; at += tracks * chunk) {
        if (threadIdx.x == blockDim.x - 1) {  // while the first thread releases the last slot
            good = channel.until(
                [&] { return load_acquire(channel.gate()) + channel.lead() > passed; });
        }
        if (!__syncthreads_and(good)) {
            return;
        }
        const u64 slot = channel.slot(passed), array = part.array + at;
        copy(channel.push ? slot : array, channel.push ? array : slot,
             chunk < part.bytes - at ? chunk : part.bytes - at);
        __syncthreads();
        ++passed;
        if (threadIdx.x == 0) {
            store_release(channel.post(), passed);
        }
    }
    if (threadIdx.x == 0) {
        store_relaxed(&channel.passed(), passed);
        channel.leave();
    }
}

}  // namespace cupy_zc

// Two blocks fit on a multiprocessor: a send that waits for its peer leaves room for other kernels.
extern "C" __global__ void __launch_bounds__(512, 2)
    mail(const __grid_constant__ cupy_zc::MailArgs args) {
    using namespace cupy_zc;
    const u32 pushers = mail_blocks(args, args.push), drainers = mail_blocks(args, args.drain);
    if (blockIdx.x >= pushers + drainers) {
        return;
    }
    const bool push = blockIdx.x < pushers;
    const Channel channel(args, push, push ? blockIdx.x : blockIdx.x - pushers);
    if (channel.part.bytes > args.letter) {
        pass_slots(channel);
    } else if (push) {
        push_letter(channel);
    } else {
        drain_letter(channel);
    }
}
