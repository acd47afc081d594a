// What follows a product that the library leaves to us.

// out = activation(sums + bias), or out += …; without sums, zeros. Where wanted, the same without the activation.
#define FINISH(T, NAME, N) \
    extern "C" __global__ void finish_##NAME##_##N( \
        i64 rows, i64 cols, Mixed sums, Matrix<float> bias, Matrix<T> preactivation, Matrix<T> out, int activation, \
        int accumulate) { \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float x[N] = {}; \
            if (sums.first) load<N>(sums, row, col, count, x); \
            if (bias.first) { \
                float b[N]; \
                load<N>(bias.at(0, col), count, b); \
                for (int i = 0; i < N; i++) x[i] += b[i]; \
            } \
            if (accumulate) { \
                float y[N]; \
                load<N>(out.at(row, col), count, y); \
                for (int i = 0; i < N; i++) x[i] += y[i]; \
            } \
            if (preactivation.first) store<N>(preactivation.at(row, col), count, x); \
            for (int i = 0; i < N; i++) x[i] = activate<Rounded<T>::value>(activation, x[i]); \
            store<N>(out.at(row, col), count, x); \
        }); \
    }
FOR_TYPES(FINISH)
