// Reads launches from standard input, runs them, writes what came out to standard output.
//
// One launch: a Launch, then for each rank a Rank, its Calls where repeats are not all alike, and
// its inputs (rows of its own count), one for each repeat. The answer: for each rank its
// ErrorRecord, then for each repeat its input afterwards and its output between two guards. Lanes
// live on from launch to launch until one is `fresh`. Buffers that are not registered have windows
// at an address that nothing may touch.
//
// A rank is a stream: before each repeat it fills its input, after it it takes what it has and
// scribbles over the input, as kernels before and after would. Its own threads are ordered with
// both; the threads of other ranks only by what the kernels themselves do. So ranks overtake each
// other between repeats.
#include <algorithm>

#include "host.h"
#include "runtime.h"
#include "table.h"

#include "ptx_multimem.cuh"

namespace {

using namespace cupy_zc;

struct Launch {
    u32 operation, element, element_bytes, size, blocks, threads, root, two_step, fresh, input_rows,
        output_rows, repeats;
    u64 budget, chunk, lines, packs, seed, epoch;
    u64 lost, lost_after;  // what the host says in the records, and when
};
struct Rank {
    // registered: 1 input, 2 output, 4 at the same offsets on all ranks, 8 bound to multicast
    u32 kernel, registered, absent, in_place;  // in_place: 1 input in output, 2 output in input
    u32 row, input_skew, output_skew, calls;  // calls: none, or one for each repeat
    u64 count, fingerprint;
};
struct Call {
    u32 kernel, root;
};
static_assert(sizeof(Launch) == 112 && sizeof(Rank) == 48, "the test packs them");

constexpr u64 GUARD = 64, NOWHERE = 0x10;
constexpr u64 ARENAS = 3;  // of the lanes, the inputs, the outputs
constexpr u64 LANE_OFFSET = 1 << 20;
constexpr unsigned char POISON = 0xa5, SCRIBBLE = 0x5a;

void get(void* to, size_t bytes) {
    if (bytes != 0 && std::fread(to, bytes, 1, stdin) != 1) {
        std::exit(0);  // the test has closed the pipe
    }
}
void give(const void* from, size_t bytes) {
    if (bytes != 0 && std::fwrite(from, bytes, 1, stdout) != 1) {
        std::exit(1);
    }
}

struct Buffer {
    std::vector<unsigned char> bytes;
    unsigned char* start;  // aligned to 16, plus the skew, after a guard

    Buffer(u64 size, u32 skew) : bytes(size + skew + 2 * GUARD + 16, POISON) {
        start = bytes.data() + GUARD;
        start += (16 - reinterpret_cast<uintptr_t>(start) % 16) % 16 + skew;
    }
    u64 address() const { return reinterpret_cast<u64>(start); }
};

// What happens on the stream of one rank.
class Stream {
   public:
    Stream(const Launch& launch, const Rank& rank, Buffer& input, Buffer& output)
        : launch_(launch), input_(input), output_(output), all_(launch.blocks * launch.threads) {
        const u64 row = rank.count * launch.element_bytes;
        in_ = row * launch.input_rows;
        out_ = row * launch.output_rows;
        for (u32 repeat = 0; repeat < launch.repeats; ++repeat) {
            calls_.push_back({rank.kernel, launch.root});
            if (rank.calls != 0) {
                get(&calls_.back(), sizeof(Call));
            }
        }
        for (u32 repeat = 0; repeat < launch.repeats; ++repeat) {
            given_.emplace_back(in_);
            get(given_.back().data(), in_);
        }
    }

    void run(const Args& args) {
        for (u32 repeat = 0; repeat < launch_.repeats; ++repeat) {
            const Kernel kernel = find(calls_[repeat].kernel, launch_.element, launch_.operation);
            if (kernel == nullptr) {
                emulation::die("there is no such kernel");
            }
            Args called = args;
            called.root = calls_[repeat].root;
            all_.arrive([] {}, [&] { fill(repeat); });
            kernel(called);
            emulation::part_with_aliases();
            all_.arrive([] {}, [&] { finish(); });
        }
    }

    void tell() const { give(result_.data(), result_.size()); }

    // An absent rank runs nothing, and has what it was given.
    void skip() {
        for (u32 repeat = 0; repeat < launch_.repeats; ++repeat) {
            fill(repeat);
            finish();
        }
    }

   private:
    void fill(u32 repeat) {
        std::memset(output_.start, POISON, out_);
        std::copy(given_[repeat].begin(), given_[repeat].end(), input_.start);
    }
    void finish() {
        result_.insert(result_.end(), input_.start, input_.start + in_);
        const unsigned char* const from = output_.start - GUARD;
        result_.insert(result_.end(), from, from + out_ + 2 * GUARD);
        std::memset(input_.start, SCRIBBLE, in_);
    }

    const Launch& launch_;
    Buffer &input_, &output_;
    emulation::Rendezvous all_;
    u64 in_, out_;
    std::vector<Call> calls_;
    std::vector<std::vector<unsigned char>> given_;
    std::vector<unsigned char> result_;
};

std::vector<std::vector<u64>> lanes;

void serve(const Launch& launch) {
    const u32 size = launch.size;
    if (launch.fresh != 0) {
        const u64 bytes = lane_bytes(size, launch.lines, launch.packs) + 4 * launch.chunk;
        lanes.assign(size, std::vector<u64>(bytes / 8, 0));
        for (std::vector<u64>& lane : lanes) {
            lane[STATE / 8] = launch.epoch << 16;  // calls made so far
        }
    }
    std::vector<Rank> ranks(size);
    std::vector<std::unique_ptr<Buffer>> inputs, outputs;
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<ErrorRecord> records(size);
    std::vector<u64> windows((size + 1) * ARENAS), bound_windows(size * ARENAS);
    for (u64 arena = 0; arena < ARENAS; ++arena) {
        windows[size * ARENAS + arena] = emulation::Multicast::BASE | arena << 48;
    }
    emulation::multicast = {bound_windows.data(), size, ARENAS};
    std::vector<Args> all(size);
    for (u32 r = 0; r < size; ++r) {
        Rank& rank = ranks[r];
        get(&rank, sizeof(rank));
        const u64 row = rank.count * launch.element_bytes;
        inputs.push_back(std::make_unique<Buffer>(row * launch.input_rows, rank.input_skew));
        outputs.push_back(std::make_unique<Buffer>(row * launch.output_rows, rank.output_skew));
        Buffer &input = *inputs[r], &output = *outputs[r];
        if (rank.in_place == 1) {
            input.start = output.start + rank.row * row;
        } else if (rank.in_place == 2) {
            output.start = input.start + rank.row * row;
        }
        streams.push_back(std::make_unique<Stream>(launch, rank, input, output));

        Args& args = all[r];
        args = {};
        args.input = input.address();
        args.output = output.address();
        // Offsets differ from rank to rank, and so do the bases, which are aligned.
        const u64 unequal = (rank.registered & 4) != 0 ? 0 : 4096 * (r + 1);
        const u64 bound = (rank.registered & 8) != 0 ? MULTICAST : 0;
        const u64 offsets[2] = {unequal + 8192 + args.input % 16, unequal + 512 + args.output % 16};
        u64* const bases = &windows[r * ARENAS];
        args.input_location =
            (rank.registered & 1) != 0 ? bound | 1ull << 48 | offsets[0] : STAGED;
        args.output_location =
            (rank.registered & 2) != 0 ? bound | 2ull << 48 | offsets[1] : STAGED;
        bases[0] = reinterpret_cast<u64>(lanes[r].data()) - LANE_OFFSET;
        bases[1] = (rank.registered & 1) != 0 ? args.input - offsets[0] : NOWHERE;
        bases[2] = (rank.registered & 2) != 0 ? args.output - offsets[1] : NOWHERE;
        for (u64 arena = 0; arena < ARENAS; ++arena) {
            const bool there = arena == 0 || bound != 0;
            bound_windows[r * ARENAS + arena] = there ? bases[arena] : NOWHERE;
        }
        args.count = rank.count;
        args.fingerprint = rank.fingerprint;
        args.windows = reinterpret_cast<u64>(windows.data());
        args.error = reinterpret_cast<u64>(&records[r]);
        args.lane = 7;
        args.budget = launch.budget;
        args.ll128_lines = launch.lines;
        args.ll_packs = launch.packs;
        args.chunk = launch.chunk;
        args.scratch = lane_bytes(size, launch.lines, launch.packs);
        args.rank = r;
        args.size = size;
        args.arenas = ARENAS;
        args.element = launch.element_bytes;
        args.two_step = launch.two_step;
        for (u32 peer = 0; peer < size; ++peer) {
            args.lanes[peer] = reinterpret_cast<u64>(lanes[peer].data());
        }
    }

    std::vector<std::unique_ptr<emulation::Block>> blocks;
    std::vector<std::function<void()>> bodies(size);
    std::vector<emulation::Fiber> fibers;
    for (u32 r = 0; r < size; ++r) {
        bodies[r] = [&streams, &all, r] { streams[r]->run(all[r]); };
        if (ranks[r].absent != 0) {
            streams[r]->skip();
        }
        for (u32 b = 0; ranks[r].absent == 0 && b < launch.blocks; ++b) {
            blocks.push_back(std::make_unique<emulation::Block>(b, launch.blocks, launch.threads));
            for (u32 t = 0; t < launch.threads; ++t) {
                fibers.emplace_back();
                fibers.back().block = blocks.back().get();
                fibers.back().team = static_cast<unsigned>(blocks.size()) - 1;
                fibers.back().thread = {t};
                fibers.back().body = &bodies[r];
            }
        }
    }
    emulation::alone = size == 1;
    const Host host(records, launch.lost, launch.lost_after);
    host.join(fibers);
    emulation::run(fibers, launch.seed);

    for (u32 r = 0; r < size; ++r) {
        give(&records[r], sizeof(records[r]));
        streams[r]->tell();
    }
    std::fflush(stdout);
}

}  // namespace

int main() {
    for (;;) {
        Launch launch;
        get(&launch, sizeof(launch));
        serve(launch);
    }
}
