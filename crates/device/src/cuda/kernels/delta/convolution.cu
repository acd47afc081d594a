// Causal convolutions of each column over a few tokens, and their gradients: see cpu/delta/convolution.rs.

// The usual number of taps.
#define FOUR 4

// w[j][i]: tap j of column i.
template <int N, class T> __device__ __forceinline__ void load_taps(const Parameters &p, i64 col, float (&w)[FOUR][N]) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < FOUR; j++) w[j][i] = widen(*element<T>(p.weights, col + i, j));
}

template <class T> __device__ __forceinline__ float tap(const Parameters &p, i64 col, int j) {
    return widen(*element<T>(p.weights, col, j));
}

// u of a token, of any number of taps.
template <class T> __device__ __forceinline__ float sum_of(const Parameters &p, const Piece &piece, int token, i64 col) {
    float sum = 0.0f;
    for (int j = 0; j < p.taps; j++) {
        float x[1];
        load_row<1, T>(p, piece, token - ((int)p.taps - 1) + j, col, x);
        sum = fmaf(tap<T>(p, col, j), x[0], sum);
    }
    return sum;
}

template <int N> __device__ __forceinline__ float sum_of_four(const float (&w)[FOUR][N], const float (&x)[FOUR][N], int i) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < FOUR; j++) sum = fmaf(w[j][i], x[j][i], sum);
    return sum;
}

template <class T, int N> __device__ __forceinline__ void convolve_four(const Parameters &p) {
    FIND_COLUMNS(N);
    float w[FOUR][N];
    load_taps<N, T>(p, col, w);
    each_piece(p, [&](const Piece &piece) {
        float x[FOUR][N];
#pragma unroll
        for (int j = 1; j < FOUR; j++) load_row<N, T>(p, piece, piece.first - FOUR + j, col, x[j]);
        each_group(piece.first, piece.last, piece.first, piece.last, [&](int token, bool looks) {
            const T *from = element<T>(p.x, token, col);
            T *to = element<T>(p.out, token, col);
            auto is_there = [&](int u) { return !looks || token + u < piece.last; };
            Pack<T, N> next[AT_ONCE];
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                if (is_there(u)) next[u] = fetch<T, N>(from);
                from += p.x.stride;
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                append(x, next[u]);
                float out[N];
#pragma unroll
                for (int i = 0; i < N; i++) out[i] = silu<T>(sum_of_four(w, x, i));
                if (is_there(u)) put(to, out);
                to += p.out.stride;
            }
        });
    });
}

template <class T> __device__ __forceinline__ void convolve_any(const Parameters &p) {
    FIND_COLUMNS(1);
    each_piece(p, [&](const Piece &piece) {
        for (int token = piece.first; token < piece.last; token++)
            *element<T>(p.out, token, col) = narrow<T>(silu<T>(sum_of<T>(p, piece, token, col)));
    });
}

template <class T, int N> __device__ __forceinline__ void differentiate_four(const Parameters &p) {
    FIND_COLUMNS(N);
    float w[FOUR][N], dw[FOUR][N] = {};
    load_taps<N, T>(p, col, w);
    each_piece(p, [&](const Piece &piece) {
        // x up to the token, and du of it and of the tokens before it.
        float x[FOUR][N], du[FOUR][N] = {};
#pragma unroll
        for (int j = 1; j < FOUR; j++) load_row<N, T>(p, piece, piece.first - FOUR + j, col, x[j]);
        // Later tokens read those of the run.
        int end = piece.last + FOUR - 1, readers = min(end, piece.end);
        each_group(piece.first, end, piece.first + FOUR - 1, piece.last, [&](int token, bool looks) {
            const T *x_from = element<T>(p.x, token, col), *d_from = element<T>(p.dout, token, col);
            T *to = element<T>(p.dx, token - (FOUR - 1), col);
            Pack<T, N> next_x[AT_ONCE], next_d[AT_ONCE];
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                if (!looks || token + u < readers) {
                    next_x[u] = fetch<T, N>(x_from);
                    next_d[u] = fetch<T, N>(d_from);
                }
                x_from += p.x.stride;
                d_from += p.dout.stride;
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                bool reads = !looks || token + u < readers, is_own = !looks || token + u < piece.last;
                append(x, next_x[u]);
                append(du, next_d[u]);
                float dx[N];
#pragma unroll
                for (int i = 0; i < N; i++) {
                    float &now = du[FOUR - 1][i];
                    now = reads ? now * silu_derivative<T>(sum_of_four(w, x, i)) : 0.0f;
                    dx[i] = 0.0f;
#pragma unroll
                    for (int j = 0; j < FOUR; j++) {
                        dx[i] = fmaf(w[j][i], du[FOUR - 1 - j][i], dx[i]);
                        if (is_own) dw[j][i] = fmaf(now, x[j][i], dw[j][i]);
                    }
                }
                int at = token + u - (FOUR - 1);
                if (!looks || (at >= piece.first && at < piece.last)) put(to, dx);
                to += p.dx.stride;
            }
        });
    });
    if (!p.partials) return;
    float *partials = p.partials + ((i64)(p.first_run + blockIdx.y) * p.cols + col) * FOUR;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < FOUR; j++) partials[i * FOUR + j] = dw[j][i];
}

template <class T> __device__ __forceinline__ void differentiate_any(const Parameters &p) {
    FIND_COLUMNS(1);
    float dw[MOST_TAPS] = {};
    int last_tap = p.taps - 1;
    auto slope = [&](const Piece &piece, int token) {
        return widen(*element<T>(p.dout, token, col)) * silu_derivative<T>(sum_of<T>(p, piece, token, col));
    };
    each_piece(p, [&](const Piece &piece) {
        for (int token = piece.first; token < piece.last; token++) {
            float dx = 0.0f;
            for (int j = last_tap; j >= 0; j--) {
                int reader = token + last_tap - j;
                if (reader < piece.end) dx = fmaf(tap<T>(p, col, j), slope(piece, reader), dx);
            }
            *element<T>(p.dx, token, col) = narrow<T>(dx);
            float du = slope(piece, token);
            for (int j = 0; j <= last_tap; j++) {
                float x[1];
                load_row<1, T>(p, piece, token - last_tap + j, col, x);
                dw[j] = fmaf(du, x[0], dw[j]);
            }
        }
    });
    if (!p.partials) return;
    float *partials = p.partials + ((i64)(p.first_run + blockIdx.y) * p.cols + col) * p.taps;
    for (int j = 0; j <= last_tap; j++) partials[j] = dw[j];
}

#define FOUR_TAPS(T, NAME, N) \
    extern "C" __global__ void __launch_bounds__(THREADS) short_conv_four_##NAME##_##N(const __grid_constant__ Parameters p) { \
        convolve_four<T, N>(p); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) short_conv_backward_four_##NAME##_##N( \
        const __grid_constant__ Parameters p) { \
        differentiate_four<T, N>(p); \
    }
// Vectors of four in bf16, too: those of eight took so many registers that too few loads were under way.
FOUR_TAPS(float, f32, 4)
FOUR_TAPS(float, f32, 1)
FOUR_TAPS(bf16, bf16, 4)
FOUR_TAPS(bf16, bf16, 1)

#define ANY_TAPS(T, NAME) \
    extern "C" __global__ void __launch_bounds__(THREADS) short_conv_any_##NAME(const __grid_constant__ Parameters p) { \
        convolve_any<T>(p); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS) short_conv_backward_any_##NAME( \
        const __grid_constant__ Parameters p) { \
        differentiate_any<T>(p); \
    }
ANY_TAPS(float, f32)
ANY_TAPS(bf16, bf16)
FOR_TYPES(LEAVE)

// Adds the runs' shares of the weights' gradients in order. Threads of a column share the runs.
extern "C" __global__ void __launch_bounds__(1024) short_conv_add(
    i64 cols, int taps, i64 runs, const float *partials, Matrix<float> dweight) {
    __shared__ float sums[32][33];
    i64 place = (i64)blockIdx.x * 32 + threadIdx.x, width = cols * taps;
    float sum = 0.0f;
    if (place < width) {
#pragma unroll 4
        for (i64 run = threadIdx.y; run < runs; run += 32) sum += partials[run * width + place];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = sum_of_warp(sums[threadIdx.x][threadIdx.y]);
    place = (i64)blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && place < width) *dweight.at(place / taps, place % taps) += sum;
}
