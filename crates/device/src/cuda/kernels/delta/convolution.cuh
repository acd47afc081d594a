// What the convolutions have in common. A thread has a few columns and goes through a run of tokens, whose neighbours it keeps.

#define MOST_SEGMENTS 384
#define MOST_TAPS 16
#define THREADS 128
// Tokens whose rows are fetched at once.
#define AT_ONCE 4

// Mirrored by `Parameters` in delta/convolution.rs.
struct Parameters {
    // [T, C], and the gradients of `out` and x.
    Matrix<void> x, out, dout, dx;
    // [C, W], or [T, C · W] and its gradient.
    Matrix<void> weights, dweights;
    // [segments · (W - 1), C]; 0 for none.
    Matrix<void> past;
    // f32 [runs, C · W], or 0.
    float *partials;
    u32 cols, taps;
    // Tokens of a run, and the first run of this launch.
    u32 run, first_run;
    u32 first_segment, segments;
    u32 offsets[MOST_SEGMENTS + 1];
    u32 unused;
};

template <class T> __device__ __forceinline__ T *element(const Matrix<void> &matrix, i64 row, i64 col) {
    return (T *)matrix.first + row * matrix.stride + col;
}

// A segment's tokens, and those of them that are a run's.
struct Piece {
    int segment, start, end;
    int first, last;
};

// Evaluates `body` for each segment that has tokens of the block's run.
template <class Body> __device__ __forceinline__ void each_piece(const Parameters &p, Body body) {
    u32 begin = p.offsets[0] + blockIdx.y * p.run, end = min(begin + p.run, p.offsets[p.segments]);
    u32 low = 0, high = p.segments - 1;
    while (low < high) {
        u32 middle = (low + high + 1) / 2;
        if (p.offsets[middle] <= begin)
            low = middle;
        else
            high = middle - 1;
    }
    for (u32 segment = low; segment < p.segments && p.offsets[segment] < end; segment++) {
        Piece piece = {(int)segment, (int)p.offsets[segment], (int)p.offsets[segment + 1]};
        piece.first = max(piece.start, (int)begin);
        piece.last = min(piece.end, (int)end);
        if (piece.first < piece.last) body(piece);
    }
}

// The row of a segment's token, or one of the past before it, or zeros.
template <int N, class T>
__device__ __forceinline__ void load_row(const Parameters &p, const Piece &piece, int token, i64 col, float (&to)[N]) {
    int before = piece.start - token;
    if (before <= 0) {
        load<N>(element<T>(p.x, token, col), N, to);
    } else if (p.past.first) {
        i64 row = ((i64)p.first_segment + piece.segment + 1) * (p.taps - 1) - before;
        load<N>(element<T>(p.past, row, col), N, to);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = 0.0f;
    }
}

// Some columns as they lie in memory: half as many registers hold bf16 so.
template <class T, int N> __device__ __forceinline__ Pack<T, N> fetch(const T *from) {
    return *reinterpret_cast<const Pack<T, N> *>(from);
}

// Stores whole columns at once. The compiler took `store` apart here, into a store for each element.
template <class T, int N> __device__ __forceinline__ void put(T *to, const float (&from)[N]) {
    const int count = sizeof(T) * N / 4;
    if constexpr (count == 0) {
        *to = narrow<T>(from[0]);
    } else {
        u32 words[count];
#pragma unroll
        for (int i = 0; i < count; i++)
            words[i] = sizeof(T) == 2 ? rounded_pair(from[2 * i % N], from[(2 * i + 1) % N]) : __float_as_uint(from[i]);
        if constexpr (count == 4)
            store_four(to, words);
        else if constexpr (count == 2)
            store_two(to, words[0], words[1]);
        else
            *reinterpret_cast<u32 *>(to) = words[0];
    }
}

// Drops the first of several rows and appends another.
template <int ROWS, int N> __device__ __forceinline__ void drop_first(float (&rows)[ROWS][N]) {
#pragma unroll
    for (int j = 0; j + 1 < ROWS; j++)
#pragma unroll
        for (int i = 0; i < N; i++) rows[j][i] = rows[j + 1][i];
}

template <int ROWS, class T, int N> __device__ __forceinline__ void append(float (&rows)[ROWS][N], const Pack<T, N> &row) {
    drop_first(rows);
#pragma unroll
    for (int i = 0; i < N; i++) rows[ROWS - 1][i] = widen(row.at[i]);
}

// Evaluates `body(token, whether it has to look which are there)` for the first of AT_ONCE tokens at a time, up to `end`. All are there
// from `all_from` to `all_to`.
template <class Body>
__device__ __forceinline__ void each_group(int first, int end, int all_from, int all_to, Body body) {
    for (int token = first; token < end; token += AT_ONCE) {
        // Two constants: two loops' bodies.
        if (token >= all_from && token + AT_ONCE <= all_to)
            body(token, false);
        else
            body(token, true);
    }
}

template <class T> __device__ __forceinline__ float silu(float x) { return activate<Rounded<T>::value>(0, x); }
template <class T> __device__ __forceinline__ float silu_derivative(float x) {
    return activate_derivative<Rounded<T>::value>(0, x);
}

// The thread's first column; their number is a multiple of N.
#define FIND_COLUMNS(N) \
    i64 col = ((i64)blockIdx.x * THREADS + threadIdx.x) * (N); \
    if (col >= p.cols) return

// Leaves each segment's last rows as its past: those that a token behind it would read. A thread has columns of a segment.
#define LEAVE(T, NAME, N) \
    extern "C" __global__ void leave_rows_##NAME##_##N(const __grid_constant__ Parameters p) { \
        FIND_COLUMNS(N); \
        int segment = blockIdx.y, start = p.offsets[segment], end = p.offsets[segment + 1]; \
        if (start == end) return; \
        i64 first = ((i64)p.first_segment + segment) * (p.taps - 1); \
        for (int row = 0; row + 1 < p.taps; row++) { \
            int token = end - ((int)p.taps - 1) + row; \
            const T *from = token >= start ? element<T>(p.x, token, col) \
                                           : element<T>(p.past, first + (p.taps - 1) + (token - start), col); \
            move<N>(from, element<T>(p.past, first + row, col), N); \
        } \
    }
