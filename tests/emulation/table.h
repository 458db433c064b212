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
Kernel find_push(unsigned kernel, unsigned element, unsigned operation);
Kernel find_multimem_0(unsigned kernel, unsigned element, unsigned operation);
Kernel find_multimem_1(unsigned kernel, unsigned element, unsigned operation);

constexpr unsigned PUSHES = 60;      // this kernel and the next are in pushes.cpp
constexpr unsigned MULTIMEMS = 100;  // these, and those from 200 on, are in multimems.cpp

inline Kernel find(unsigned kernel, unsigned element, unsigned operation) {
    if (kernel >= MULTIMEMS) {
#ifndef EMULATION_SMALL
        if (element < 9) return find_multimem_0(kernel, element, operation);
#endif
        return find_multimem_1(kernel, element, operation);
    }
    if (kernel >= PUSHES) return find_push(kernel, element, operation);
    if (kernel >= 4 && kernel < 40) return find_moving(kernel);
#ifndef EMULATION_SMALL
    if (element < 3) return find_0(kernel, element, operation);
    if (element < 7) return find_1(kernel, element, operation);
    if (element < 11) return find_2(kernel, element, operation);
#endif
    return find_3(kernel, element, operation);
}
