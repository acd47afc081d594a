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
        i64 rows, i64 cols, Matrix<T> gate, Matrix<T> up, Matrix<T> out, int activation) { \
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
        i64 rows, i64 cols, Matrix<T> gate, Matrix<T> up, Matrix<T> dout, Matrix<T> dgate, Matrix<T> dup, \
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
