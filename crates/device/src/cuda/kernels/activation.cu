// Activations and gated activations. Each element is read before it is written, so outputs may be inputs.

#define ACTIVATE(T, NAME, N) \
    extern "C" __global__ void activate_##NAME##_##N(i64 rows, i64 cols, Matrix<T> x, Matrix<T> out, int activation) { \
        each_vector_by_rows<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float v[N]; \
            load<N>(x.at(row, col), count, v); \
            for (int i = 0; i < N; i++) v[i] = activate<Rounded<T>::value>(activation, v[i]); \
            store<N>(out.at(row, col), count, v); \
        }); \
    }
FOR_TYPES(ACTIVATE)

#define ACTIVATE_BACKWARD(T, NAME, N) \
    extern "C" __global__ void activate_backward_##NAME##_##N( \
        i64 rows, i64 cols, Matrix<T> x, Matrix<T> dout, Matrix<T> dx, int activation) { \
        each_vector_by_rows<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float v[N], g[N]; \
            load<N>(x.at(row, col), count, v); \
            load<N>(dout.at(row, col), count, g); \
            for (int i = 0; i < N; i++) g[i] *= activate_derivative<Rounded<T>::value>(activation, v[i]); \
            store<N>(dx.at(row, col), count, g); \
        }); \
    }
FOR_TYPES(ACTIVATE_BACKWARD)

#define GATED(T, NAME, N) \
    extern "C" __global__ void gated_##NAME##_##N( \
        RowCount rows, i64 cols, Matrix<T> gate, Matrix<T> up, Matrix<T> out, int activation) { \
        each_vector_by_rows<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float g[N], u[N]; \
            load<N>(gate.at(row, col), count, g); \
            load<N>(up.at(row, col), count, u); \
            for (int i = 0; i < N; i++) u[i] *= activate<Rounded<T>::value>(activation, g[i]); \
            store<N>(out.at(row, col), count, u); \
        }); \
    }
FOR_TYPES(GATED)

#define GATED_BACKWARD(T, NAME, N) \
    extern "C" __global__ void gated_backward_##NAME##_##N( \
        RowCount rows, i64 cols, Matrix<T> gate, Matrix<T> up, Matrix<T> dout, Matrix<T> dgate, Matrix<T> dup, \
        int activation) { \
        each_vector_by_rows<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float g[N], u[N], d[N]; \
            load<N>(gate.at(row, col), count, g); \
            load<N>(up.at(row, col), count, u); \
            load<N>(dout.at(row, col), count, d); \
            for (int i = 0; i < N; i++) { \
                u[i] = activate_derivative<Rounded<T>::value>(activation, g[i]) * (d[i] * u[i]); \
                d[i] *= activate<Rounded<T>::value>(activation, g[i]); \
            } \
            store<N>(dgate.at(row, col), count, u); \
            store<N>(dup.at(row, col), count, d); \
        }); \
    }
FOR_TYPES(GATED_BACKWARD)

// Gates in even columns, the rest in odd ones: 2N of them beside N of the output. See cpu/clamped_gate.rs.
template <int N, class T>
__device__ __forceinline__ void load_pairs(const Matrix<T> &x, i64 row, i64 col, int count, float (&pairs)[2][N]) {
    int first = 2 * count < N ? 2 * count : N;
    load<N>(x.at(row, 2 * col), first, pairs[0]);
    load<N>(x.at(row, 2 * col + N), 2 * count - first, pairs[1]);
}

template <int N> __device__ __forceinline__ float &nth(float (&pairs)[2][N], int i) { return pairs[i / N][i % N]; }

struct ClampedPair {
    float gate, up, sigma;
};

// Not `fminf`, which would lose NaN.
template <class T> __device__ __forceinline__ ClampedPair clamped(float gate, float up, float limit, float slope) {
    if (gate > limit) gate = limit;
    if (up > limit) up = limit;
    if (up < -limit) up = -limit;
    return {gate, up, sigmoid<Rounded<T>::value>(slope * gate)};
}

#define CLAMPED_GATE(T, NAME, N) \
    extern "C" __global__ void clamped_gate_##NAME##_##N( \
        RowCount rows, i64 cols, Matrix<T> x, Matrix<T> out, float limit, float slope) { \
        each_vector_by_rows<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float pairs[2][N], v[N]; \
            load_pairs<N>(x, row, col, count, pairs); \
            _Pragma("unroll") for (int i = 0; i < N; i++) { \
                ClampedPair pair = clamped<T>(nth<N>(pairs, 2 * i), nth<N>(pairs, 2 * i + 1), limit, slope); \
                v[i] = (pair.up + 1.0f) * pair.gate * pair.sigma; \
            } \
            store<N>(out.at(row, col), count, v); \
        }); \
    }
FOR_TYPES(CLAMPED_GATE)

#define CLAMPED_GATE_BACKWARD(T, NAME, N) \
    extern "C" __global__ void clamped_gate_backward_##NAME##_##N( \
        RowCount rows, i64 cols, Matrix<T> x, Matrix<T> dout, Matrix<T> dx, float limit, float slope) { \
        each_vector_by_rows<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float pairs[2][N], d[N]; \
            load_pairs<N>(x, row, col, count, pairs); \
            load<N>(dout.at(row, col), count, d); \
            _Pragma("unroll") for (int i = 0; i < N; i++) { \
                float &gate = nth<N>(pairs, 2 * i), &up = nth<N>(pairs, 2 * i + 1); \
                ClampedPair pair = clamped<T>(gate, up, limit, slope); \
                float outer = d[i] * (pair.up + 1.0f) * pair.sigma; \
                gate = gate > limit ? 0.0f : outer * fmaf(slope * pair.gate, 1.0f - pair.sigma, 1.0f); \
                up = fabsf(up) > limit ? 0.0f : d[i] * (pair.gate * pair.sigma); \
            } \
            int first = 2 * count < N ? 2 * count : N; \
            store<N>(dx.at(row, 2 * col), first, pairs[0]); \
            store<N>(dx.at(row, 2 * col + N), 2 * count - first, pairs[1]); \
        }); \
    }
FOR_TYPES(CLAMPED_GATE_BACKWARD)
