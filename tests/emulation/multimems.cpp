// The kernels that access all copies at once, compiled for the host as kernels.cpp has the others:
// with the instructions that ptx_multimem.cuh stands in for, and with ordinary accesses.
//
// Compiled once for each SLICE of the element types; with EMULATION_SMALL for float sums alone.
#include "runtime.h"

#include "multimem_all_reduce.cu"
#include "multimem_ll.cu"
#include "multimem_move.cu"
#include "multimem_reduce_scatter.cu"

#include "table.h"

namespace {

using namespace cupy_zc;

constexpr unsigned EMULATED = MULTIMEMS + 100;

template <class M>
Kernel moving(unsigned kernel) {
    switch (kernel) {
        case 3:
            return multimem_move<M, true>;
        case 4:
            return multimem_move<M, false>;
    }
    return nullptr;
}

template <class R, class M>
Kernel reducing(unsigned kernel) {
    switch (kernel) {
        case 0:
            return multimem_all_reduce<R, M>;
        case 1:
            return multimem_reduce_scatter<R, M>;
        case 2:
            return multimem_ll<R, M>;
    }
    return moving<M>(kernel);
}

template <class E, class O>
Kernel of_both(unsigned kernel) {
    using R = Reduction<E, O>;
    return kernel >= EMULATED ? reducing<R, Emulated>(kernel - EMULATED)
                              : reducing<R, Hardware>(kernel - MULTIMEMS);
}

template <class E, bool SUMS, bool AVERAGES, bool LEAST, bool MOST>
Kernel of_operation(unsigned kernel, unsigned operation) {
    if constexpr (SUMS) {
        if (operation == 0) return of_both<E, Sum>(kernel);
    }
#ifndef EMULATION_SMALL
    if constexpr (LEAST) {
        if (operation == 2) return of_both<E, Min>(kernel);
    }
    if constexpr (MOST) {
        if (operation == 3) return of_both<E, Max>(kernel);
    }
    if constexpr (AVERAGES) {
        if (operation == 4) return of_both<E, Avg>(kernel);
    }
#endif
    return nullptr;
}

}  // namespace

#define CONCATENATE(a, b) a##b
#define NAMED(slice) CONCATENATE(find_multimem_, slice)

// Numbers as in kernels.cpp.
Kernel NAMED(SLICE)(unsigned kernel, unsigned element, unsigned operation) {
    switch (element) {
#if SLICE == 0
        case 0:
            return of_operation<Bool, true, false, false, true>(kernel, operation);
        case 5:
            return of_operation<int, true, true, true, true>(kernel, operation);
        case 6:
            return of_operation<u32, true, true, true, true>(kernel, operation);
        case 7:
            return of_operation<long long, true, true, true, true>(kernel, operation);
        case 8:
            return of_operation<u64, true, true, true, true>(kernel, operation);
#else
        case 11:
            return of_operation<float, true, true, false, false>(kernel, operation);
#ifndef EMULATION_SMALL
        case 9:
            return of_operation<Half, true, true, true, true>(kernel, operation);
        case 10:
            return of_operation<Bfloat, true, true, true, true>(kernel, operation);
        case 12:
            return of_operation<double, true, true, false, false>(kernel, operation);
        case 13:
            return of_operation<Complex<float>, true, true, false, false>(kernel, operation);
        case 14:
            return of_operation<Complex<double>, true, true, false, false>(kernel, operation);
#endif
#endif
    }
    return nullptr;
}
