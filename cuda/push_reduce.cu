// Reductions of large arrays by stores alone, in two hops and a pipeline: push_reduce (all-reduce,
// and reduce to a root) and push_reduce_scatter. Links carry stores faster than loads where both
// directions are busy.
//
// Contract
//   slices    rank r reduces slice r of all arrays, in pieces: pieces.cuh
//   hop 1     the sender copies piece n of its own input's slice p to a slot at rank p, for all p
//   hop 2     the receiver waits for piece n of all peers, folds it with its own input's in rank
//             order, and stores the result: to all outputs, the root's, or its own alone
//   one hop   all-reduce of two ranks where an output is STAGED: each sends all of its input, and
//             folds all for itself. It writes no output of a peer, and sends no more than two hops
//   order     of slots and flags: rings.cuh. Nobody returns before its output is whole: receivers
//             of a pair meet at the end, after all their stores, where those went to peers
//   memory    inputs are read by their own rank only: never staged, any memory. Outputs that peers
//             write must be registered. Where another one is staged, or there are no slots (one
//             rank, one block, little scratch), all ranks take the shots of shots.cuh through
//             exchange.cuh. Any alignment; 16-byte accesses where arrays are aligned to 16
//   in place  output is input (reduce_scatter: row r of it). A piece of slice p in a rank's output
//             is overwritten by rank p once it folded that piece, for which that rank's sender had
//             read and released it. The own slice is sent to nobody: the thread that stores an
//             element is the one that read it before. In one hop the own sender reads all of the
//             input: the receiver waits for it as it does for that of the peer
//   result    in rank order, each element reduced once: the same bits as two_shot.cu gives
//   launch    an even grid, as half of the blocks send and half receive
#include "pieces.cuh"
#include "select.cuh"
#include "shots.cuh"

namespace cupy_zc {

// Whether what a receiver writes may be what the sender beside it has yet to read.
template <Cutting HOW>
constexpr bool OWN = HOW == Cutting::WHOLE;

// Whole warps share the peers out among them, so that pieces go to several at a time.
template <Cutting HOW>
static __device__ __forceinline__ void send(const Args& args, const Cut& cut, const Flags& flags) {
    const u32 peers = args.size - 1;
    const Teams teams = in_teams(peers);
    for (u64 piece = 0; piece < cut.pieces; ++piece) {
        if (piece >= DEPTH && !flags.await(piece - DEPTH + 1)) {
            return;
        }
        for (u32 i = teams.index; i < peers; i += teams.count) {
            const u32 peer = (args.rank + 1 + i) % args.size;
            copy(teams.own, slot_of(args, peer, args.rank, piece),
                 args.input + in_array<HOW>(args, cut, peer, piece),
                 columns<HOW>(args, cut, peer, piece) * args.element);
        }
        flags.signal<OWN<HOW>>(piece + 1);
    }
}

// The output, of those that the result goes to, that the thread of number `index` has in mind. Each
// rank starts with another.
template <Cutting HOW>
static __device__ __forceinline__ u64 target_of(const Args& args, const Places& places, u32 index) {
    const u32 to = args.root == EVERY_RANK ? (args.rank + 1 + index) % args.size : args.root;
    const bool own = HOW != Cutting::SLICES || index >= args.size;
    return own ? args.output : address_of(args, to, places.output[to]);
}

template <class R, Cutting HOW>
static __device__ __forceinline__ void receive(const Args& args, const Cut& cut,
                                               const Places& places, u64 epoch,
                                               const Flags& flags, Bases& bases) {
    const u32 rank = threadIdx.x;
    const u64 target = target_of<HOW>(args, places, rank);
    if (rank == 0) {
        bases.sources = args.size;
        bases.targets = HOW != Cutting::SLICES || args.root != EVERY_RANK ? 1 : args.size;
    }
    for (u64 piece = 0; piece < cut.pieces; ++piece) {
        if (!flags.await<OWN<HOW>>(piece + 1)) {
            return;
        }
        const u64 at = in_array<HOW>(args, cut, args.rank, piece);
        if (rank < args.size) {
            bases.source[rank] =
                rank == args.rank ? args.input + at : slot_of(args, args.rank, rank, piece);
            bases.target[rank] = target + (HOW == Cutting::ROWS ? in_slice(args, cut, piece) : at);
        }
        __syncthreads();
        fold_all<R>(bases, columns<HOW>(args, cut, args.rank, piece));
        if (piece + DEPTH < cut.pieces) {  // somebody waits for this slot
            flags.signal(piece + 1);
        }
    }
    if (HOW == Cutting::SLICES) {
        meet(args, epoch, 1);
    }
}

template <class R, Cutting HOW>
static __device__ __forceinline__ void push_pieces(const Args& args, Cut& cut,
                                                   const Places& places, u64 epoch, Bases& bases) {
    if (threadIdx.x == 0) {
        cut_up<HOW>(args, cut);
    }
    __syncthreads();
    const Flags flags(args, epoch);
    if (sends()) {
        send<HOW>(args, cut, flags);
    } else {
        receive<R, HOW>(args, cut, places, epoch, flags, bases);
    }
}

template <class R, bool SCATTER>
static __device__ __forceinline__ void push_reduce(const Args& args) {
    CUPY_ZC_SHARED(Places, places);
    CUPY_ZC_SHARED(Cut, cut);
    CUPY_ZC_SHARED(Bases, bases);
    Bases& shared = bases;
    const Shape shape = SCATTER ? reduce_scatter_shape(args) : two_shot_shape(args);
    const u64 epoch = negotiate(args, shape, places);
    if (epoch == 0) {
        return;
    }
    const bool staged = any_staged(args, places.output, shape.written);
    const bool whole = !SCATTER && staged && args.size == 2 && args.root == EVERY_RANK;
    if (slot_bytes(args) == 0 || (staged && !whole)) {
        exchange_agreed(args, shape, epoch, places, [&](const Part& part) {
            if (SCATTER) {
                reduce_scatter_part<R>(args, part, shared);
            } else {
                two_shot_part<R>(args, part, shared);
            }
        });
    } else if (whole) {
        push_pieces<R, Cutting::WHOLE>(args, cut, places, epoch, shared);
    } else {
        push_pieces<R, SCATTER ? Cutting::ROWS : Cutting::SLICES>(args, cut, places, epoch, shared);
    }
}

}  // namespace cupy_zc

CUPY_ZC_KERNEL(push_reduce) { cupy_zc::push_reduce<cupy_zc::Selected, false>(args); }
CUPY_ZC_KERNEL(push_reduce_scatter) { cupy_zc::push_reduce<cupy_zc::Selected, true>(args); }
