// What all kernels share: element types, vectors of them, reductions, and the walk over a matrix.
//
// Sums are f32, results are rounded once, as on every other device.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INFINITY_F32 __int_as_float(0x7f800000)

// An index or label that stands for nothing.
#define IGNORE 0xffffffffu

struct bf16 {
    u16 bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

template <class T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Two numbers rounded to bf16, the first in the lower half.
__device__ __forceinline__ u32 rounded_pair(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// A matrix by its first element and the elements from one row to the next.
template <class T> struct Matrix {
    T *first;
    i64 stride;
    __device__ __forceinline__ T *at(i64 row, i64 col) const { return first + row * stride + col; }
};

// A matrix of either element type.
struct Mixed {
    void *first;
    i64 stride;
    i64 is_bf16;
};

// N elements that are read or written 16 bytes at a time.
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
    T at[N];
};

// The first `count` of N elements as f32, and zeros. All N of them lie at a multiple of 16 bytes.
template <int N, class T> __device__ __forceinline__ void load(const T *from, int count, float (&to)[N]) {
    if (count == N) {
        Pack<T, N> pack = *reinterpret_cast<const Pack<T, N> *>(from);
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = widen(pack.at[i]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = i < count ? widen(from[i]) : 0.0f;
    }
}

template <int N, class T> __device__ __forceinline__ void store(T *to, int count, const float (&from)[N]) {
    if (count == N) {
        Pack<T, N> pack;
#pragma unroll
        for (int i = 0; i < N; i++) pack.at[i] = narrow<T>(from[i]);
        *reinterpret_cast<Pack<T, N> *>(to) = pack;
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < count) to[i] = narrow<T>(from[i]);
    }
}

// Stores words at once.
__device__ __forceinline__ void store_two(void *to, u32 first, u32 second) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(first), "r"(second) : "memory");
}

__device__ __forceinline__ void store_four(void *to, const u32 (&words)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

// Moves elements bit by bit.
template <int N, class T> __device__ __forceinline__ void move(const T *from, T *to, int count) {
    if (count == N) {
        *reinterpret_cast<Pack<T, N> *>(to) = *reinterpret_cast<const Pack<T, N> *>(from);
    } else {
        for (int i = 0; i < count; i++) to[i] = from[i];
    }
}

template <int N> __device__ __forceinline__ void load(const Mixed &x, i64 row, i64 col, int count, float (&to)[N]) {
    i64 place = row * x.stride + col;
    if (x.is_bf16)
        load<N>(static_cast<const bf16 *>(x.first) + place, count, to);
    else
        load<N>(static_cast<const float *>(x.first) + place, count, to);
}

template <int N>
__device__ __forceinline__ void store(const Mixed &x, i64 row, i64 col, int count, const float (&from)[N]) {
    i64 place = row * x.stride + col;
    if (x.is_bf16)
        store<N>(static_cast<bf16 *>(x.first) + place, count, from);
    else
        store<N>(static_cast<float *>(x.first) + place, count, from);
}

// Evaluates `body(row, col, count)` for each vector of a matrix: so many blocks have a thread for each, and again from the start
// where these are too few.
template <int N, class Body> __device__ __forceinline__ void each_vector_of(i64 blocks, i64 rows, i64 cols, Body body) {
    i64 across = (cols + N - 1) / N;
    i64 total = rows * across;
    i64 step = blocks * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) {
        i64 row = 0, place = i;
        if (rows > 1) {
            // A division of 64 bits takes several times as long.
            if (total <= 0xffffffffll) {
                u32 quotient = (u32)i / (u32)across;
                row = quotient;
                place = (u32)i - quotient * (u32)across;
            } else {
                row = i / across;
                place = i - row * across;
            }
        }
        i64 col = place * N;
        i64 left = cols - col;
        body(row, col, (int)(left < N ? left : N));
    }
}

// The same for a row of the whole grid.
template <int N, class Body> __device__ __forceinline__ void each_vector(i64 rows, i64 cols, Body body) {
    each_vector_of<N>(gridDim.x, rows, cols, body);
}

// How many of so many rows there are. Mirrored by `RowCount` in rows.rs.
struct RowCount {
    i64 all;
    // 0 if all are there.
    const u32 *count;

    __device__ __forceinline__ operator i64() const { return count && *count < all ? *count : all; }
};

// The same with a row of blocks for each row, which spares the division, if the grid has such rows: see `Walk::shape_by_rows`.
template <int N, class Body> __device__ __forceinline__ void each_vector_by_rows(i64 rows, i64 cols, Body body) {
    if (gridDim.y == 1) return each_vector<N>(rows, cols, body);
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        i64 col = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N, left = cols - col;
        if (left > 0) body(row, col, (int)(left < N ? left : N));
    }
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

__device__ __forceinline__ float max_of_warp(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

// The sum over all threads of a block of whole warps, the same in each of them. Every thread calls it.
__device__ __forceinline__ float sum_of_block(float x) {
    __shared__ float parts[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = sum_of_warp(x);
    if (warps == 1) return x;
    // The parts of an earlier sum have been read.
    __syncthreads();
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    return sum_of_warp(lane < warps ? parts[lane] : 0.0f);
}

// Two sums in the time of one.
__device__ __forceinline__ void sums_of_block(float &x, float &y) {
    __shared__ float parts[2][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = sum_of_warp(x);
    y = sum_of_warp(y);
    if (warps == 1) return;
    __syncthreads();
    if (lane == 0) {
        parts[0][warp] = x;
        parts[1][warp] = y;
    }
    __syncthreads();
    x = sum_of_warp(lane < warps ? parts[0][lane] : 0.0f);
    y = sum_of_warp(lane < warps ? parts[1][lane] : 0.0f);
}

__device__ __forceinline__ float max_of_block(float x) {
    __shared__ float parts[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = max_of_warp(x);
    if (warps == 1) return x;
    __syncthreads();
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    return max_of_warp(lane < warps ? parts[lane] : -INFINITY_F32);
}

// The place of an index among `count` rows or columns from `first` on; -1 where it is not among them.
__device__ __forceinline__ i64 place_of(u32 index, u32 first, i64 count) {
    if (index == IGNORE || index < first) return -1;
    i64 place = index - first;
    return place < count ? place : -1;
}

// What can be wrong with an operand: the host reads it as `Defect`.
#define DEFECT_COLUMN 1ull
#define DEFECT_POSITION 2ull
#define DEFECT_ROW 3ull

__device__ __forceinline__ void report(u64 *defects, u64 what, u32 found, i64 limit) {
    *reinterpret_cast<volatile u64 *>(defects) = (what << 60) | ((u64)(limit & 0x0fffffff) << 32) | found;
}

// Counter-based random numbers: see kernel/random.rs and cpu/random.rs, whose integers these are.
__device__ __forceinline__ u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

__device__ __forceinline__ u64 seed_of(u64 seed, u64 number) {
    return mix(seed + 0x9e3779b97f4a7c15ull * (number + 1));
}

// The word at a column of the row whose key this is.
__device__ __forceinline__ u32 word(u64 key, u32 col) {
    u32 x = col + (u32)key;
    x = (x ^ (x >> 17)) * 0xed5ad4bbu + (u32)(key >> 32);
    x = (x ^ (x >> 11)) * 0xac4c1b51u;
    x = (x ^ (x >> 15)) * 0x31848babu;
    return x ^ (x >> 14);
}

// Activations: 0 SiLU, 1 GELU by the error function, 2 GELU by the hyperbolic tangent, 3 ReLU, 4 sigmoid; others change nothing.
#define TANH_SCALE 0.7978846f
#define TANH_CUBIC 0.044715f

// Where the result is rounded to bf16, the GPU's own exponential and reciprocal are exact enough.
template <class T> struct Rounded { static const bool value = sizeof(T) == 2; };

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The compiler's own short forms take more instructions, for numbers too small to matter.
template <bool ROUNDED> __device__ __forceinline__ float exponential(float x) {
    return ROUNDED ? power_of_two(x * 1.4426950408889634f) : expf(x);
}

template <bool ROUNDED> __device__ __forceinline__ float sigmoid(float x) {
    float divisor = 1.0f + exponential<ROUNDED>(-x);
    return ROUNDED ? reciprocal(divisor) : 1.0f / divisor;
}

// The share of a normal distribution below x, given exp(-x²/2). What is rounded to bf16 is computed by Abramowitz and
// Stegun's 7.1.26, which takes fewer instructions than erff: of the tail, so that small shares keep their digits.
template <bool ROUNDED> __device__ __forceinline__ float normal_distribution(float x, float falloff) {
    if (!ROUNDED) return 0.5f * erff(x * 0.70710678f) + 0.5f;
    float t = __fdividef(1.0f, fmaf(fabsf(x), 0.3275911f * 0.70710678f, 1.0f));
    float series = fmaf(fmaf(fmaf(fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f), t, -0.284496736f), t, 0.254829592f);
    float tail = 0.5f * t * series * falloff;
    return x < 0.0f ? tail : 1.0f - tail;
}

template <bool ROUNDED> __device__ __forceinline__ float normal_falloff(float x) {
    float magnitude = x * 0.70710678f;
    return exponential<ROUNDED>(-magnitude * magnitude);
}

// (1 + tanh u) / 2 is the sigmoid of this 2u.
__device__ __forceinline__ float tanh_argument(float x) {
    return x * (x * x * (2.0f * TANH_SCALE * TANH_CUBIC) + 2.0f * TANH_SCALE);
}

template <bool ROUNDED> __device__ __forceinline__ float activate(int activation, float x) {
    if (activation == 0) return x * sigmoid<ROUNDED>(x);
    if (activation == 1) return x * normal_distribution<ROUNDED>(x, ROUNDED ? normal_falloff<ROUNDED>(x) : 0.0f);
    if (activation == 2) return x * sigmoid<ROUNDED>(tanh_argument(x));
    if (activation == 3) return x < 0.0f ? 0.0f : x;
    if (activation == 4) return sigmoid<ROUNDED>(x);
    if (activation == 5) return tanhf(x);
    return x;
}

template <bool ROUNDED> __device__ __forceinline__ float activate_derivative(int activation, float x) {
    if (activation == 0) {
        float sigma = sigmoid<ROUNDED>(x);
        return x * (sigma * (1.0f - sigma)) + sigma;
    }
    if (activation == 1) {
        float falloff = normal_falloff<ROUNDED>(x);
        return x * (falloff * 0.3989423f) + normal_distribution<ROUNDED>(x, falloff);
    }
    if (activation == 3) return x > 0.0f ? 1.0f : 0.0f;
    if (activation == 4) {
        float sigma = sigmoid<ROUNDED>(x);
        return sigma * (1.0f - sigma);
    }
    if (activation == 5) {
        float share = tanhf(x);
        return (1.0f - share) * (1.0f + share);
    }
    float sigma = sigmoid<ROUNDED>(tanh_argument(x));
    float inner = x * x * (6.0f * TANH_SCALE * TANH_CUBIC) + 2.0f * TANH_SCALE;
    return x * (sigma * (1.0f - sigma)) * inner + sigma;
}

// A kernel for each element type and width of vectors.
#define FOR_TYPES(DEFINE) DEFINE(float, f32, 4) DEFINE(float, f32, 1) DEFINE(bf16, bf16, 8) DEFINE(bf16, bf16, 1)
