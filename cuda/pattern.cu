// Position-dependent patterns: the set-up self-test of mapped memory.
//
// pattern_write fills `count` words with a pattern; pattern_check counts the words that differ from
// it. Run the first through one mapping and the second through another (the owner's, a peer's) to
// prove that both reach the same memory, all of it, in the same order.
//
// Contract
//   words       first of `count` 32-bit words, 4-byte aligned; any memory the device can access
//   first       position of words[0] in the whole pattern, in words. Ranges filled one by one carry
//               different values, so a range mapped in the place of another one is noticed
//   seed        another seed gives another pattern: what an earlier run left behind never passes
//   mismatches  one 64-bit counter, zeroed by the caller; pattern_check adds to it
//   launch      any one-dimensional grid; the threads stride over the words
//   order       none between the two: the caller lets the writer finish, at every rank that writes,
//               before it launches the checker. Words are read and written as volatile, so that a
//               check sees memory and not what a cache still holds
//
// Freestanding: no headers, compiles with NVRTC as C++17, no requirement on the architecture.

using u32 = unsigned int;
using u64 = unsigned long long;

static_assert(sizeof(u32) == 4, "the pattern is made of 32-bit words");
static_assert(sizeof(u64) == 8, "positions and counts exceed 32 bits: 16 GiB are 2^32 words");

namespace {

// The finaliser of MurmurHash3 over both halves of the position: neighbours, and words 2^32 apart,
// have unrelated values, so shifted, swapped and repeated pages all show.
__device__ u32 mix(u32 x) {
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    return x ^ (x >> 16);
}

__device__ u32 pattern(u64 position, u32 seed) {
    return mix(static_cast<u32>(position) ^ mix(static_cast<u32>(position >> 32) ^ mix(seed)));
}

__device__ u64 thread_index() { return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; }

__device__ u64 thread_count() { return static_cast<u64>(gridDim.x) * blockDim.x; }

}  // namespace

extern "C" __global__ void pattern_write(volatile u32* words, u64 count, u64 first, u32 seed) {
    for (u64 i = thread_index(); i < count; i += thread_count()) {
        words[i] = pattern(first + i, seed);
    }
}

extern "C" __global__ void pattern_check(const volatile u32* words, u64 count, u64 first, u32 seed,
                                         u64* mismatches) {
    u64 wrong = 0;
    for (u64 i = thread_index(); i < count; i += thread_count()) {
        wrong += words[i] != pattern(first + i, seed);
    }
    if (wrong != 0) {
        atomicAdd(mismatches, wrong);
    }
}
