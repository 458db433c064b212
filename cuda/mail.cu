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
//   letters   small messages: letters.cuh
//   slots     larger data go through the slots of the tracks, chunk by chunk, chunk c through track
//             c % blocks: as many blocks as the header says. A chunk is what a slot holds, or less.
//             The drain has a block for each track that the data could take; those beyond only take
//             part in leaving. The filler of a slot stores it plainly, all its threads meet, and
//             one RELEASES the count of filled slots; one thread of the drainer ACQUIRES that, and
//             all its threads meet. The same the other way, with the count of drained slots
//   reuse     of a slot: the filler is at most `slots` ahead of the drained count it acquired. Of the
//             letter, whose header such a message takes as well: as in letters.cuh
#include "kernel.cuh"
#include "letters.cuh"

namespace cupy_zc {

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
    const u32 tracks = channel.push ? channel.part.blocks : tracks_said(channel);
    if (tracks == 0) {
        return;
    }
    bool good = !channel.push || threadIdx.x != 0 || channel.start();
    u64 passed = load_relaxed(&channel.passed());
    u64 at = channel.block < tracks ? channel.block * chunk : part.bytes;
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
             least(chunk, part.bytes - at));
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
CUPY_ZC_KERNEL_OF(mail, cupy_zc::MailArgs, 2) {
    using namespace cupy_zc;
    const bool push = blockIdx.x < args.push.blocks;
    const Channel channel(args, push, push ? blockIdx.x : blockIdx.x - args.push.blocks);
    channel.tell_what_is_taken();
    if (channel.part.bytes > args.letter) {
        pass_slots(channel);
    } else if (push) {
        push_letter(channel);
    } else {
        drain_letter(channel);
    }
}
