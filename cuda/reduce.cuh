// Operations, and the fold of packs of all ranks.
//
// Contract
//   order     element by element in the order of the ranks, so that the result is bitwise the same
//             on all ranks and in every algorithm; 16-bit floats are rounded once, at the end
//   COUNT     a fold of COUNT elements ignores the others of a pack
#pragma once

#include "packs.cuh"

namespace cupy_zc {

#define CUPY_ZC_OPERATION_STRUCT(NAME, method)                     \
    struct NAME {                                                  \
        template <class E, class W>                                \
        static __device__ __forceinline__ W apply(W a, W b) {      \
            return Element<E>::method(a, b);                       \
        }                                                          \
        template <class E, class W>                                \
        static __device__ __forceinline__ W finish(W value, u32) { \
            return value;                                          \
        }                                                          \
    }
CUPY_ZC_OPERATION_STRUCT(Sum, sum);
CUPY_ZC_OPERATION_STRUCT(Prod, prod);
CUPY_ZC_OPERATION_STRUCT(Min, min);
CUPY_ZC_OPERATION_STRUCT(Max, max);
#undef CUPY_ZC_OPERATION_STRUCT

struct Avg {
    template <class E, class W>
    static __device__ __forceinline__ W apply(W a, W b) {
        return Element<E>::sum(a, b);
    }
    template <class E, class W>
    static __device__ __forceinline__ W finish(W value, u32 by) {
        return Element<E>::avg(value, by);
    }
};

template <class E_, class OPERATION>
struct Reduction {
    using E = E_;
    using Operation = OPERATION;
    static constexpr u32 BYTES = Element<E>::BYTES;
    static constexpr u32 IN_PACK = 16 / BYTES;

    template <u32 COUNT = IN_PACK>
    class Fold {
       public:
        __device__ __forceinline__ void start(const Pack& pack) {
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i) {
                total_[i] = element_of<E>(pack, i);
            }
        }
        __device__ __forceinline__ void add(const Pack& pack) {
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i) {
                total_[i] = OPERATION::template apply<E>(total_[i], element_of<E>(pack, i));
            }
        }
        __device__ __forceinline__ Pack result(u32 ranks) const {
            Pack pack = {0, 0};
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i) {
                put<E>(pack, i, OPERATION::template finish<E>(total_[i], ranks));
            }
            return pack;
        }

       private:
        typename Element<E>::Wide total_[COUNT];
    };
};

}  // namespace cupy_zc
