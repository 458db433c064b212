// A GPU for tests: the grids of all ranks at once, on the host.
//
// Three builds of one interface. By default every GPU thread is a fiber and one OS thread runs them
// in a seeded random order, switching wherever a kernel waits and, at times, where it touches a
// flag; the clock is virtual and advances with the turns of waits, so that time-outs are quick and
// exact. With EMULATION_THREADS every GPU thread is an OS thread, for ThreadSanitizer; the clock is
// real. With EMULATION_GRIDS there are fibers too, and each OS thread runs a grid of its own (see
// grid.h): the clock is the one they share, so it is real, and a grid that waits lets others run.
//
// A barrier that not all threads of a block reach ends the process with a message.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include <ucontext.h>

#define __device__
#define __forceinline__ inline __attribute__((unused))
#define __global__ __attribute__((weak))
#define __grid_constant__
#define __launch_bounds__(...)

namespace emulation {

struct Index {
    unsigned x;
};

inline bool alone = false;  // one rank, which has nobody to hear from

[[noreturn]] inline void die(const char* why) {
    std::fprintf(stderr, "emulation: %s\n", why);
    std::abort();
}

struct Fiber;

// `parties` threads come together; the last to come does what there is to do for all.
class Rendezvous {
   public:
    explicit Rendezvous(unsigned parties) : parties_(parties) {}
    void arrive(const std::function<void()>& put, const std::function<void()>& last);

   private:
    const unsigned parties_;
#ifdef EMULATION_THREADS
    unsigned arrived_ = 0;
    uint64_t generation_ = 0;
    std::mutex mutex_;
    std::condition_variable changed_;
#else
    std::vector<Fiber*> waiting_;
#endif
};

struct Block {
    Block(unsigned number, unsigned blocks, unsigned threads)
        : index{number}, grid{blocks}, dim{threads}, all(threads) {
        for (unsigned i = 0; i < threads / 8; ++i) {
            eights.push_back(std::make_unique<Rendezvous>(8));
        }
        in.resize(threads * 2);
        out.resize(threads * 2);
    }
    Index index, grid, dim;
    Rendezvous all;
    std::vector<std::unique_ptr<Rendezvous>> eights;
    std::vector<uint64_t> in, out;  // two words a thread, for the meetings of eight
    bool both[2] = {true, true};    // conjunctions of this and the next barrier
    std::mutex mutex;
    std::map<const void*, std::shared_ptr<void>> shared;
};

struct Fiber {
    Block* block;
    unsigned team;  // those of a block: the scheduler favours them together
    Index thread;
    const std::function<void()>* body;
    unsigned turn = 0;  // barriers passed
    // Of aliases: fenced since it last came together with others, and stored since the last fence.
    bool fenced = false, unfenced_store = false;
    bool had_line = false;  // polled one, in this kernel
    jmp_buf state;
    bool started = false, done = false;
    char* stack = nullptr;
};

inline uint64_t real_now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

#ifdef EMULATION_THREADS
inline thread_local Fiber* current;
inline void yield() { std::this_thread::yield(); }
inline void perhaps_yield() {}
inline uint64_t now() { return real_now(); }

inline void Rendezvous::arrive(const std::function<void()>& put,
                               const std::function<void()>& last) {
    std::unique_lock<std::mutex> lock(mutex_);
    put();
    const uint64_t generation = generation_;
    if (++arrived_ == parties_) {
        last();
        arrived_ = 0;
        ++generation_;
        changed_.notify_all();
        return;
    }
    changed_.wait(lock, [&] { return generation_ != generation; });
}

inline void run(std::vector<Fiber>& fibers, uint64_t) {
    std::vector<std::thread> threads;
    for (Fiber& fiber : fibers) {
        threads.emplace_back([&fiber] {
            current = &fiber;
            (*fiber.body)();
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}
#else
inline thread_local Fiber* current;
inline thread_local jmp_buf scheduler;
inline thread_local std::vector<std::vector<Fiber*>> ready;  // of each team
inline thread_local std::minstd_rand dice;

inline void wake(Fiber* fiber) { ready[fiber->team].push_back(fiber); }

// Any fiber that can run, but mostly of one block for a while: so blocks, and with them ranks,
// overtake each other.
inline Fiber* pick() {
    static thread_local size_t favourite = 0;
    if (dice() % 256 == 0) {
        favourite = dice();
    }
    size_t team = (dice() % 16 == 0 ? dice() : favourite) % ready.size();
    for (size_t tried = 0; ready[team].empty(); team = (team + 1) % ready.size()) {
        if (tried++ == ready.size()) {
            die("some threads of a block wait at a barrier that the others never reach");
        }
    }
    std::vector<Fiber*>& fibers = ready[team];
    std::swap(fibers[dice() % fibers.size()], fibers.back());
    Fiber* const fiber = fibers.back();
    fibers.pop_back();
    return fiber;
}

inline void switch_away() {
    if (_setjmp(current->state) == 0) {
        _longjmp(scheduler, 1);
    }
}
#ifdef EMULATION_GRIDS
inline uint64_t now() { return real_now(); }
inline void turn_of_wait() {
    static thread_local unsigned turns = 0;
    if (++turns % 256 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
}
#else
inline thread_local uint64_t clock_now = 1;
inline uint64_t now() { return clock_now; }
inline void turn_of_wait() { clock_now += 100; }
#endif
inline void yield() {
    turn_of_wait();
    wake(current);
    switch_away();
}
inline void perhaps_yield() {
    if (dice() % 8 == 0) {
        wake(current);
        switch_away();
    }
}

inline void Rendezvous::arrive(const std::function<void()>& put,
                               const std::function<void()>& last) {
    put();
    waiting_.push_back(current);
    if (waiting_.size() == parties_) {
        last();
        for (Fiber* fiber : waiting_) {
            wake(fiber);
        }
        waiting_.clear();
    }
    switch_away();
}

constexpr size_t STACK = 64 << 10;

inline void entry() {
    (*current->body)();
    current->done = true;
    _longjmp(scheduler, 1);
}

inline void run(std::vector<Fiber>& fibers, uint64_t seed) {
    static thread_local std::vector<std::unique_ptr<char[]>> stacks;
    dice.seed(seed + 1);
    ready.assign(fibers.back().team + 1, {});
    for (size_t i = 0; i < fibers.size(); ++i) {
        if (i == stacks.size()) {
            stacks.emplace_back(new char[STACK]);
        }
        fibers[i].stack = stacks[i].get();
        wake(&fibers[i]);
    }
    static thread_local volatile size_t left;
    left = fibers.size();
    while (left > 0) {
        current = pick();
        if (_setjmp(scheduler) == 0) {
            if (current->started) {
                _longjmp(current->state, 1);
            }
            current->started = true;
            ucontext_t context;
            getcontext(&context);
            context.uc_stack.ss_sp = current->stack;
            context.uc_stack.ss_size = STACK;
            context.uc_link = nullptr;
            makecontext(&context, entry, 0);
            setcontext(&context);
        }
        if (current->done) {
            left = left - 1;
        }
    }
}
#endif

// A thread meets others, or ends: what it stored through an alias must be fenced by now.
inline void part_with_aliases() {
    if (current->unfenced_store) {
        die("a store to all copies that no fence_alias follows");
    }
    current->fenced = false;
}

inline bool barrier(bool value) {
    part_with_aliases();
    Block& block = *current->block;
    const unsigned turn = current->turn++ % 2;
    block.all.arrive([&] { block.both[turn] = block.both[turn] && value; },
                     [&] { block.both[1 - turn] = true; });
    return block.both[turn];
}

// One variable a block for each declaration.
template <class T>
T& shared(const void* declaration) {
    Block& block = *current->block;
    std::lock_guard<std::mutex> lock(block.mutex);
    std::shared_ptr<void>& slot = block.shared[declaration];
    if (!slot) {
        slot = std::make_shared<T>();
    }
    return *static_cast<T*>(slot.get());
}

// Eight neighbours bring two words each; the last to come turns them into two words for each.
inline uint64_t* eight(uint64_t low, uint64_t high,
                       const std::function<void(uint64_t*, uint64_t*)>& all) {
    Block& block = *current->block;
    const unsigned thread = current->thread.x, first = thread / 8 * 16;
    block.eights[thread / 8]->arrive(
        [&] {
            block.in[thread * 2] = low;
            block.in[thread * 2 + 1] = high;
        },
        [&] { all(&block.in[first], &block.out[first]); });
    return &block.out[thread * 2];
}

}  // namespace emulation

#define threadIdx (::emulation::current->thread)
#define blockIdx (::emulation::current->block->index)
#define blockDim (::emulation::current->block->dim)
#define gridDim (::emulation::current->block->grid)
#define __syncthreads() ((void)::emulation::barrier(true))
#define __syncthreads_and(value) ::emulation::barrier(value)
