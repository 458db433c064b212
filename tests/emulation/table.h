// Which function a kernel's number, an element type and an operation stand for; null: there is
// none.
#pragma once

#include "types.cuh"

using Kernel = void (*)(const cupy_zc::Args&);

Kernel find_0(unsigned kernel, unsigned element, unsigned operation);
Kernel find_1(unsigned kernel, unsigned element, unsigned operation);
Kernel find_2(unsigned kernel, unsigned element, unsigned operation);
Kernel find_3(unsigned kernel, unsigned element, unsigned operation);
Kernel find_moving(unsigned kernel);

inline Kernel find(unsigned kernel, unsigned element, unsigned operation) {
    if (kernel >= 4) return find_moving(kernel);
#ifndef EMULATION_SMALL
    if (element < 3) return find_0(kernel, element, operation);
    if (element < 7) return find_1(kernel, element, operation);
    if (element < 11) return find_2(kernel, element, operation);
#endif
    return find_3(kernel, element, operation);
}
