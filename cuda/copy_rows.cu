// Copies rows of one strided matrix to rows of another one, as a table says: row table[i].source of
// the source to row table[i].target of the target, for all i.
//
// Contract
//   sizes     all in bytes, none limited to 32 bits. Row r begins r * pitch after the address of its
//             matrix, and `width` bytes of it are copied; nothing else of the target is written
//   memory    of this device. Target rows overlap neither each other nor a source row that is read;
//             one source row may go to several target rows. The table lies in memory that nobody
//             writes while the kernel runs
//   aligned   nothing need be. Rows whose two addresses agree modulo 16 are copied 16 bytes at a
//             time, with bytes at their edges; others in what both addresses and the width are
//             multiples of. Nothing is interpreted
//   share     rows are cut into pieces, and a team of 1 to 32 lanes takes a piece at a time: so a few
//             wide rows use the whole grid as well as many narrow ones do
//   shut      where this word of the device is not 0, nothing is read or written, the table neither:
//             the graph that replays it has outlived its communicator. The host writes it, beside
//             no launch
//   launch    any one-dimensional grid, a multiple of 32 threads up to 512. Waits for nobody
#include "memory.cuh"

namespace cupy_zc {

struct RowPair {
    u64 source, target;
};
static_assert(sizeof(RowPair) == 16, "the host writes a table of pairs of 8 bytes each");

constexpr u32 MOST_LANES = 32;
constexpr u64 PIECE = MOST_LANES * 64;  // four accesses of 16 bytes a lane, all in flight at once
static_assert(PIECE % 16 == 0, "pieces of a row start where its 16-byte accesses do");

// Lanes of a team: no more than have an access each. `places` is a multiple of what all addresses
// and sizes are multiples of.
static __device__ __forceinline__ u32 lanes_of(u64 places, u64 width) {
    const u64 unit = (places | 16) & (~(places | 16) + 1);  // the lowest bit
    u32 lanes = 1;
    while (lanes < MOST_LANES && lanes * unit < width) {
        lanes *= 2;
    }
    return lanes;
}

}  // namespace cupy_zc

extern "C" __global__ void __launch_bounds__(512, 1)
    copy_rows(const cupy_zc::RowPair* table, cupy_zc::u64 rows, cupy_zc::u64 target,
              cupy_zc::u64 target_pitch, cupy_zc::u64 source, cupy_zc::u64 source_pitch,
              cupy_zc::u64 width, const cupy_zc::u32* shut) {
    using namespace cupy_zc;
    if (*shut != 0) {
        return;
    }
    const u32 lanes = lanes_of(target | target_pitch | source | source_pitch | width, width);
    const Team team = {threadIdx.x % lanes, lanes};
    const u64 teams = gridDim.x * static_cast<u64>(blockDim.x / lanes);
    const u64 first = (blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x) / lanes;
    // Pieces end at multiples of 16 in the target, so one more of them may hold the rest of a row.
    const u64 pieces = ceiling(width + 15, PIECE);
    const u64 row_step = teams / pieces, piece_step = teams % pieces;
    u64 row = first / pieces, piece = first % pieces;
    while (row < rows) {
        const u64 to = target + table[row].target * target_pitch;
        const u64 from = source + table[row].source * source_pitch;
        const u64 skew = to % 16, start = piece * PIECE;
        const u64 begin = piece == 0 ? 0 : least(start - skew, width);
        copy(team, to + begin, from + begin, least(start + PIECE - skew, width) - begin);
        row += row_step;
        piece += piece_step;  // instead of a division for each piece
        if (piece >= pieces) {
            piece -= pieces;
            ++row;
        }
    }
}
