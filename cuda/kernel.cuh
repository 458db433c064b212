// How the entry point of a kernel looks.
//
// Contract
//   before    a kernel may be launched while those before it on the stream still run (programmatic
//             dependent launch): it waits for them first of all, and sees what they wrote. The host
//             launches no other kernels so
//   next      a block may say let_next_kernel_start() once it knows that its counterparts on all
//             ranks have started; the first of its threads to say so says it for the block. When all
//             blocks have, the next kernel takes room of the GPU, which ranks may share, while this
//             one ends
//   launch    one-dimensional, a multiple of 32 threads up to 512; `blocks` of it fit on a
//             multiprocessor. Its one parameter is called `args`
#pragma once

#include "ptx.cuh"

#define CUPY_ZC_KERNEL_OF(name, Arguments, blocks)                             \
    static __device__ __forceinline__ void name##_body(const Arguments& args); \
    extern "C" __global__ void __launch_bounds__(512, blocks)                  \
        name(const __grid_constant__ Arguments args) {                         \
        cupy_zc::await_kernels_before();                                       \
        name##_body(args);                                                     \
    }                                                                          \
    static __device__ __forceinline__ void name##_body(const Arguments& args)

// A collective.
#define CUPY_ZC_KERNEL(name) CUPY_ZC_KERNEL_OF(name, cupy_zc::Args, 1)
