// The kernels themselves, compiled for the host: the .cu files as they are.
//
// Compiled once for each SLICE of the element types, so that two cores share the work; with
// EMULATION_SMALL for float sums alone.
#include "runtime.h"

#include "ll128.cu"
#include "ll128_move.cu"
#include "ll128_pair.cu"
#include "ll128_pair_move.cu"
#include "ll128_reduce.cu"
#include "ll128_reduce_scatter.cu"
#include "ll.cu"
#include "two_shot.cu"
#include "reduce_scatter.cu"
#include "push.cu"
#include "barrier.cu"

#include "table.h"

namespace {

using namespace cupy_zc;

template <class E, class O>
Kernel reducing(unsigned kernel) {
    using R = Reduction<E, O>;
    switch (kernel) {
        case 0:
            return ll128<R>;
        case 1:
            return ll<R>;
        case 2:
            return two_shot<R>;
        case 3:
            return reduce_scatter<R>;
        case 40:
            return ll128_reduce_scatter<R>;
        case 41:
            return ll128_reduce<R>;
        case 42:
            return ll128_pair_all_reduce<R>;
        case 43:
            return ll128_pair_reduce_scatter<R>;
    }
    return nullptr;
}

template <class E, bool ORDERED, bool DIVISIBLE>
Kernel of_operation(unsigned kernel, unsigned operation) {
    if (operation == 0) return reducing<E, Sum>(kernel);
#ifndef EMULATION_SMALL
    if (operation == 1) return reducing<E, Prod>(kernel);
    if constexpr (ORDERED) {
        if (operation == 2) return reducing<E, Min>(kernel);
        if (operation == 3) return reducing<E, Max>(kernel);
    }
    if constexpr (DIVISIBLE) {
        if (operation == 4) return reducing<E, Avg>(kernel);
    }
#endif
    return nullptr;
}

}  // namespace

#define CONCATENATE(a, b) a##b
#define NAMED(slice) CONCATENATE(find_, slice)

// Numbers as in cupy_zc/collectives/dtypes.py and plan.py.
Kernel NAMED(SLICE)(unsigned kernel, unsigned element, unsigned operation) {
    switch (element) {
#if SLICE == 0
        case 0:
            return of_operation<Bool, true, false>(kernel, operation);
        case 1:
            return of_operation<signed char, true, true>(kernel, operation);
        case 2:
            return of_operation<u8, true, true>(kernel, operation);
#elif SLICE == 1
        case 3:
            return of_operation<short, true, true>(kernel, operation);
        case 4:
            return of_operation<u16, true, true>(kernel, operation);
        case 5:
            return of_operation<int, true, true>(kernel, operation);
        case 6:
            return of_operation<u32, true, true>(kernel, operation);
#elif SLICE == 2
        case 7:
            return of_operation<long long, true, true>(kernel, operation);
        case 8:
            return of_operation<u64, true, true>(kernel, operation);
        case 9:
            return of_operation<Half, true, true>(kernel, operation);
        case 10:
            return of_operation<Bfloat, true, true>(kernel, operation);
#else
        case 11:
            return of_operation<float, true, true>(kernel, operation);
#ifndef EMULATION_SMALL
        case 12:
            return of_operation<double, true, true>(kernel, operation);
        case 13:
            return of_operation<Complex<float>, false, true>(kernel, operation);
        case 14:
            return of_operation<Complex<double>, false, true>(kernel, operation);
#endif
#endif
    }
    return nullptr;
}

#if SLICE == 3
namespace {
template <void (*KERNEL)(const Args)>
void moving(const Args& args) {
    KERNEL(args);
}
}  // namespace

Kernel find_moving(unsigned kernel) {
    switch (kernel) {
        case 4:
            return moving<all_gather>;
        case 5:
            return moving<all_to_all>;
        case 6:
            return moving<broadcast>;
        case 7:
            return moving<scatter>;
        case 8:
            return moving<gather>;
        case 9:
            return moving<barrier>;
        case 20:
            return moving<ll128_all_gather>;
        case 21:
            return moving<ll128_all_to_all>;
        case 22:
            return moving<ll128_broadcast>;
        case 23:
            return moving<ll128_scatter>;
        case 24:
            return moving<ll128_gather>;
        case 25:
            return moving<ll128_pair_all_gather>;
        case 26:
            return moving<ll128_pair_all_to_all>;
    }
    return nullptr;
}
#endif
