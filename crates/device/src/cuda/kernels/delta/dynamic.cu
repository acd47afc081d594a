// Convolutions with weights of each token's own, and their gradients: see cpu/delta/dynamic.rs.

// The usual number of taps, and the columns of a thread: whose weights are eight numbers.
#define FOUR 4
#define PAIR 2

// A token's weights of some columns as they lie in memory, those of a column side by side.
template <class T> using Taps = Pack<T, PAIR * FOUR>;

template <class T> __device__ __forceinline__ Taps<T> fetch_taps(const T *from) {
    return *reinterpret_cast<const Taps<T> *>(from);
}

template <class T> __device__ __forceinline__ float tap(const Parameters &p, i64 token, i64 col, int j) {
    return widen(*element<T>(p.weights, token, col * p.taps + j));
}

template <class T> __device__ __forceinline__ float sum_of(const Parameters &p, const Piece &piece, int token, i64 col) {
    float sum = 0.0f;
    for (int j = 0; j < p.taps; j++) {
        float x[1];
        load_row<1, T>(p, piece, token - ((int)p.taps - 1) + j, col, x);
        sum = fmaf(tap<T>(p, token, col, j), x[0], sum);
    }
    return sum;
}

template <class T>
__device__ __forceinline__ float sum_of_taps(const Taps<T> &w, const float (&x)[FOUR][PAIR], int i) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < FOUR; j++) sum = fmaf(widen(w.at[i * FOUR + j]), x[j][i], sum);
    return sum;
}

template <class T> __device__ __forceinline__ void convolve_four(const Parameters &p) {
    FIND_COLUMNS(PAIR);
    each_piece(p, [&](const Piece &piece) {
        float x[FOUR][PAIR];
#pragma unroll
        for (int j = 1; j < FOUR; j++) load_row<PAIR, T>(p, piece, piece.first - FOUR + j, col, x[j]);
        each_group(piece.first, piece.last, piece.first, piece.last, [&](int token, bool looks) {
            auto is_there = [&](int u) { return !looks || token + u < piece.last; };
            const T *from = element<T>(p.x, token, col), *w_from = element<T>(p.weights, token, col * FOUR);
            T *to = element<T>(p.out, token, col);
            Pack<T, PAIR> next[AT_ONCE];
            Taps<T> w[AT_ONCE];
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                if (is_there(u)) {
                    next[u] = fetch<T, PAIR>(from);
                    w[u] = fetch_taps(w_from);
                }
                from += p.x.stride;
                w_from += p.weights.stride;
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                append(x, next[u]);
                float out[PAIR];
#pragma unroll
                for (int i = 0; i < PAIR; i++) out[i] = silu<T>(sum_of_taps(w[u], x, i));
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

template <class T> __device__ __forceinline__ void differentiate_four(const Parameters &p) {
    FIND_COLUMNS(PAIR);
    each_piece(p, [&](const Piece &piece) {
        // x up to the token, and what its readers so far have added to the gradients of these rows.
        float x[FOUR][PAIR], dx[FOUR][PAIR] = {};
#pragma unroll
        for (int j = 1; j < FOUR; j++) load_row<PAIR, T>(p, piece, piece.first - FOUR + j, col, x[j]);
        int end = piece.last + FOUR - 1, readers = min(end, piece.end);
        each_group(piece.first, end, piece.first + FOUR - 1, piece.last, [&](int token, bool looks) {
            const T *x_from = element<T>(p.x, token, col), *d_from = element<T>(p.dout, token, col);
            const T *w_from = element<T>(p.weights, token, col * FOUR);
            T *to = element<T>(p.dx, token - (FOUR - 1), col), *w_to = element<T>(p.dweights, token, col * FOUR);
            Pack<T, PAIR> next_x[AT_ONCE], next_d[AT_ONCE];
            Taps<T> w[AT_ONCE];
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                if (!looks || token + u < readers) {
                    next_x[u] = fetch<T, PAIR>(x_from);
                    next_d[u] = fetch<T, PAIR>(d_from);
                    w[u] = fetch_taps(w_from);
                }
                x_from += p.x.stride;
                d_from += p.dout.stride;
                w_from += p.weights.stride;
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                bool reads = !looks || token + u < readers;
                append(x, next_x[u]);
                drop_first(dx);
                float dw[PAIR * FOUR];
#pragma unroll
                for (int i = 0; i < PAIR; i++) {
                    float slope = silu_derivative<T>(sum_of_taps(w[u], x, i));
                    float du = reads ? widen(next_d[u].at[i]) * slope : 0.0f;
                    dx[FOUR - 1][i] = 0.0f;
#pragma unroll
                    for (int j = 0; j < FOUR; j++) {
                        if (reads) dx[j][i] = fmaf(widen(w[u].at[i * FOUR + j]), du, dx[j][i]);
                        dw[i * FOUR + j] = du * x[j][i];
                    }
                }
                if (!looks || token + u < piece.last) {
                    const int width = sizeof(T) == 2 ? PAIR * FOUR : FOUR;
#pragma unroll
                    for (int i = 0; i < PAIR * FOUR; i += width)
                        put(w_to + i, reinterpret_cast<const float(&)[width]>(dw[i]));
                }
                w_to += p.dweights.stride;
                int at = token + u - (FOUR - 1);
                if (!looks || (at >= piece.first && at < piece.last)) put(to, dx[0]);
                to += p.dx.stride;
            }
        });
    });
}

template <class T> __device__ __forceinline__ void differentiate_any(const Parameters &p) {
    FIND_COLUMNS(1);
    int last_tap = p.taps - 1;
    auto slope = [&](const Piece &piece, int token) {
        return widen(*element<T>(p.dout, token, col)) * silu_derivative<T>(sum_of<T>(p, piece, token, col));
    };
    each_piece(p, [&](const Piece &piece) {
        for (int token = piece.first; token < piece.last; token++) {
            float dx = 0.0f;
            for (int j = last_tap; j >= 0; j--) {
                int reader = token + last_tap - j;
                if (reader < piece.end) dx = fmaf(tap<T>(p, reader, col, j), slope(piece, reader), dx);
            }
            *element<T>(p.dx, token, col) = narrow<T>(dx);
            float du = slope(piece, token);
            for (int j = 0; j <= last_tap; j++) {
                float x[1];
                load_row<1, T>(p, piece, token - last_tap + j, col, x);
                *element<T>(p.dweights, token, col * p.taps + j) = narrow<T>(du * x[0]);
            }
        }
    });
}

#define CONVOLUTIONS(T, NAME) \
    extern "C" __global__ void __launch_bounds__(THREADS) dynamic_conv_four_##NAME(const __grid_constant__ Parameters p) { \
        convolve_four<T>(p); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS) dynamic_conv_any_##NAME(const __grid_constant__ Parameters p) { \
        convolve_any<T>(p); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS) dynamic_conv_backward_four_##NAME( \
        const __grid_constant__ Parameters p) { \
        differentiate_four<T>(p); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS) dynamic_conv_backward_any_##NAME( \
        const __grid_constant__ Parameters p) { \
        differentiate_any<T>(p); \
    }
CONVOLUTIONS(float, f32)
CONVOLUTIONS(bf16, bf16)
FOR_TYPES(LEAVE)
