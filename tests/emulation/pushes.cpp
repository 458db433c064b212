// The reductions by stores, compiled for the host as kernels.cpp has the others: for a few types
// and operations that differ in width, rounding and alignment.
#include "runtime.h"

#include "push_reduce.cu"

#include "table.h"

namespace {

using namespace cupy_zc;

template <class E, class O>
Kernel pushing(unsigned kernel) {
    return kernel == PUSHES ? push_reduce<Reduction<E, O>, false>
                            : push_reduce<Reduction<E, O>, true>;
}

}  // namespace

Kernel find_push(unsigned kernel, unsigned element, unsigned operation) {
    switch (element * 8 + operation) {
        case 11 * 8 + 0:
            return pushing<float, Sum>(kernel);
#ifndef EMULATION_SMALL
        case 2 * 8 + 0:
            return pushing<u8, Sum>(kernel);
        case 7 * 8 + 3:
            return pushing<long long, Max>(kernel);
        case 9 * 8 + 4:
            return pushing<Half, Avg>(kernel);
        case 14 * 8 + 1:
            return pushing<Complex<double>, Prod>(kernel);
#endif
    }
    return nullptr;
}
