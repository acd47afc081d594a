// RMS norms gated by a SiLU, and their gradients: see cpu/delta/gated_norm.rs. Each element is read before it is written, by the thread
// that writes it.

// The sum over as many neighbouring lanes as a row has: a power of two.
__device__ __forceinline__ float sum_of_lanes(float x, int lanes) {
#pragma unroll
    for (int other = 1; other < 32; other *= 2) {
        float sum = __shfl_xor_sync(0xffffffffu, x, other);
        x += other < lanes ? sum : 0.0f;
    }
    return x;
}

// Short rows: blockDim.x lanes, up to 32, have a vector each; blockDim.y rows lie side by side. Vectors are whole. Rows and vectors that are
// not there are zeros in the sums.
struct Row {
    i64 row;
    int col;
    bool is_there;
};

template <int N> __device__ __forceinline__ Row row_at(i64 row, i64 rows, i64 cols) {
    int col = threadIdx.x * N;
    return {row, col, row < rows && col < cols};
}

// Elements as they lie in memory: half as many registers hold bf16 so.
template <class T, int N> struct Held {
    Pack<T, N> pack = {};

    __device__ __forceinline__ void fetch(Matrix<T> from, const Row &at) {
        if (at.is_there)
            pack = *reinterpret_cast<const Pack<T, N> *>(from.at(at.row, at.col));
        else
            pack = {};
    }

    __device__ __forceinline__ void widen_to(float (&to)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = widen(pack.at[i]);
    }
};

template <int N> __device__ __forceinline__ void load_weight(const float *weight, i64 cols, float (&w)[N]) {
    Row at = row_at<N>(0, 1, cols);
#pragma unroll
    for (int i = 0; i < N; i++) w[i] = at.is_there ? weight[at.col + i] : 0.0f;
}

// 1 / √(mean + ε)
__device__ __forceinline__ float inverse_root(float mean, float epsilon) { return rsqrtf(mean + epsilon); }

// A block walks rows; the next ones are on their way meanwhile.
template <class T, int N>
__device__ __forceinline__ void norm_short(i64 rows, i64 cols, Matrix<T> x, Matrix<T> gate, const float *weight, float epsilon,
                                           Matrix<T> out, i64 rows_per_block) {
    i64 start = (i64)blockIdx.x * rows_per_block, end = start + rows_per_block < rows ? start + rows_per_block : rows;
    float w[N], share = 1.0f / cols;
    load_weight(weight, cols, w);
    Held<T, N> next_x, next_z;
    auto fetch = [&](i64 row) {
        Row at = row_at<N>(row + threadIdx.y, end, cols);
        next_x.fetch(x, at);
        next_z.fetch(gate, at);
    };
    fetch(start);
    for (i64 row = start; row < end; row += blockDim.y) {
        Row at = row_at<N>(row + threadIdx.y, end, cols);
        float v[N], z[N], squares = 0.0f;
        next_x.widen_to(v);
        next_z.widen_to(z);
        // Rows of this thread: nobody writes them meanwhile.
        fetch(row + blockDim.y);
#pragma unroll
        for (int i = 0; i < N; i++) squares = fmaf(v[i], v[i], squares);
        float scale = inverse_root(sum_of_lanes(squares, blockDim.x) * share, epsilon);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = v[i] * scale * (w[i] * activate<Rounded<T>::value>(0, z[i]));
        if (at.is_there) store<N>(out.at(at.row, at.col), N, v);
    }
}

template <class T, int N>
__device__ __forceinline__ void norm_long(i64 cols, Matrix<T> x, Matrix<T> gate, const float *weight, float epsilon, Matrix<T> out) {
    i64 row = blockIdx.x, step = (i64)blockDim.x * N;
    float squares = 0.0f;
    for (i64 col = threadIdx.x * N; col < cols; col += step) {
        float v[N];
        load<N>(x.at(row, col), cols - col < N ? (int)(cols - col) : N, v);
#pragma unroll
        for (int i = 0; i < N; i++) squares = fmaf(v[i], v[i], squares);
    }
    float scale = 1.0f / sqrtf(sum_of_block(squares) / cols + epsilon);
    for (i64 col = threadIdx.x * N; col < cols; col += step) {
        int count = cols - col < N ? (int)(cols - col) : N;
        float v[N], z[N], w[N];
        load<N>(x.at(row, col), count, v);
        load<N>(gate.at(row, col), count, z);
        load<N>(weight + col, count, w);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = v[i] * scale * w[i] * activate<Rounded<T>::value>(0, z[i]);
        store<N>(out.at(row, col), count, v);
    }
}

// silu(z), and its derivative in place of z.
template <bool ROUNDED, int N> __device__ __forceinline__ void open_gates(float (&z)[N], float (&gates)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        float sigma = sigmoid<ROUNDED>(z[i]);
        gates[i] = z[i] * sigma;
        z[i] = gates[i] * (1.0f - sigma) + sigma;
    }
}

// One vector's gradients, dx in place of x and dz in place of the derivative, given the row's sums; adds to the weight's.
template <int N>
__device__ __forceinline__ void differentiate(float (&v)[N], float (&slopes)[N], const float (&gates)[N], const float (&d)[N],
                                              const float (&w)[N], float scale, float mean, float (&dweight)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        float normal = v[i] * scale, gated = d[i] * gates[i];
        v[i] = scale * (gated * w[i] - normal * mean);
        slopes[i] *= d[i] * (w[i] * normal);
        dweight[i] = fmaf(gated, normal, dweight[i]);
    }
}

// A block walks rows and leaves its share of the weight's gradient in its row of `partials`.
template <class T, int N>
__device__ __forceinline__ void backward_short(i64 rows, i64 cols, Matrix<T> x, Matrix<T> gate, const float *weight, float epsilon,
                                               Matrix<T> dout, Matrix<T> dx, Matrix<T> dgate, i64 rows_per_block, float *partials) {
    extern __shared__ __align__(16) float sums[];
    i64 start = (i64)blockIdx.x * rows_per_block, end = start + rows_per_block < rows ? start + rows_per_block : rows;
    float w[N], dweight[N] = {}, share = 1.0f / cols;
    load_weight(weight, cols, w);
    Held<T, N> next_x, next_z, next_d;
    auto fetch = [&](i64 row) {
        Row at = row_at<N>(row + threadIdx.y, end, cols);
        next_x.fetch(x, at);
        next_z.fetch(gate, at);
        next_d.fetch(dout, at);
    };
    fetch(start);
    for (i64 row = start; row < end; row += blockDim.y) {
        Row at = row_at<N>(row + threadIdx.y, end, cols);
        float v[N], z[N], d[N], gates[N], squares = 0.0f, product = 0.0f;
        next_x.widen_to(v);
        next_z.widen_to(z);
        next_d.widen_to(d);
        // Rows of this thread: nobody writes them meanwhile.
        fetch(row + blockDim.y);
        open_gates<Rounded<T>::value>(z, gates);
#pragma unroll
        for (int i = 0; i < N; i++) {
            squares = fmaf(v[i], v[i], squares);
            product = fmaf(d[i] * gates[i] * w[i], v[i], product);
        }
        float scale = inverse_root(sum_of_lanes(squares, blockDim.x) * share, epsilon);
        float mean = sum_of_lanes(product, blockDim.x) * scale * share;
        differentiate(v, z, gates, d, w, scale, mean, dweight);
        if (!at.is_there) continue;
        store<N>(dx.at(at.row, at.col), N, v);
        store<N>(dgate.at(at.row, at.col), N, z);
    }
    if (!partials) return;
    // Rows that were walked side by side are added up in order.
    int width = blockDim.x * N;
#pragma unroll
    for (int i = 0; i < N; i++) sums[threadIdx.y * width + threadIdx.x * N + i] = dweight[i];
    __syncthreads();
    for (int col = threadIdx.y * blockDim.x + threadIdx.x; col < cols; col += blockDim.x * blockDim.y) {
        float sum = 0.0f;
        for (int row = 0; row < blockDim.y; row++) sum += sums[row * width + col];
        partials[blockIdx.x * cols + col] = sum;
    }
}

template <class T, int N>
__device__ __forceinline__ void backward_long(i64 rows, i64 cols, Matrix<T> x, Matrix<T> gate, const float *weight, float epsilon,
                                              Matrix<T> dout, Matrix<T> dx, Matrix<T> dgate, i64 rows_per_block, float *partials) {
    i64 start = (i64)blockIdx.x * rows_per_block, end = start + rows_per_block < rows ? start + rows_per_block : rows;
    i64 step = (i64)blockDim.x * N;
    float *shares = partials + blockIdx.x * cols;
    for (i64 row = start; row < end; row++) {
        float squares = 0.0f, product = 0.0f;
        for (i64 col = threadIdx.x * N; col < cols; col += step) {
            int count = cols - col < N ? (int)(cols - col) : N;
            float v[N], z[N], d[N], w[N], gates[N];
            load<N>(x.at(row, col), count, v);
            load<N>(gate.at(row, col), count, z);
            load<N>(dout.at(row, col), count, d);
            load<N>(weight + col, count, w);
            open_gates<Rounded<T>::value>(z, gates);
#pragma unroll
            for (int i = 0; i < N; i++) {
                squares = fmaf(v[i], v[i], squares);
                product = fmaf(d[i] * gates[i] * w[i], v[i], product);
            }
        }
        sums_of_block(squares, product);
        float scale = 1.0f / sqrtf(squares / cols + epsilon), mean = product * scale / cols;
        for (i64 col = threadIdx.x * N; col < cols; col += step) {
            int count = cols - col < N ? (int)(cols - col) : N;
            float v[N], z[N], d[N], w[N], gates[N], dweight[N] = {};
            load<N>(x.at(row, col), count, v);
            load<N>(gate.at(row, col), count, z);
            load<N>(dout.at(row, col), count, d);
            load<N>(weight + col, count, w);
            open_gates<Rounded<T>::value>(z, gates);
            differentiate(v, z, gates, d, w, scale, mean, dweight);
            store<N>(dx.at(row, col), count, v);
            store<N>(dgate.at(row, col), count, z);
            if (!partials) continue;
#pragma unroll
            for (int i = 0; i < N; i++)
                if (i < count) shares[col + i] = dweight[i] + (row == start ? 0.0f : shares[col + i]);
        }
    }
}

#define GATED_NORM(T, NAME, N) \
    extern "C" __global__ void __launch_bounds__(256) gated_norm_short_##NAME##_##N( \
        i64 rows, i64 cols, Matrix<T> x, Matrix<T> gate, const float *weight, float epsilon, Matrix<T> out, \
        i64 rows_per_block) { \
        norm_short<T, N>(rows, cols, x, gate, weight, epsilon, out, rows_per_block); \
    } \
    extern "C" __global__ void __launch_bounds__(256) gated_norm_long_##NAME##_##N( \
        i64 rows, i64 cols, Matrix<T> x, Matrix<T> gate, const float *weight, float epsilon, Matrix<T> out, i64) { \
        norm_long<T, N>(cols, x, gate, weight, epsilon, out); \
    }
#define GATED_NORM_BACKWARD(T, NAME, N, LENGTH) \
    extern "C" __global__ void __launch_bounds__(256, 2) gated_norm_backward_##LENGTH##_##NAME##_##N( \
        i64 rows, i64 cols, Matrix<T> x, Matrix<T> gate, const float *weight, float epsilon, Matrix<T> dout, Matrix<T> dx, \
        Matrix<T> dgate, i64 rows_per_block, float *partials) { \
        backward_##LENGTH<T, N>(rows, cols, x, gate, weight, epsilon, dout, dx, dgate, rows_per_block, partials); \
    }
#define BOTH_LENGTHS(T, NAME, N) GATED_NORM_BACKWARD(T, NAME, N, short) GATED_NORM_BACKWARD(T, NAME, N, long)
FOR_TYPES(GATED_NORM)
FOR_TYPES(BOTH_LENGTHS)
