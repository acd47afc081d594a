// Tiles laid out for the products of warpgroups: rows of 64 bf16, 128 bytes, whose sixteen-byte chunks are exchanged by the
// row's number (chunk c of row r is at c ^ r % 8), so that neither rows nor columns crowd in a bank. Tiles begin at
// multiples of 1024 bytes.

#define WIDTH 64
#define ROW_BYTES 128
#define GROUP_THREADS 128
// A tile's description moves by this from sixteen columns or rows to the next.
#define NEXT_COLUMNS 2
#define NEXT_ROWS 128
#define HALF_COLUMNS 4

__device__ __forceinline__ u32 chunk_place(int row, int chunk) {
    return row * ROW_BYTES + (chunk ^ row % 8) * 16;
}

// Begins to copy rows [ROWS, 64] of a head to shared memory, by all of so many threads; rows from `end` on are zero.
template <int ROWS, int COPIERS>
__device__ __forceinline__ void fetch_tile(const Parameters &p, const Heads &heads, int head, i64 first, int start,
                                           int end, u32 to) {
    const u16 *from = (const u16 *)heads.address + head * heads.step;
    int chunk = threadIdx.x % 8, row = threadIdx.x / 8;
    const u16 *line = from + (first + start + row) * heads.stride + chunk * 8;
    to += chunk_place(row, chunk);
#pragma unroll
    for (int i = 0; i < ROWS; i += COPIERS / 8) {
        bool is_there = start + row + i < end && chunk * 8 < p.dim;
        copy_chunk(to + i * ROW_BYTES, line + i * heads.stride, is_there);
    }
}

// Stores sixteen rows and columns of a tile, a left operand of this warp.
__device__ __forceinline__ void store_left(const u32 (&from)[4], u32 tile, int row, int step) {
    int lane = threadIdx.x % LANES;
    store_matrices(from, tile + chunk_place(row + lane % 16, step * 2 + lane / 16));
}

// sums [64, 64] = 64 rows · tileᵀ. The rows lie in shared memory, too: kept in registers, which would spare reading them
// again, they were overwritten by NVRTC 13.0's code while they were still needed.
__device__ __forceinline__ void multiply(float (&sums)[8][4], u32 rows, u32 tile) {
    multiply_columns<false>(sums, described(rows), described(tile));
#pragma unroll
    for (int i = 1; i < 4; i++) {
        multiply_columns<true>(sums, described(rows) + i * NEXT_COLUMNS, described(tile) + i * NEXT_COLUMNS);
    }
}

// sums [64, 64] += left [64, 16 · STEPS] · tile.
template <int STEPS>
__device__ __forceinline__ void add_product(float (&sums)[8][4], const u32 (&left)[STEPS][4], u32 tile) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        multiply_add(sums, left[i], described(tile) + i * NEXT_ROWS);
    }
}
