// Runs the mail kernel: reads scenes from standard input, writes what came out to standard output.
//
// One scene: a Scene; its streams, each a Stream and its Calls, a Call with the bytes that it
// pushes. The answer: the ErrorRecord of each rank, then for each call of each stream what lies in
// its output, between two guards. Mail areas live on from scene to scene until one is `fresh`.
//
// A rank may have any number of streams. The threads of a stream run its calls one after the other;
// before a call they fill its input, after it they take its output and scribble over the input, as
// kernels before and after would. A call may wait for one of another stream, as an event would make
// it. Otherwise streams, of one rank and of others, are ordered only by what the kernel does.
#include <algorithm>
#include <atomic>

#include "host.h"
#include "runtime.h"

#include "mail.cuh"

extern "C" void mail(const cupy_zc::MailArgs args);

namespace {

using namespace cupy_zc;

struct Scene {
    u32 size, streams, threads, fresh, letters, slots, tracks, unused;
    u64 letter, slot, budget, seed, messages, passed;
    u64 lost, lost_after;  // what the host says in the records, and when
};
struct Call {
    u64 push_peer, push_bytes, push_fingerprint, drain_peer, drain_bytes, drain_fingerprint;
    u64 push_blocks;
    u32 input_skew, output_skew;
    u64 after;  // 0, or a call of the scene by number from 1 on: its end comes first
};
static_assert(sizeof(Scene) == 96 && sizeof(Call) == 72, "the test packs them");

constexpr u64 GUARD = 64;
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

// Bytes of a given skew from 16-byte alignment, between two guards.
struct Buffer {
    std::vector<unsigned char> bytes;
    unsigned char* start;
    u64 size;

    Buffer(u64 size, u32 skew) : bytes(size + skew + 2 * GUARD + 16, POISON), size(size) {
        start = bytes.data() + GUARD;
        start += (16 - reinterpret_cast<uintptr_t>(start) % 16) % 16 + skew;
    }
    u64 address() const { return reinterpret_cast<u64>(start); }
};

struct Job {
    MailArgs args;
    u32 grid;
    std::unique_ptr<Buffer> input, output;
    std::vector<unsigned char> given;
    std::vector<std::unique_ptr<emulation::Block>> blocks;
    std::atomic<bool> done{false};
    Job* after = nullptr;

    void fill() { std::copy(given.begin(), given.end(), input->start); }
    void finish() {
        std::memset(input->start, SCRIBBLE, input->size);
        done.store(true, std::memory_order_release);
    }
};

struct Stream {
    u32 rank, calls;
    std::vector<Job*> jobs;
    u32 blocks = 1;  // of its largest call
    std::unique_ptr<emulation::Rendezvous> all;

    void run(u32 block) {
        for (Job* const job : jobs) {
            while (job->after != nullptr && !job->after->done.load(std::memory_order_acquire)) {
                emulation::yield();
            }
            all->arrive([] {}, [job] { job->fill(); });
            if (block < job->grid) {
                emulation::current->block = job->blocks[block].get();
                emulation::current->turn = 0;
                mail(job->args);
            }
            all->arrive([] {}, [job] { job->finish(); });
        }
    }
};

std::vector<std::vector<Pack>> areas;

Area& area_of(u32 rank) { return *reinterpret_cast<Area*>(areas[rank].data()); }

// As if so many messages and slots had passed before.
void renew(const Scene& scene) {
    const u64 bytes =
        mail_bytes(scene.size, scene.letter, scene.letters, scene.slot, scene.slots, scene.tracks);
    areas.assign(scene.size, std::vector<Pack>(bytes / 16, Pack{0, 0}));
    for (u32 rank = 0; rank < scene.size; ++rank) {
        for (Desk& desk : area_of(rank).desks) {
            desk.taken = scene.messages;
            desk.push.messages = desk.drain.messages = scene.messages << SHARE_BITS;
            for (u32 track = 0; track < MAX_TRACKS; ++track) {
                desk.drained[track] = desk.filled[track] = scene.passed;
                desk.push.slots[track] = desk.drain.slots[track] = scene.passed;
            }
        }
    }
}

constexpr u64 NOBODY = ~0ull;  // the peer of a part that a call does not have
constexpr u64 SHEET = LINE_DATA;  // bytes of a letter that are worth a block

MailPart part_of(const Scene& scene, u64 peer, u64 bytes, u64 fingerprint, u64 array, u64 most) {
    if (peer == NOBODY) {
        return {};
    }
    const bool slots = bytes > scene.letter;
    u64 chunk = slots ? chunk_of(bytes, scene.tracks, scene.slot) : SHEET;
    const u64 blocks = std::max<u64>(1, std::min((bytes + chunk - 1) / chunk, most));
    if (!slots) {
        chunk = ((bytes + blocks - 1) / blocks + SHEET - 1) / SHEET * SHEET;
    }
    return {array, bytes, fingerprint, reinterpret_cast<u64>(&area_of(peer)), peer,
            static_cast<u32>(blocks), static_cast<u32>(chunk)};
}

std::unique_ptr<Job> read_job(const Scene& scene, u32 rank, u64 error, u64& after) {
    Call call;
    get(&call, sizeof(call));
    auto job = std::make_unique<Job>();
    after = call.after;
    job->given.resize(call.push_peer == NOBODY ? 0 : call.push_bytes);
    get(job->given.data(), job->given.size());
    job->input = std::make_unique<Buffer>(job->given.size(), call.input_skew);
    job->output = std::make_unique<Buffer>(call.drain_peer == NOBODY ? 0 : call.drain_bytes,
                                           call.output_skew);
    job->args = {
        part_of(scene, call.push_peer, call.push_bytes, call.push_fingerprint,
                job->input->address(), call.push_blocks),
        part_of(scene, call.drain_peer, call.drain_bytes, call.drain_fingerprint,
                job->output->address(), scene.tracks),
        reinterpret_cast<u64>(&area_of(rank)),
        error,
        7,
        scene.budget,
        scene.letter,
        scene.slot,
        scene.letters,
        scene.slots,
        scene.tracks,
        rank};
    const MailArgs& args = job->args;
    job->grid = args.push.blocks + args.drain.blocks;
    for (u32 b = 0; b < job->grid; ++b) {
        job->blocks.push_back(std::make_unique<emulation::Block>(b, job->grid, scene.threads));
    }
    return job;
}

void serve(const Scene& scene) {
    if (scene.fresh != 0) {
        renew(scene);
    }
    std::vector<ErrorRecord> records(scene.size);
    std::vector<std::unique_ptr<Job>> jobs;
    std::vector<u64> after;
    std::vector<Stream> streams(scene.streams);
    for (Stream& stream : streams) {
        get(&stream.rank, 4);
        get(&stream.calls, 4);
        for (u32 i = 0; i < stream.calls; ++i) {
            after.emplace_back();
            jobs.push_back(read_job(scene, stream.rank,
                                    reinterpret_cast<u64>(&records[stream.rank]), after.back()));
            stream.jobs.push_back(jobs.back().get());
            stream.blocks = std::max(stream.blocks, jobs.back()->grid);
        }
        stream.all = std::make_unique<emulation::Rendezvous>(stream.blocks * scene.threads);
    }
    for (size_t i = 0; i < jobs.size(); ++i) {
        jobs[i]->after = after[i] == 0 ? nullptr : jobs[after[i] - 1].get();
    }
    std::vector<std::function<void()>> bodies;
    std::vector<emulation::Fiber> fibers;
    for (Stream& stream : streams) {
        for (u32 b = 0; b < stream.blocks; ++b) {
            bodies.emplace_back([&stream, b] { stream.run(b); });
        }
    }
    for (u32 body = 0; body < bodies.size(); ++body) {
        for (u32 t = 0; t < scene.threads; ++t) {
            fibers.emplace_back();
            fibers.back().team = body;
            fibers.back().thread = {t};
            fibers.back().body = &bodies[body];
        }
    }
    const Host host(records, scene.lost, scene.lost_after);
    host.join(fibers);
    emulation::run(fibers, scene.seed);

    give(records.data(), records.size() * sizeof(ErrorRecord));
    for (const std::unique_ptr<Job>& job : jobs) {
        give(job->output->start - GUARD, job->output->size + 2 * GUARD);
    }
    std::fflush(stdout);
}

}  // namespace

int main() {
    for (;;) {
        Scene scene;
        get(&scene, sizeof(scene));
        serve(scene);
    }
}
