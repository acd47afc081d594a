// A product for each expert, of its rows offsets[e] .. offsets[e + 1]: see GroupedProduct in kernel/experts.rs.
//
// A block finds its expert and its tile of the output in the offsets; the grid follows from the shapes alone, so some blocks find
// nothing. Both operands are read tile by tile along the summed dimension. A tile lies in shared memory as in its matrix: its rows
// run along that dimension, or across it.

// A block's expert, the rows of the pairs in its tile or of the whole expert, and the tile's place in the expert's output.
struct Tile {
    int expert;
    i64 begin, end;
    i64 row, col;
};

// Tiles of `height` rows: expert e begins with tile (offsets[e] - offsets[0]) / height + e, so a few at the experts' ends are empty.
__device__ __forceinline__ i64 first_tile(const Operands &p, int expert, int height) {
    return ((i64)p.offsets[expert] - (i64)p.offsets[0]) / height + expert;
}

template <int ORDER> __device__ __forceinline__ bool find_tile(const Operands &p, int height, int width, Tile &tile) {
    tile.col = (i64)blockIdx.y * width;
    if (ORDER == TN) {
        tile.expert = blockIdx.z;
        tile.row = (i64)blockIdx.x * height;
        return rows_of(p, tile.expert, tile.begin, tile.end);
    }
    __shared__ int found;
    if (threadIdx.x == 0) found = -1;
    __syncthreads();
    i64 number = blockIdx.x;
    for (int expert = threadIdx.x; expert < p.experts; expert += blockDim.x) {
        i64 begin, end;
        // Where offsets descend, tiles may belong to nobody: one block looks at all of them.
        if (number == 0) rows_of(p, expert, begin, end);
        if (first_tile(p, expert, height) <= number && number < first_tile(p, expert + 1, height)) found = expert;
    }
    __syncthreads();
    tile.expert = found;
    if (found < 0) return false;
    i64 begin, end;
    if (!rows_of(p, tile.expert, begin, end)) return false;
    tile.row = begin + (number - first_tile(p, tile.expert, height)) * height;
    tile.begin = tile.row;
    tile.end = end;
    return tile.row >= begin && tile.row < end;
}

// Where an operand's tile of the summed dimension begins: rows along it, or across it.
template <class T> struct Source {
    const T *first;
    i64 stride;
    // Rows and columns that are left from `first` on.
    i64 rows, cols;
};

template <int ORDER, class T>
__device__ __forceinline__ Source<T> left_of(const Operands &p, const Tile &tile, Matrix<T> a) {
    if (ORDER == TN) return {a.at(tile.begin, tile.row), a.stride, tile.end - tile.begin, p.inner - tile.row};
    return {a.at(tile.row, 0), a.stride, tile.end - tile.row, p.inner};
}

template <int ORDER, class T>
__device__ __forceinline__ Source<T> right_of(const Operands &p, const Tile &tile, Matrix<T> b) {
    if (ORDER == NT) return {b.at(tile.expert * p.n + tile.col, 0), b.stride, p.n - tile.col, p.inner};
    if (ORDER == NN) return {b.at(tile.expert * p.inner, tile.col), b.stride, p.inner, p.n - tile.col};
    return {b.at(tile.begin, tile.col), b.stride, tile.end - tile.begin, p.n - tile.col};
}

// Rows of the output tile, and its first element's row in the output.
template <int ORDER> __device__ __forceinline__ i64 out_rows(const Operands &p, const Tile &tile) {
    return ORDER == TN ? p.inner - tile.row : tile.end - tile.row;
}

template <int ORDER> __device__ __forceinline__ i64 out_row(const Operands &p, const Tile &tile) {
    return ORDER == TN ? tile.expert * p.inner + tile.row : tile.row;
}

template <int ORDER> __device__ __forceinline__ i64 depth_of(const Operands &p, const Tile &tile) {
    return ORDER == TN ? tile.end - tile.begin : p.inner;
}

// Tensor cores: 128 × 128 sums of a block, 64 × 32 of each of its eight warps.
#define HEIGHT 128
#define WIDTH 128
#define DEPTH 32
#define THREADS 256
// Tiles under way: two are fetched while one is used.
#define STAGES 3
// 16 bytes more than a whole number of banks, so that eight rows of a matrix lie in different ones.
#define ALONG_PITCH (DEPTH + 8)
#define ACROSS_PITCH (HEIGHT + 8)
#define TILE_ELEMENTS (HEIGHT * ALONG_PITCH)

// Copies up to 16 bytes to shared memory, and zeros behind them.
__device__ __forceinline__ void copy_some(void *to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}

// Begins to copy a tile [ROWS, COLS] to shared memory; what the source has not is zero.
template <int ROWS, int COLS>
__device__ __forceinline__ void fetch(const Operands &p, const Source<u16> &from, i64 row, i64 col, u16 *to) {
    const int pitch = COLS + 8;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * COLS / 8; i += THREADS) {
        int down = i / (COLS / 8), across = i % (COLS / 8) * 8;
        i64 left = from.cols - (col + across);
        int count = row + down >= from.rows || left <= 0 ? 0 : left < 8 ? (int)left : 8;
        const u16 *source = count ? from.first + (row + down) * from.stride + col + across : from.first;
        u16 *place = to + down * pitch + across;
        if (p.aligned) {
            copy_some(place, source, 2 * count);
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) place[j] = j < count ? source[j] : (u16)0;
        }
    }
}

template <int ORDER>
__device__ __forceinline__ void fetch_both(const Operands &p, const Source<u16> &left, const Source<u16> &right, i64 step,
                                           u16 *tiles) {
    i64 at = step * DEPTH;
    if (ORDER == TN)
        fetch<DEPTH, HEIGHT>(p, left, at, 0, tiles);
    else
        fetch<HEIGHT, DEPTH>(p, left, 0, at, tiles);
    if (ORDER == NT)
        fetch<WIDTH, DEPTH>(p, right, 0, at, tiles + TILE_ELEMENTS);
    else
        fetch<DEPTH, WIDTH>(p, right, at, 0, tiles + TILE_ELEMENTS);
}

// The lane's row of four 8 × 8 matrices: the second is below the first, or beside it.
__device__ __forceinline__ const u16 *below(const u16 *tile, int pitch, int row, int col) {
    int lane = threadIdx.x % 32;
    return tile + (row + lane % 16) * pitch + col + lane / 16 * 8;
}

__device__ __forceinline__ const u16 *beside(const u16 *tile, int pitch, int row, int col) {
    int lane = threadIdx.x % 32;
    return tile + (row + lane % 8 + lane / 16 * 8) * pitch + col + lane / 8 % 2 * 8;
}

template <int ORDER>
__device__ __forceinline__ void multiply_tiles(const u16 *left, const u16 *right, int row, int col, float (&sums)[4][4][4]) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        u32 rows[4][4], columns[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (ORDER == TN)
                load_transposed(rows[i], beside(left, ACROSS_PITCH, k, row + i * 16));
            else
                load_matrices(rows[i], below(left, ALONG_PITCH, row + i * 16, k));
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (ORDER == NT)
                load_matrices(columns[j], beside(right, ALONG_PITCH, col + j * 16, k));
            else
                load_transposed(columns[j], below(right, ACROSS_PITCH, k, col + j * 16));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                multiply_add(sums[i][2 * j], rows[i], columns[j][0], columns[j][1]);
                multiply_add(sums[i][2 * j + 1], rows[i], columns[j][2], columns[j][3]);
            }
        }
    }
}

extern __shared__ __align__(16) u16 stages[];

template <int ORDER> __device__ __forceinline__ void product_bf16(const Operands &p, Matrix<u16> a, Matrix<u16> b) {
    Tile tile;
    if (!find_tile<ORDER>(p, HEIGHT, WIDTH, tile)) return;
    Source<u16> left = left_of<ORDER>(p, tile, a), right = right_of<ORDER>(p, tile, b);
    i64 steps = (depth_of<ORDER>(p, tile) + DEPTH - 1) / DEPTH;
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) fetch_both<ORDER>(p, left, right, step, stages + step * 2 * TILE_ELEMENTS);
        commit_copies();
    }
    int warp = threadIdx.x / 32, row = warp / 4 * 64, col = warp % 4 * 32;
    float sums[4][4][4] = {};
    int stage = 0;
    for (i64 step = 0; step < steps; step++) {
        wait_copies<STAGES - 2>();
        // All copies are there, and nobody reads the stage that is filled next.
        __syncthreads();
        int later = (stage + STAGES - 1) % STAGES;
        if (step + STAGES - 1 < steps)
            fetch_both<ORDER>(p, left, right, step + STAGES - 1, stages + later * 2 * TILE_ELEMENTS);
        commit_copies();
        const u16 *now = stages + stage * 2 * TILE_ELEMENTS;
        multiply_tiles<ORDER>(now, now + TILE_ELEMENTS, row, col, sums);
        stage = (stage + 1) % STAGES;
    }
    // Of a [16, 8] part a lane has two neighbours in row lane / 4, and two in the eighth row after that.
    int lane = threadIdx.x % 32;
    i64 rows = out_rows<ORDER>(p, tile), first = out_row<ORDER>(p, tile);
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int down = row + i * 16 + lane / 4 + half * 8;
            if (down >= rows) continue;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                i64 at = tile.col + col + j * 8 + lane % 4 * 2;
                finish_pair(p, first + down, at, sums[i][j][2 * half], sums[i][j][2 * half + 1]);
            }
        }
    }
}

// f32: 64 × 64 sums of a block, 4 × 4 of each thread. Both tiles lie in shared memory with the summed dimension downwards.
#define SIDE 64
#define F32_DEPTH 16
#define F32_PITCH (SIDE + 4)

// Copies F32_DEPTH of the summed dimension from `at` on.
template <bool ALONG>
__device__ __forceinline__ void copy_tile(const Source<float> &from, i64 at, float (&to)[F32_DEPTH][F32_PITCH]) {
    for (int i = threadIdx.x; i < SIDE * F32_DEPTH; i += THREADS) {
        int side = ALONG ? i / F32_DEPTH : i % SIDE, depth = ALONG ? i % F32_DEPTH : i / SIDE;
        i64 row = ALONG ? side : at + depth, col = ALONG ? at + depth : side;
        bool is_there = row < from.rows && col < from.cols;
        to[depth][side] = is_there ? from.first[row * from.stride + col] : 0.0f;
    }
}

template <int ORDER> __device__ __forceinline__ void product_f32(const Operands &p, Matrix<float> a, Matrix<float> b) {
    __shared__ __align__(16) float lefts[F32_DEPTH][F32_PITCH], rights[F32_DEPTH][F32_PITCH];
    Tile tile;
    if (!find_tile<ORDER>(p, SIDE, SIDE, tile)) return;
    Source<float> left = left_of<ORDER>(p, tile, a), right = right_of<ORDER>(p, tile, b);
    i64 depth = depth_of<ORDER>(p, tile);
    int row = threadIdx.x / 16 * 4, col = threadIdx.x % 16 * 4;
    float sums[4][4] = {};
    for (i64 at = 0; at < depth; at += F32_DEPTH) {
        copy_tile<ORDER != TN>(left, at, lefts);
        copy_tile<ORDER == NT>(right, at, rights);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < F32_DEPTH; k++) {
            float x[4], y[4];
            load<4>(&lefts[k][row], 4, x);
            load<4>(&rights[k][col], 4, y);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
        }
        __syncthreads();
    }
    i64 rows = out_rows<ORDER>(p, tile), first = out_row<ORDER>(p, tile);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (row + i >= rows) continue;
#pragma unroll
        for (int j = 0; j < 4; j += 2) finish_pair(p, first + row + i, tile.col + col + j, sums[i][j], sums[i][j + 1]);
    }
}

#define PRODUCTS(ORDER, NAME) \
    extern "C" __global__ void __launch_bounds__(THREADS) grouped_##NAME##_bf16( \
        const __grid_constant__ Operands p, Matrix<u16> a, Matrix<u16> b) { \
        product_bf16<ORDER>(p, a, b); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS) grouped_##NAME##_f32( \
        const __grid_constant__ Operands p, Matrix<float> a, Matrix<float> b) { \
        product_f32<ORDER>(p, a, b); \
    }
PRODUCTS(NT, nt)
PRODUCTS(NN, nn)
PRODUCTS(TN, tn)
