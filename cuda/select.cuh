// Which element type and operation a kernel is compiled for.
//
// Contract
//   CUPY_ZC_ELEMENT    Bool, signed char, u8, short, u16, int, u32, long long, u64, Half, Bfloat,
//                      float, double, Complex<float> or Complex<double>   (-D, default float)
//   CUPY_ZC_OPERATION  Sum, Prod, Min, Max or Avg   (-D, default Sum)
//   launch             one-dimensional, MAX_BLOCKS blocks at most, all resident at once together
//                      with those of the ranks that share the GPU; a multiple of 32 threads up to
//                      512; the same on all ranks
#pragma once

#include "kernel.cuh"
#include "reduce.cuh"

#ifndef CUPY_ZC_ELEMENT
#define CUPY_ZC_ELEMENT float
#endif
#ifndef CUPY_ZC_OPERATION
#define CUPY_ZC_OPERATION Sum
#endif

namespace cupy_zc {
using Selected = Reduction<CUPY_ZC_ELEMENT, CUPY_ZC_OPERATION>;
}
