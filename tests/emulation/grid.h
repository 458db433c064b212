// A kernel as a function of a shared library, which runs one grid in the thread that calls it.
//
// A source that includes this header and a .cu file names the kernels that the library has, with
// EMULATED_KERNEL. Of each one there are then two functions:
//
//   NAME_parameters  writes the bytes of each parameter, and returns how many there are
//   NAME_run         runs the kernel; `parameters` has the address of each argument, which stay the
//                    caller's
//
// Needs EMULATION_GRIDS. All else is hidden, so libraries of one process do not meet.
#pragma once

#include <tuple>
#include <type_traits>

#include "runtime.h"

#define EMULATED_KERNEL(name)                                                                   \
    extern "C" __attribute__((visibility("default"))) unsigned name##_parameters(               \
        uint64_t* bytes) {                                                                      \
        return ::emulation::tell_parameters(name, bytes);                                       \
    }                                                                                           \
    extern "C" __attribute__((visibility("default"))) void name##_run(                          \
        unsigned blocks, unsigned threads, void* const* parameters, uint64_t seed) {            \
        ::emulation::run_grid(name, blocks, threads, parameters, seed,                          \
                              ::emulation::Indices<decltype(name)>());                          \
    }

// What pattern.cu uses of CUDA and no header declares.
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}

namespace emulation {

template <class Function>
struct Counted;
template <class... Parameters>
struct Counted<void(Parameters...)> {
    using type = std::index_sequence_for<Parameters...>;
};
template <class Function>
using Indices = typename Counted<Function>::type;

template <class... Parameters>
unsigned tell_parameters(void (*)(Parameters...), uint64_t* bytes) {
    ((*bytes++ = sizeof(Parameters)), ...);
    return sizeof...(Parameters);
}

template <class... Parameters, size_t... INDEX>
void run_grid(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
              void* const* parameters, uint64_t seed, std::index_sequence<INDEX...>) {
    const std::function<void()> body = [&] {
        kernel(*static_cast<Parameters*>(parameters[INDEX])...);
        part_with_aliases();
    };
    std::vector<std::unique_ptr<Block>> grid;
    std::vector<Fiber> fibers(blocks * threads);
    for (unsigned b = 0; b < blocks; ++b) {
        grid.push_back(std::make_unique<Block>(b, blocks, threads));
        for (unsigned t = 0; t < threads; ++t) {
            Fiber& fiber = fibers[b * threads + t];
            fiber.block = grid.back().get();
            fiber.team = b;
            fiber.thread = {t};
            fiber.body = &body;
        }
    }
    run(fibers, seed);
}

}  // namespace emulation
