// Collectives that only move data, by stores into the outputs of peers: all_gather, all_to_all,
// broadcast, scatter, gather.
//
// Contract
//   memory    inputs are read by their own rank only and never staged; outputs are written by
//             peers: registered, or staged through scratch (exchange.cuh). Any alignment; element
//             is 1 byte or more, nothing is interpreted
//   in place  all_gather: the input may be row r of the output; gather: at the root; broadcast:
//             output is input at the root. all_to_all: output is input, then this rank's output
//             goes through scratch, so that nothing is overwritten before it was sent
//   order     see pushes.cuh
//   traffic   each byte crosses a link once; stores, because they beat loads where both directions
//             are busy
#include "pushes.cuh"
#include "select.cuh"

CUPY_ZC_KERNEL(all_gather) {
    using namespace cupy_zc;
    exchange(args, all_gather_shape(args),
             [&](const Part& part) { push_all_gather(args, part); });
}

CUPY_ZC_KERNEL(all_to_all) {
    using namespace cupy_zc;
    const bool kept = args.input != args.output;
    const Shape shape = {args.size, args.size, Reach::NOBODY, Reach::EVERYONE, kept};
    exchange(args, shape, [&](const Part& part) {
        push(args, part, true, args.rank, args.rank + 1, args.size);
    });
}

CUPY_ZC_KERNEL(broadcast) {
    using namespace cupy_zc;
    exchange(args, broadcast_shape(), [&](const Part& part) { push_broadcast(args, part); });
}

CUPY_ZC_KERNEL(scatter) {
    using namespace cupy_zc;
    const Shape shape = {args.size, 1, Reach::NOBODY, Reach::EVERYONE, true};
    exchange(args, shape, [&](const Part& part) {
        push(args, part, true, 0, args.rank + 1, args.rank == args.root ? args.size : 0);
    });
}

CUPY_ZC_KERNEL(gather) {
    using namespace cupy_zc;
    const Shape shape = {1, args.size, Reach::NOBODY, Reach::ROOT, true};
    exchange(args, shape,
             [&](const Part& part) { push(args, part, false, args.rank, args.root, 1); });
}
