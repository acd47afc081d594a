// Random numbers as a function of seed and place. The integers are those of cpu/random.rs; what is made of them in f32
// may differ by rounding.

__device__ __forceinline__ float logarithm(float u) {
    int bits = __float_as_int(u);
    int e = (bits - 0x3f3504f3) >> 23;
    float m = __int_as_float(bits - (e << 23));
    float z = (m - 1.0f) / (m + 1.0f);
    float zz = z * z;
    float series = 2.0f + zz * (2.0f / 3.0f + zz * (2.0f / 5.0f + zz * (2.0f / 7.0f + zz * (2.0f / 9.0f))));
    return fminf(e * 0.69314718f + z * series, 0.0f);
}

__device__ __forceinline__ float cosine_of_turns(u32 angle) {
    float turns = fabsf((float)(int)angle * 2.3283064365386963e-10f);
    float y = (0.25f - turns) * 6.2831853f;
    float yy = y * y;
    float series = 1.0f / 120.0f + yy * (-1.0f / 5040.0f + yy * (1.0f / 362880.0f + yy * (-1.0f / 39916800.0f)));
    return y * (1.0f + yy * (-1.0f / 6.0f + yy * series));
}

__device__ __forceinline__ float normal(u32 radius, u32 angle) {
    float u = (float)(radius | 1u) * 2.3283064365386963e-10f;
    return sqrtf(-2.0f * logarithm(u)) * cosine_of_turns(angle);
}

// The seeds are those of the draws.
#define RANDOM_NORMAL(T, NAME, N) \
    extern "C" __global__ void random_normal_##NAME##_##N( \
        i64 rows, i64 cols, Matrix<T> out, u64 radius_seed, u64 angle_seed, u64 first_row, u64 first_col, float mean, \
        float deviation) { \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            u64 radius = seed_of(radius_seed, first_row + row), angle = seed_of(angle_seed, first_row + row); \
            u32 first = (u32)(first_col + col); \
            float x[N]; \
            for (int i = 0; i < N; i++) \
                x[i] = fmaf(normal(word(radius, first + i), word(angle, first + i)), deviation, mean); \
            store<N>(out.at(row, col), count, x); \
        }); \
    }
FOR_TYPES(RANDOM_NORMAL)

#define DROPOUT(T, NAME, N) \
    extern "C" __global__ void dropout_##NAME##_##N( \
        i64 rows, i64 cols, Matrix<T> x, Matrix<T> out, const u32 *places, u64 seed, u64 first_row, u64 first_col, \
        u32 dropped_below, float factor) { \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            u64 key = seed_of(seed, first_row + (places ? places[row] : row)); \
            u32 first = (u32)(first_col + col); \
            float v[N]; \
            load<N>(x.at(row, col), count, v); \
            for (int i = 0; i < N; i++) v[i] = word(key, first + i) < dropped_below ? 0.0f : v[i] * factor; \
            store<N>(out.at(row, col), count, v); \
        }); \
    }
FOR_TYPES(DROPOUT)
